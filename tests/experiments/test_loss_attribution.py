"""Shapley values by brute force over orders; the backward pass by finite differences, and a model left as it was."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.untouched import state
from torch import Tensor

from tl_posdisent.experiments import component_attribution, shapley_values
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.edits.scores import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import layer_hooks
from tl_posdisent.hooks.score_components import split_scores
from tl_posdisent.models import read_model

TOKENS = zoo.random_tokens(length=9, batch=2)
PARTS = ("distance", "query", "key", "residual")
SUBSETS = [some for n in range(5) for some in combinations(PARTS, n)]
pytestmark = pytest.mark.usefixtures("unchecked")


def table_of(values: dict[tuple[str, ...], float]) -> pd.DataFrame:
    rows = [("all", "fit", "+".join(keep) or "mean", value, 2 * value) for keep, value in values.items()]
    other = [("all", "zero", "", 9.0, 9.0), ("layer", "fit", "distance+query+key", 8.0, 8.0)]
    return pd.DataFrame([*other, *rows[::-1]], columns=["scope", "put_in", "keep", "loss", "kl"])


def random_table(seed: int) -> tuple[pd.DataFrame, dict[tuple[str, ...], float]]:
    drawn = torch.randn(16, generator=torch.Generator().manual_seed(seed)).tolist()
    values = dict(zip(SUBSETS, drawn, strict=True))
    return table_of(values), values


@pytest.mark.parametrize("seed", range(3))
def test_shapley_values_are_the_means_over_all_orders(seed: int) -> None:
    table, values = random_table(seed)
    wanted = dict.fromkeys(PARTS, 0.0)
    for order in permutations(PARTS):
        for n, component in enumerate(order):
            before, after = (tuple(sorted(order[: n + m], key=PARTS.index)) for m in (0, 1))
            wanted[component] += (values[after] - values[before]) / 24
    got = shapley_values(table).set_index("component")
    assert got["value"].tolist() == pytest.approx([wanted[component] for component in PARTS], abs=1e-12)
    assert got["value"].sum() == pytest.approx(values[PARTS] - values[()], abs=1e-12)
    assert got.loc["key", "first"] == pytest.approx(values[("key",)] - values[()])
    assert got.loc["key", "last"] == pytest.approx(values[PARTS] - values[("distance", "query", "residual")])
    assert shapley_values(table, "kl")["value"].tolist() == pytest.approx((2 * got["value"]).tolist())


def test_incomplete_and_repeated_tables_are_refused() -> None:
    table, _ = random_table(0)
    with pytest.raises(ValueError, match=r"one row for each of the 16 subsets.*got 15 rows for 15"):
        shapley_values(table.drop(index=2))
    with pytest.raises(ValueError, match="got 32 rows for 16"):
        shapley_values(pd.concat([table, table]))
    with pytest.raises(ValueError, match="what additive_substitution returned, got \\['a'\\]"):
        shapley_values(pd.DataFrame({"a": [1]}))


# --- one backward pass ----------------------------------------------------------------------------------------


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    log_p = logits[:, :-1].double().log_softmax(-1)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0].mean(-1)


def scaled(spec: Any, head: int, component: str, by: float) -> list[Any]:
    def edit(view: View) -> Tensor:
        scores = view.scores()
        return scores.double() + by * split_scores(scores, view.inside)[component]

    return layer_hooks(spec, [head], ScoreEdit("test", edit, Order.COMPONENT, scores=True))


@pytest.mark.parametrize(
    ("kind", "name"),
    [*zoo.cases("llama-gqa"), ("bridge", "gptj"), ("bridge", "gpt2"), ("bridge", "gpt_oss"), ("hooked", "mistral")],
)
def test_values_are_finite_differences(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = component_attribution(model, TOKENS, loss).set_index(["layer", "head"])
    step, sizes = 0.02, []
    for layer, head in ((0, 0), (0, 5), (1, 3)):
        spec = read_model(model).specs([layer])[0]
        for component in ("mean", *PARTS):
            values = []
            for by in (step, -step):
                with torch.no_grad(), applied(model, scaled(spec, head, component, by)):
                    values.append(float(loss(model(TOKENS), TOKENS).mean()))
            slope = (values[0] - values[1]) / (2 * step)
            assert table.loc[(layer, head), component] == pytest.approx(slope, abs=2e-4, rel=0.02)
            sizes.append(abs(slope))
    assert max(sizes) > 5e-3
    if name != "gpt_oss":  # which has attention sinks
        assert table[["mean", "query"]].abs().to_numpy().max() < 1e-5


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_the_model_is_left_as_it_was(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    parameters = list(model.parameters())
    before, grads = state(model), [(p.requires_grad, p.grad) for p in parameters]
    with torch.no_grad():
        frozen = component_attribution(model, TOKENS)
    for p in parameters:
        p.requires_grad_(not p.requires_grad)
    try:
        pd.testing.assert_frame_equal(component_attribution(model, TOKENS), frozen)
    finally:
        for p in parameters:
            p.requires_grad_(not p.requires_grad)
    assert state(model) == before
    assert [(p.requires_grad, p.grad) for p in parameters] == grads


def test_a_choice_of_heads(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    some = component_attribution(model, TOKENS, heads=[(1, 6), (1, 2)]).set_index(["layer", "head"])
    whole = component_attribution(model, TOKENS).set_index(["layer", "head"])
    pd.testing.assert_frame_equal(some, whole.loc[[(1, 6), (1, 2)]], atol=1e-6)


def test_a_metric_without_gradients_is_refused(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for metric in (lambda logits, tokens: logits.detach().mean(), lambda logits, tokens: logits.mean().item()):
        with pytest.raises(ValueError, match="metric must be differentiable"):
            component_attribution(model, TOKENS, metric)
    assert all(p.grad is None for p in model.parameters())
