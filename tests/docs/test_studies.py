"""The committed tables of real models are what their scripts write: columns and names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from tl_posdisent import bridge_from_hf
from tl_posdisent.demo import demo_tokenizer

FIGURES = ROOT / "docs" / "figures"
pytestmark = [pytest.mark.slow, pytest.mark.release]

SHORT = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "idle": {"heads": [(1, 0), (0, 1)]},
    "measures": {"heads": [(1, 0), (0, 1)]},
    "largest_effects": {"length": SHORT},
    "text_needed": {"of": 4},
    "draws_needed": {"of": 4},
    "without_rotation": {
        "texts": 2,
        "draws": 1,
        "every": 2,
        "length": SHORT,
        "edges": (1, 12, SHORT),
        "global_layers": [1],
    },
    "needles": {"lengths": (160, 192), "pairs": 2, "draws": 1, "every": 2, "global_layers": [1]},
    "word_order": {"texts": 2, "length": 80},
    "retrieval_scores": {"length": 160},
    "retrieval_knockout": {"lengths": (160, 192), "count": 1},
    "retrieval_losses": {"length": 160, "texts": 2, "draws": 1, "count": 1, "pairs": 2},
    "retrieval_rotation": {"lengths": (160, 192), "count": 1},
    "retrieval_distances": {"lengths": (160, 192), "pairs": (2, 2), "seeds": (2, 3), "count": 1},
    "looks": {"copies": 2},
    "score_terms": {"heads": {"induction": (1, 0), "previous token": (1, 1)}},
}
VERDICTS = ("verdict", "between", "estimate", "simplest", "at_most", "label", "model")
# Names that the size of the text or of the model gives.
BY_SIZE = (
    "intervention",
    "length",
    "wavelengths below",
    "where",
    "heads",
    "ablated",
    "positions",
    "row",
    "table",
    "source",
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script, with texts of 24 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIGURES))
        import real_models

        if not sys.modules["stories"].data_file("speeches-heldout.txt.gz").is_file():
            pytest.skip("needs speeches-heldout.txt.gz and others (POSDISENT_DATA names the folder)")
        patch.setattr(real_models, "LENGTH", SHORT)
        patch.setattr(sys.modules["trained_and_random"], "LENGTH", SHORT)
        patch.setattr(sys.modules["retrieval"], "TOLERANCE", 9.0)  # so that another band is found
        yield real_models


@pytest.fixture(scope="module")
def written(script: Any) -> dict[str, pd.DataFrame]:
    """What each study gives for two layers of two heads with the demo model's tokenizer."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=1100, max_position_embeddings=256, **size)
    model, found = bridge_from_hf(LlamaForCausalLM(config), tokenizer=demo_tokenizer()), dict[str, pd.DataFrame]()
    for study in script.STUDIES:
        found[study.__name__] = study(model, **OPTIONS.get(study.__name__, {}))
    return found


@pytest.mark.usefixtures("unchecked")
def test_committed_tables_have_the_columns_and_names_of_what_their_studies_give(
    written: dict[str, pd.DataFrame],
) -> None:
    by_model = [sorted((FIGURES / folder).glob("*.csv")) for folder in ("smollm2", "gemma3")]
    assert min(map(len, by_model)) >= 2
    paths = [path for some in by_model for path in some if not path.stem.startswith("trained_and_random")]
    for path in paths:
        table, again = pd.read_csv(path), written[path.stem]
        assert list(table) == list(again), path
        names = set(table.select_dtypes(["object", "string"])) - {*BY_SIZE, *VERDICTS}
        for name in names:
            assert set(table[name].dropna().map(str)) <= set(again[name].dropna().map(str)), (path, name)
