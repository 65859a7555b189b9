"""Rows of chosen heads are those of the whole table, and only these heads are measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import by_cost, slow
from support.public import public_names
from support.public_calls import call

import tl_posdisent as tp
from tl_posdisent import experiments as ex
from tl_posdisent.experiments.attention_scores import additivity as additivity_module
from tl_posdisent.experiments.attention_scores import score_controls
from tl_posdisent.experiments.attention_scores.score_controls import ScoreControl
from tl_posdisent.utils.errors import ArgumentError

TOKENS = zoo.random_tokens(14, batch=3)
REAL = torch.arange(14) >= torch.tensor([[0], [4], [0]])  # the second text is padded on the left
TEXTS: dict[str, Any] = {"tokens": TOKENS.where(REAL, 0), "attention_mask": REAL.long(), "progress": False}
HEADS = [(1, 6), (0, 2), (1, 3)]
CONTROLS: tuple[ScoreControl, ...] = ("foreign keys",)

# Columns that say which of the heads that are asked for were run.
SEARCHED = {"exact", "exact_se", "kl", "kl_se"}

Call = Callable[..., pd.DataFrame]


def of_heads(table: pd.DataFrame, heads: list[tuple[int, int]] = HEADS) -> pd.DataFrame:
    return table[pd.MultiIndex.from_frame(table[["layer", "head"]]).isin(heads)].reset_index(drop=True)


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5, atol=1e-6)


def tables_of_heads() -> Any:
    """Experiments that return a table, and take layers and heads."""
    found = [
        function
        for name, function in public_names().items()
        if inspect.isfunction(function)
        and function.__module__.startswith("tl_posdisent.experiments")
        and {"attention_mask", "layers", "heads"} <= set(inspect.signature(function).parameters)
    ]
    return pytest.mark.parametrize("function", by_cost(found))


@tables_of_heads()
def test_rows_of_chosen_heads(function: Call, shared_reading: Any) -> None:
    """They are equal, in the order of the whole table, in a batch with padding."""
    name, reading = function.__name__, shared_reading("bridge", "llama-gqa")
    options = TEXTS | {"length_generalization": {"by": "head", "lengths": [0, 4, 10]}}.get(name, {})
    if name in ("component_patching", "head_patching"):
        options |= {"source": ((TOKENS * 7) % 58 + 3).where(REAL, 0)}
    options |= {"position_patching": {"positions": torch.arange(14) ** 1.1}}.get(name, {})
    whole, some = (call(function, reading, **options, heads=heads) for heads in (None, HEADS))
    searched = [*SEARCHED.intersection(whole)] if name == "head_effects" else []
    assert {*zip(some["layer"], some["head"], strict=True)} == {*HEADS}
    same(some.drop(columns=searched), of_heads(whole).drop(columns=searched))


VARIANTS: dict[str, Call] = {
    "pooled": lambda model, **more: tp.additivity(model, **TEXTS, pool=True, **more),
    "controls": lambda model, **more: tp.additivity(model, **TEXTS, controls=CONTROLS, **more),
    "by subspace": lambda model, **more: tp.subspace_patterns(model, **TEXTS, sinks=1, **more),
    "interventions": lambda model, **more: ex.attention_by_distance(
        model, interventions={"five": tp.dummy_distance(model, 5)}, **TEXTS, **more
    ),
    "hooks": lambda model, **more: tp.length_generalization(
        model, **TEXTS, lengths=[0, 4, 10], hooks=tp.lambda_mask(model, 1, 3, 3), by="head", **more
    ),
    "disentanglement": lambda model, **more: tp.disentanglement(model, **TEXTS, **more),
}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
@pytest.mark.parametrize("variant", [*(x for x in VARIANTS if x != "controls"), *slow(["controls"])])
def test_rows_of_chosen_heads_with_options(variant: str, kind: str, name: str, shared_model: Any) -> None:
    model, measure = shared_model(kind, name), VARIANTS[variant]
    whole = measure(model)
    same(measure(model, heads=HEADS), of_heads(whole))
    layers = whole["layer"] == 1
    same(measure(model, layers=1), whole[layers].reset_index(drop=True))
    same(measure(model, layers=1, heads=[6, 3]), of_heads(whole[layers], [(1, 3), (1, 6)]))


def test_only_the_layers_and_heads_that_are_asked_for_are_fitted(
    shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    text_marginals, for_each_scores = additivity_module.text_marginals, score_controls.for_each_scores

    def fitted(texts: Any, rows: Any, scores: torch.Tensor, cells_at: Any) -> Any:
        seen.append(tuple(scores.shape[:2]))
        return text_marginals(texts, rows, scores, cells_at)

    def captured(model: Any, tokens: Any, specs: Any, function: Any) -> None:
        assert [spec.layer for spec in specs] == [1]
        for_each_scores(model, tokens, specs, function)

    monkeypatch.setattr(additivity_module, "text_marginals", fitted)
    monkeypatch.setattr(score_controls, "for_each_scores", captured)
    tp.additivity(shared_model("bridge", "llama-gqa"), TOKENS, heads=["L1H6", "L1H3"], progress=False)
    assert seen == [(3, 2)]


def test_heads_that_are_refused(shared_model: Any) -> None:
    """One that is not there, one named twice, and one outside the chosen layers."""
    model = shared_model("bridge", "llama-gqa")
    for wrong, message in {
        ((1, 8),): r"^heads must be L0H0 to L1H7, as labels or as pairs \(layer, head\) .* got \(1, 8\)",
        ((1, 3), "L1H3"): r"^heads must name none twice",
        ("L0H3",): r"^heads must lie within layers=\[1\]",
    }.items():
        with pytest.raises(ArgumentError, match=message):
            tp.additivity(model, TOKENS, layers=[1], heads=list(wrong), progress=False)
