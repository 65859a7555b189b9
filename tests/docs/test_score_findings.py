"""Studies of ``docs/findings`` about scores and long texts: their statistics against brute force, and their rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    "pairing": {
        "TEXTS": {32: 4, 64: 2},
        "LENGTH": 32,
        "NEEDLES": {"length": 160, "pairs": 2},
        "DRAWS": 20,
        "LEAST": {"induction": 0.05, "retrieval": 0.05},
    },
    "length": {
        "TRAINED": 48,
        "LONGEST": 72,
        "BEYOND": 64,
        "PART": 8,
        "EDGES": [40, 48, 56, 64],
        "TEXTS": 2,
        "SHORT": 24,
        "COMPARED": 8,
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module")
def findings() -> Iterator[Any]:
    """The scripts by name, for small texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import length
        import pairing
        import scores
        import texts

        for name, sizes in SIZES.items():
            for size, value in sizes.items():
                patch.setattr(sys.modules[name], size, value)
        patch.setattr(length, "whole", lambda source: tp.demo_text())
        patch.setattr(length, "parts", lambda model, source, *sizes: texts.parts(model, "demo", *sizes))
        yield SimpleNamespace(length=length, pairing=pairing, scores=scores, texts=texts)


def of_context(n: int) -> Any:
    """Two layers of four heads, two key heads, with large random weights and the demo model's tokenizer."""
    size = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    size |= {"num_key_value_heads": 2, "vocab_size": 1100, "max_position_embeddings": n}
    config = LlamaConfig(initializer_range=0.3, **size)
    return tp.bridge_from_hf(LlamaForCausalLM(config), tokenizer=demo_tokenizer())


@pytest.fixture(scope="module")
def model() -> Any:
    return of_context(48)


@pytest.fixture(scope="module")
def for_needles() -> Any:
    return of_context(160)


def test_the_area_counts_pairs(findings: Any) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        values, has = generator.integers(0, 5, 30), generator.random(30) < 0.3
        pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(values[has], values[~has])]
        assert findings.pairing.area(values, has) == pytest.approx(np.mean(pairs))


def test_partial_correlation_by_the_formula_for_one_variable(findings: Any) -> None:
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=["a", "b", "c"])
    table["b"] += table["c"]
    r = table.corr(method="spearman")
    expected = (r.loc["a", "b"] - r.loc["a", "c"] * r.loc["b", "c"]) / np.sqrt(
        (1 - r.loc["a", "c"] ** 2) * (1 - r.loc["b", "c"] ** 2)
    )
    assert findings.pairing.partial_correlation(table, "a", "b", ["c"]) == pytest.approx(expected)


def test_statistics_of_a_head(findings: Any, model: Any) -> None:
    texts = findings.texts.parts(model, "demo", 2, 32)
    table = findings.pairing.statistics(model, texts).groupby(["layer", "head"]).mean()
    beside = tp.additivity(model, texts, sinks=1, controls=["foreign keys"], progress=False)
    r2 = beside.set_index(["scores", "batch", "layer", "head"])["r2"]
    for head in (0, 3):
        ratios = [(1 - r2["own", n, 1, head]) / (1 - r2["foreign keys", n, 1, head]) for n in (0, 1)]
        assert table.loc[(1, head), "pairing"] == pytest.approx(np.mean(ratios))
        entropy, variance = [], []
        for text in texts:
            with torch.no_grad():
                _, cache = model.run_with_cache(text[None])
            pattern, scores = (cache[f"blocks.1.attn.hook_{x}"][0, head].double() for x in ("pattern", "attn_scores"))
            rows = [-sum(p * p.log() for p in row if p > 0) for row in pattern[8:]]
            entropy.append(float(np.mean(rows)))
            variance.append(float(torch.cat([scores[i, 1 : i + 1] for i in range(32)]).var()))
        assert table.loc[(1, head), "low entropy"] == pytest.approx(-np.mean(entropy), rel=1e-4)
        assert table.loc[(1, head), "variance of scores"] == pytest.approx(np.mean(variance), rel=1e-4)


def test_label_retrieval_is_attention_to_the_answer_minus_that_to_the_decoy(findings: Any, for_needles: Any) -> None:
    model = for_needles
    needles, expected = tp.experiments.needle_texts(model, length=160, pairs=2), list[float]()
    for tokens, (answer, decoy) in zip(needles.tokens, needles.places.tolist(), strict=True):
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens[None])
        row = cache["blocks.1.attn.hook_pattern"][0, 3, -1]
        expected.append((row[answer] - row[decoy]).item())
    labels = findings.pairing.labels_of(model).set_index(["layer", "head"])
    assert labels.loc[(1, 3), "retrieval"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert not labels.isna().any(axis=None)


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


@pytest.fixture(scope="module")
def given(findings: Any, model: Any, for_needles: Any) -> dict[str, set[str]]:
    """The names of the rows of each study."""
    found = {}
    for module in (findings.scores, findings.pairing, findings.length):
        of = for_needles if module is findings.pairing else model
        for study in module.STUDIES:
            source = "wikitext" if module is findings.length else "demo"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(findings.texts, "whole", lambda source: tp.demo_text())
                found[study] = {row.name for row in getattr(module, study)(of, source)}
    return found


def test_studies_give_the_rows_of_the_committed_tables(given: dict[str, set[str]]) -> None:
    sized = {"beyond", "pairing"}  # names with positions or counts
    for path in sorted((FOLDER / "tables").glob("*.csv")):
        for study, rows in pd.read_csv(path).groupby("study"):
            if study in given and study not in sized:
                assert set(rows["name"]) <= given[study], (path.name, study)


@pytest.mark.parametrize(("of", "folder"), [("smollm2", "smollm2"), ("gemma3-270m", "gemma3")])
def test_retrieval_heads_are_those_of_the_page_on_retrieval(of: str, folder: str) -> None:
    attention = pd.read_csv(ROOT / "docs" / "figures" / folder / "retrieval_scores.csv")["attention"]
    for path in sorted((FOLDER / "tables").glob(f"{of}_*.csv")):
        rows = pd.read_csv(path).query("study == 'pairing' and name.str.startswith('AUC for retrieval')")
        heads = {over.partition(",")[0] for over in rows["over"]}
        assert heads <= {f"{(attention > 0.1).sum()} of {len(attention)} heads"}, path
        assert heads or path.stem == "smollm2_wikitext"


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
