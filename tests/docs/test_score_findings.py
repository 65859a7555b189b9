"""Studies of ``docs/findings`` about scores and long texts: their statistics against brute force, and their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from support.packaged_models import needs
from support.pages import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

import tl_posdisent as tp
from tl_posdisent.demo import demo_tokenizer

FOLDER = ROOT / "docs" / "findings"
SIZES: dict[str, dict[str, Any]] = {
    "scores": {"TEXTS": 2, "LENGTH": 48},
    "length": {"TRAINED": 48, "LONGEST": 72, "BEYOND": 64, "PART": 8, "WATCHED": (0, 1), "EDGES": [40, 48, 56, 64]},
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module")
def findings() -> Iterator[Any]:
    """The scripts by name, for small texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import length
        import scores
        import texts

        for name, sizes in SIZES.items():
            for size, value in sizes.items():
                patch.setattr(sys.modules[name], size, value)
        patch.setattr(length, "whole", lambda source: tp.demo_text())
        yield SimpleNamespace(length=length, scores=scores, texts=texts)


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers of four heads, two key heads, with large random weights and the demo model's tokenizer."""
    size = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    size |= {"num_key_value_heads": 2, "vocab_size": 1100, "max_position_embeddings": 48}
    config = LlamaConfig(initializer_range=0.3, **size)
    return tp.bridge_from_hf(LlamaForCausalLM(config), tokenizer=demo_tokenizer())


def test_the_difference_is_that_of_two_runs(findings: Any, model: Any) -> None:
    """Without a cache: 64 tokens, and the same without the 24 after the first."""
    difference = findings.length.difference(model, 0)
    ids = model.to_tokens(tp.demo_text(), truncate=False)[0]
    whole = torch.cat([ids[:1], ids[1:64]])[None]
    with tp.models.longer_context(model, 64), torch.no_grad():
        found = [
            model(x, return_type="loss", loss_per_token=True)[0]
            for x in (whole, torch.cat([whole[:, :1], whole[:, 25:]], 1))
        ]
    torch.testing.assert_close(difference, found[0][24:] - found[1], rtol=1e-3, atol=1e-4)


def test_outputs_outside_the_circle(findings: Any) -> None:
    z = torch.randn(2, 4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 4.0, 1.0])
    circle = findings.length.plane(z)
    assert findings.length.outside(z, circle) == pytest.approx(0.01, abs=0.001)
    assert findings.length.outside(z + 100, circle) == 1


@pytest.fixture(scope="module")
def given(findings: Any, model: Any) -> dict[str, set[str]]:
    """The names of the rows of each study."""
    found = {}
    for module in (findings.scores, findings.length):
        for study in module.STUDIES:
            source = "wikitext" if module is findings.length else "demo"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(findings.texts, "whole", lambda source: tp.demo_text())
                found[study] = {row.name for row in getattr(module, study)(model, source)}
    return found


def test_studies_give_the_rows_of_the_committed_tables(given: dict[str, set[str]]) -> None:
    sized = {"beyond"}  # names with positions
    for path in sorted((FOLDER / "tables").glob("*.csv")):
        for study, rows in pd.read_csv(path).groupby("study"):
            if study in given and study not in sized:
                assert set(rows["name"]) <= given[study], (path.name, study)


def test_smollm2_has_the_committed_losses() -> None:
    needs("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import rows
        import texts

        model = tp.load_model("smollm2")
        some = texts.parts(model, "demo", 4, 256)
        table = pd.read_csv(FOLDER / "tables" / "smollm2_demo.csv").set_index(["study", "name"])["value"]
        base = rows.losses(model, some)
        assert table["fixed_distance", "loss"] == pytest.approx(base.mean().item(), abs=1e-3)
        added = rows.losses(model, some, tp.dummy_distance(model, 5)) - base
        assert table["fixed_distance", "added loss, every distance 5"] == pytest.approx(added.mean().item(), abs=1e-3)
