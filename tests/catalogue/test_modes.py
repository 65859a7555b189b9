"""Every function gives the same numbers in all of torch's modes; autocast changes those of the model alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import TOKENS, call, callables, synthetic, takes_synthetic
from support.results import assert_same

import tl_posdisent as tp
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.tl4


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def llama() -> Any:
    return zoo.bridge("llama-gqa")


Mode = Callable[[], contextlib.AbstractContextManager[Any]]
MODES: dict[str, Mode] = {"gradients": torch.enable_grad, "inference": torch.inference_mode}
OF_MODELS = {
    name: function
    for name, function in callables().items()
    if inspect.isfunction(function) and [*inspect.signature(function).parameters][:1] == ["model"]
    if name != "report"  # it calls what is tried here
}
OF_TENSORS = {
    name: function
    for name, function in callables().items()
    if name not in OF_MODELS and function.__module__.split(".")[1] in ("additive", "rope")
}
# All others take minutes together; these differentiate, optimise, or take shortcuts.
QUICK = {"head_ablation", "positional_gradients", "substitute_attention", "train"}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_functions_of_tensors(name: str) -> None:
    with torch.no_grad():
        expected = call(OF_TENSORS[name])
    for mode in (*MODES.values(), autocast):
        with mode():
            assert_same(call(OF_TENSORS[name]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in OF_MODELS])
def test_functions_of_models(name: str) -> None:
    results = []
    for within in (torch.no_grad, *MODES.values()):
        torch.manual_seed(0)
        model = synthetic() if takes_synthetic(OF_MODELS[name]) else llama()
        with within():
            made = call(OF_MODELS[name], model)
            results.append(model.run_with_hooks(TOKENS, fwd_hooks=made) if isinstance(made, Hooks) else made)
    for result in results[1:]:
        assert_same(results[0], result, rtol=1e-5, atol=1e-6)


def test_a_model_made_in_inference_mode_is_refused_where_gradients_are_needed() -> None:
    with torch.inference_mode():
        model = synthetic()
    with pytest.raises(ValueError, match="model must be created outside"):
        call(tp.synthetic.positional_gradients, model)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_hooks_do_not_round_products_to_the_dtype_of_autocast(kind: str, name: str) -> None:
    """Scores with all their components are the model's own to the rounding of the scores, not of products."""
    model = zoo.load(kind, name)
    hooks = tp.hooks.substitute_attention(model, "untouched")
    with torch.no_grad(), autocast():
        assert_same(model.run_with_hooks(TOKENS, fwd_hooks=hooks), model(TOKENS), rtol=0, atol=0)


@pytest.mark.skipif("llama-gqa" not in zoo.HOOKED_NAMES, reason="no HookedTransformer")
def test_position_hooks_where_autocast_rounds_vectors_before_rotation_alone() -> None:
    """They are as near to those without autocast as the model itself: positions are read from vectors in two dtypes."""
    model = zoo.hooked("llama-gqa")
    with torch.no_grad():
        exact = model(TOKENS)
        with autocast():
            rounding = (model(TOKENS) - exact).norm()
        for hooks in (tp.dummy_distance(model, 5), tp.swap_positions(model, lambda p: (7 * p) % 5, heads=[1, 6])):
            expected = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            with autocast():
                got = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            assert (got - expected).norm() < 2 * rounding < 0.1 * (expected - exact).norm()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_sources_of_scores_under_autocast(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    plain = tp.score_sources(model, TOKENS, 1, 0, 5).scores()
    with autocast():
        rounded = tp.score_sources(model, TOKENS, 1, 0, 5)
    assert_same(rounded.scores(), plain, rtol=0, atol=0.05 * plain.abs().max().item())
    assert rounded.error() < 0.05
