"""Every function gives the same numbers with gradients, without them and in inference mode."""

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


def llama() -> Any:
    return zoo.bridge("llama-gqa")


Mode = Callable[[], contextlib.AbstractContextManager[Any]]
MODES: dict[str, Mode] = {"gradients": torch.enable_grad, "inference": torch.inference_mode}
OF_MODELS = {
    name: function
    for name, function in callables().items()
    if inspect.isfunction(function) and [*inspect.signature(function).parameters][:1] == ["model"]
    if name not in ("report", "train")  # one calls what is tried here, the other needs gradients
}
OF_TENSORS = {
    name: function
    for name, function in callables().items()
    if name not in OF_MODELS and function.__module__.split(".")[1] in ("additive", "rope")
}
# All others take minutes together; these differentiate, optimise, or take shortcuts.
QUICK = {"head_ablation", "positional_gradients", "substitute_attention"}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_functions_of_tensors(name: str) -> None:
    with torch.no_grad():
        expected = call(OF_TENSORS[name])
    for mode in MODES.values():
        with mode():
            assert_same(call(OF_TENSORS[name]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(QUICK))
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
