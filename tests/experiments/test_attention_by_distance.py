"""Mean attention by distance is that of the patterns of the model's own runs, cell by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo

import tl_posdisent as tp
from tl_posdisent.experiments import attention_by_distance, intervention_losses
from tl_posdisent.experiments.attention_scores.attention_by_distance import mean_attention
from tl_posdisent.experiments.where_what.head_looks import first_token_share, profile_without_first
from tl_posdisent.models.running.texts import read_texts

TOKENS = zoo.random_tokens(length=24, batch=3)
QUIET: dict[str, Any] = {"progress": False}


def by_hand(model: Any, texts: list[torch.Tensor], hooks: Any, layer: int, head: int) -> dict[int, list[float]]:
    """The weights of one head by distance, from loops over the queries and keys of patterns in the model's cache."""
    weights: dict[int, list[float]] = {}
    spec = tp.read_model(model).specs(layer)[0]
    for text in texts:
        seen: dict[str, torch.Tensor] = {}
        keep = (str(spec.taps.pattern), lambda x, hook, seen=seen: seen.update(x=x.detach()))
        with torch.no_grad():
            model.run_with_hooks(text[None], fwd_hooks=[*hooks, keep])
        for query in range(len(text)):
            for key in range(query + 1):
                if spec.window is None or query - key < spec.window:
                    weights.setdefault(query - key, []).append(float(seen["x"][0, head, query, key]))
    return weights


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
def test_the_first_token_is_kept_apart(kind: str, name: str, shared_model: Any) -> None:
    """By loops over queries and other keys, in texts of unequal length, also where a window hides the first token."""
    model, mask = shared_model(kind, name), torch.ones_like(TOKENS)
    mask[1, :9] = 0
    reading = tp.read_model(model)
    specs = reading.specs([0, 1])
    table = mean_attention(reading, read_texts(model, TOKENS, mask), [(s, [0, 3]) for s in specs], [], whole=False)
    for spec in specs:
        others: dict[int, list[float]] = {}
        first: list[float] = []
        for row, real in zip(TOKENS, mask, strict=True):
            _, cache = model.run_with_cache(row[real.bool()][None], names_filter=str(spec.taps.pattern))
            pattern = cache[str(spec.taps.pattern)][0, 3].double()
            first += pattern[1:, 0].tolist()
            for query, key in spec.mask(len(pattern)).nonzero().tolist():
                if key > 0:
                    others.setdefault(query - key, []).append(float(pattern[query, key]))
        rows = table[(table["layer"] == spec.layer) & (table["head"] == 3)]
        profile = profile_without_first(rows)
        assert profile["distance"].tolist() == sorted(others)
        assert profile["cells"].tolist() == [len(others[d]) for d in sorted(others)]
        assert profile["attention"].tolist() == pytest.approx([np.mean(others[d]) for d in sorted(others)], abs=1e-6)
        assert first_token_share(rows) == pytest.approx(np.mean(first), abs=1e-6)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2", "gemma2"))
def test_means_are_those_of_a_loop_over_cells(kind: str, name: str, shared_model: Any) -> None:
    """Of texts of unequal length; the model is as before."""
    model, mask = shared_model(kind, name), torch.ones_like(TOKENS)
    mask[1, :9] = 0
    texts = [row[real.bool()] for row, real in zip(TOKENS, mask, strict=True)]
    rotary = tp.read_model(model).specs(1)[0].rotary is not None
    hooks = tp.dummy_distance(model, 3) if rotary else [("blocks.1.hook_resid_pre", lambda x, hook: x.flip(-1))]
    table = attention_by_distance(model, TOKENS, {"changed": hooks}, attention_mask=mask, layers=[0, 1], **QUIET)
    assert table["intervention"].unique().tolist() == ["unmodified", "changed"]
    for name, some in (("unmodified", []), ("changed", hooks)):
        for layer, head in ((0, 0), (1, 3)):
            weights = by_hand(model, texts, some, layer, head)
            rows = table[(table["intervention"] == name) & (table["layer"] == layer) & (table["head"] == head)]
            assert rows["distance"].tolist() == sorted(weights)
            assert rows["cells"].tolist() == [len(weights[d]) for d in sorted(weights)]
            expected = [np.mean(weights[d]) for d in sorted(weights)]
            assert rows["attention"].tolist() == pytest.approx(expected, abs=1e-6)
    both = [table.query("intervention == @x")["attention"].to_numpy() for x in table["intervention"].unique()]
    assert np.abs(both[0] - both[1]).max() > 1e-3
    totals = (table["attention"] * table["cells"]).groupby([table["intervention"], table["layer"], table["head"]]).sum()
    assert totals.to_numpy() == pytest.approx(2 * 24 + 15, rel=1e-5)
    alone = attention_by_distance(model, TOKENS, attention_mask=mask, layers=[0, 1], **QUIET)
    pd.testing.assert_frame_equal(alone, table.query("intervention == 'unmodified'"))


def test_an_intervention_on_one_layer_leaves_the_layers_before_it() -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=48)
    table = attention_by_distance(model, tokens, {"five": tp.dummy_distance(model, 5, layers=[2])}, **QUIET)
    changed = table.groupby(["layer", "head", "distance"])["attention"].agg(np.ptp).groupby("layer").max()
    assert (changed[[0, 1]] == 0).all()
    assert (changed[[2, 3, 4]] > 0.01).all()


@pytest.mark.usefixtures("unchecked")
def test_what_the_other_tool_refuses_is_refused() -> None:
    model = tp.load_demo_model()
    for tool in (attention_by_distance, intervention_losses):
        with pytest.raises(ValueError, match="interventions must be hooks by name"):
            tool(model, TOKENS, 3, **QUIET)
