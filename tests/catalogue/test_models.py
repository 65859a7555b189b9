"""Models of another kind, compiled, in training, with hooks, frozen, copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.public_calls import TOKENS, Function, call, functions
from support.untouched import state

import tl_posdisent as tp

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

LINEAR = torch.nn.Linear(2, 2)
EVERY = pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)


def table(model: Any, layers: int = 1) -> pd.DataFrame:
    return tp.additivity(model, TOKENS, layers=range(layers), progress=False)


@pytest.fixture
def model(shared_model: Any) -> Any:
    return shared_model("bridge", "llama-gqa")


@pytest.fixture
def own() -> Any:
    """A model for one test alone, to be changed."""
    return zoo.bridge("llama-gqa")


@EVERY
def test_other_models(function: Function) -> None:
    """Those of Hugging Face too, which are not wrapped without being asked for."""
    for other in (LINEAR, zoo.hf_model("llama"), None, "gpt2", object):
        kind = type(other).__name__
        message = f"model must be a HookedTransformer, a TransformerBridge or another model .* got {kind}"
        with pytest.raises(ValueError, match=message):
            call(function, model=other)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@EVERY
def test_good_input_leaves_no_trace(function: Function, kind: str, name: str, shared_model: Any) -> None:
    """Nor are the values in ``GOOD`` the reason for any refusal."""
    model = shared_model(kind, name)
    with torch.no_grad():
        plain = model(TOKENS)
    before = state(model)
    if function is tp.hooks.applied:
        with function(model, []):
            pass
    else:
        result = call(function, model)
        del result
    assert state(model) == before
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain)


# --- changed models ---------------------------------------------------------------------------------------------


def _dropping(model: Any) -> Any:
    model.train()
    for part in model.original_model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    return model


def _watched(model: Any) -> Any:
    model.blocks[0].attn.hook_q.add_hook(lambda x, hook: None, is_permanent=True)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "what a compiled model was made of": lambda model: torch.compile(model)._orig_mod,
    "in training mode, with dropout": _dropping,
    "frozen": lambda model: model.requires_grad_(False),
    "with gradients": lambda model: model.requires_grad_(True),
    "a hook that changes nothing": _watched,
    "a deep copy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_does_not_change_scores(change: Callable[[Any], Any], own: Any, model: Any) -> None:
    """The same table, and the model stays changed."""
    changed = change(own)
    before = state(own)
    assert table(changed, 2).equals(table(model, 2))
    assert state(own) == before


def test_compiled_models(own: Any, model: Any) -> None:
    with pytest.raises(ValueError, match=r"compiled.*_orig_mod"):
        table(torch.compile(model))
    own.compile()
    with pytest.raises(ValueError, match=r"compiled.*loaded again"):
        table(own)


def _forward(part: Any) -> Any:
    part.forward = torch.compile(part.forward)
    return part


PARTS: dict[str, Callable[[Any], Any]] = {
    "a block": lambda model: setattr(model.blocks, "0", torch.compile(model.blocks[0])),
    "a block in place": lambda model: model.blocks[0].compile(),
    "attention": lambda model: setattr(model.blocks[1], "attn", torch.compile(model.blocks[1].attn)),
    "an MLP in place": lambda model: model.blocks[1].mlp.compile(),
    "the forward pass": _forward,
}
"""Nothing is compiled before it runs."""


@pytest.mark.parametrize("compile_part", PARTS.values(), ids=PARTS)
def test_compiled_parts(compile_part: Callable[[Any], Any], own: Any) -> None:
    """Also of a model that was read before."""
    reading = tp.read_model(own)
    compile_part(own)
    for given in (own, reading):
        with pytest.raises(ValueError, match=r"^model must not have compiled parts, got a compiled .* again"):
            table(given)
    with pytest.raises(ValueError, match=r"compiled parts"):
        tp.dummy_distance(own, 5)


@pytest.mark.slow
@pytest.mark.skipif(zoo.TL_MAJOR > 3, reason="of a bridge, tracing takes a minute")
def test_hooks_within_a_compiled_function() -> None:
    """They act, if torch traces it under them; hooks of later runs it ignores, and ``applied`` says so."""
    model, tokens = zoo.hooked("llama-gqa", num_hidden_layers=1), zoo.random_tokens()
    hooks = tp.ablate_heads(model, [(0, 1), (0, 3)])
    with torch.no_grad():
        plain, expected = model(tokens), model.run_with_hooks(tokens, fwd_hooks=hooks)
        run = torch.compile(lambda x: model(x), backend="eager")
        with tp.hooks.applied(model, hooks):
            torch.testing.assert_close(run(tokens), expected, rtol=0, atol=1e-5)
        torch.compiler.reset()
        torch.testing.assert_close(run(tokens), plain, rtol=0, atol=1e-5)
        with pytest.raises(RuntimeError, match="these hooks never fired"), tp.hooks.applied(model, hooks):
            run(tokens)
    torch.compiler.reset()
