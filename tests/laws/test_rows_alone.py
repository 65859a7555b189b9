"""Rows of many heads and texts are those of each alone: heads in any order, and texts in padded batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.attention_law import LENGTH, TOKENS, joined
from support.lanes import by_cost, slow
from support.public import public_names
from support.public_calls import call
from support.tolerance import rounding
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import experiments as ex
from tl_posdisent import hooks
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.usefixtures("unchecked")

TEXTS = zoo.random_tokens(14, batch=3)
REAL = torch.arange(14) >= torch.tensor([[0], [4], [0]])
OPTIONS: dict[str, Any] = {"tokens": TEXTS.where(REAL, 0), "attention_mask": REAL.long(), "progress": False}
HEADS = [(1, 6), (0, 2), (1, 3)]  # in no order
SEARCHED = {"exact", "exact_se", "kl", "kl_se"}
"""Columns that say which of the heads that are asked for were run."""

Call = Callable[..., pd.DataFrame]


def of_heads(table: pd.DataFrame, heads: list[tuple[int, int]]) -> pd.DataFrame:
    return table[pd.MultiIndex.from_frame(table[["layer", "head"]]).isin(heads)].reset_index(drop=True)


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5, atol=1e-6)


def tables_of_heads() -> list[Any]:
    """Experiments that return a table, and take layers and heads."""
    return by_cost(
        function
        for function in public_names().values()
        if inspect.isfunction(function)
        and function.__module__.startswith("tl_posdisent.experiments")
        and {"attention_mask", "layers", "heads"} <= set(inspect.signature(function).parameters)
    )


@pytest.mark.parametrize("function", tables_of_heads())
def test_rows_of_chosen_heads(function: Call, shared_reading: Any) -> None:
    """In the order of the model, whatever the order in which they are asked for, in a padded batch."""
    name, reading = function.__name__, shared_reading("bridge", "llama-gqa")
    options = OPTIONS | {"length_generalization": {"by": "head", "lengths": [0, 4, 10]}}.get(name, {})
    if name in ("component_patching", "head_patching"):
        options |= {"source": ((TEXTS * 7) % 58 + 3).where(REAL, 0)}
    options |= {"position_patching": {"positions": torch.arange(14) ** 1.1}}.get(name, {})
    whole, some = (call(function, reading, **options, heads=heads) for heads in (None, HEADS))
    searched = [*SEARCHED.intersection(whole)] if name == "head_effects" else []
    assert {*zip(some["layer"], some["head"], strict=True)} == {*HEADS}
    same(some.drop(columns=searched), of_heads(whole, HEADS).drop(columns=searched))


VARIANTS: dict[str, Call] = {
    "pooled": lambda model, **more: tp.additivity(model, **OPTIONS, pool=True, **more),
    "controls": lambda model, **more: tp.additivity(model, **OPTIONS, controls=("foreign keys",), **more),
    "by subspace": lambda model, **more: tp.subspace_patterns(model, **OPTIONS, sinks=1, **more),
    "interventions": lambda model, **more: ex.attention_by_distance(
        model, interventions={"five": tp.dummy_distance(model, 5)}, **OPTIONS, **more
    ),
    "hooks": lambda model, **more: tp.length_generalization(
        model, **OPTIONS, lengths=[0, 4, 10], hooks=tp.lambda_mask(model, 1, 3, 3), by="head", **more
    ),
    "disentanglement": lambda model, **more: tp.disentanglement(model, **OPTIONS, **more),
}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
@pytest.mark.parametrize(
    "variant", ["pooled", "disentanglement", *slow(["controls", "by subspace", "interventions", "hooks"])]
)
def test_rows_of_chosen_heads_with_options(variant: str, kind: str, name: str, shared_model: Any) -> None:
    model, measure = shared_model(kind, name), VARIANTS[variant]
    whole = measure(model)
    same(measure(model, heads=HEADS), of_heads(whole, HEADS))
    of_layer = whole[whole["layer"] == 1].reset_index(drop=True)
    same(measure(model, layers=1), of_layer)
    same(measure(model, layers=1, heads=[6, 3]), of_heads(of_layer, [(1, 3), (1, 6)]))


# --- hooks ------------------------------------------------------------------------------------------------------

BY_DISTANCE: dict[str, Callable[..., Hooks]] = {
    "dummy": lambda m, **some: tp.dummy_distance(m, 5, **some),
    "remap": lambda m, **some: tp.remap_distance(m, lambda d: d.clamp(max=2), **some),
    "interpolate": lambda m, **some: tp.position_interpolation(m, 3, **some),
    "freeze": lambda m, **some: tp.limit_frequencies(m, low=0.05, mode="freeze", **some),
    "drop": lambda m, **some: tp.limit_frequencies(m, low=0.05, **some),
    "uniform": lambda m, **some: hooks.substitute_attention(m, "uniform", **some),
    "additive": lambda m, **some: hooks.substitute_attention(m, "additive", **some),
    "three axes": lambda m, **some: hooks.substitute_additive(m, **some),
    "component": lambda m, **some: hooks.drop_component(m, "key", **some),
    "ablation": lambda m, **some: tp.ablate_heads(m, **{"heads": [1], **some}),
}
"""What depends on distances, scores or results alone, which are those of the text alone on either side."""
BY_POSITION: dict[str, Callable[..., Hooks]] = {
    "swap": lambda m, **some: tp.swap_positions(m, lambda p: (7 * p) % 5, **some),
    "noise": lambda m, **some: hooks.phase_noise(m, 0.7, **some),
    "lambda": lambda m, **some: tp.lambda_mask(m, 1, 4, 2, **some),
}


def padded(side: str) -> tuple[Tensor, Tensor, slice]:
    """A short text beside a long one, its mask, and where its tokens are."""
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    where = slice(4, LENGTH) if side == "left" else slice(0, LENGTH - 4)
    tokens[0], mask[0] = 0, 0
    tokens[0, where], mask[0, where] = TOKENS[0, : LENGTH - 4], 1
    return tokens, mask, where


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "name"), [*zoo.cases("llama-gqa", "olmo2", "gemma2", "gpt_oss"), *slow([("bridge", "qwen3.5")])]
)
def test_texts_of_a_padded_batch_under_hooks(kind: str, name: str, side: str, shared_model: Any) -> None:
    """Functions of positions with padding behind the text, since they begin at its start."""
    model = shared_model(kind, name)
    tokens, mask, at = padded(side)
    for tool, make in (BY_DISTANCE | (BY_POSITION if side == "right" else {})).items():
        edits = make(model, **({"heads": [1, 6]} if side == "left" else {}))
        with torch.no_grad(), hooks.applied(model, edits):
            together = model(tokens, attention_mask=mask)
            short, long = model(TOKENS[:1, : LENGTH - 4]), model(TOKENS[1:])
        for found, alone in ((together[0, at], short[0]), (together[1], long[0])):
            assert (found - alone).abs().max() <= 10 * rounding(alone, 16), tool


@pytest.mark.parametrize("tool", BY_POSITION)
@pytest.mark.parametrize("name", ["llama-gqa", *slow(["deepseek_v3", "codegen"])])
def test_positions_of_a_text_behind_padding_are_refused(tool: str, name: str, shared_model: Any) -> None:
    model = shared_model("bridge", name)
    tokens, mask, _ = padded("left")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="attention_mask must not hide the first keys of a row"),
        hooks.applied(model, BY_POSITION[tool](model)),
    ):
        model(tokens, attention_mask=mask)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_heads_under_hooks(kind: str, name: str, shared_model: Any) -> None:
    """Lists for one head each, added, are the list for these heads, in any order."""
    model = shared_model(kind, name)
    for tool, make in (BY_DISTANCE | BY_POSITION).items():
        results = []
        for edits in (make(model, heads=HEADS), joined([make(model, heads=[head]) for head in sorted(HEADS)])):
            with torch.no_grad(), hooks.applied(model, edits):
                results.append(model(TOKENS))
        assert (results[0] - results[1]).abs().max() <= rounding(results[0], 16), tool
