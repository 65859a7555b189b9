"""Models of another kind, in training, with hooks, frozen."""

from __future__ import annotations

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


def table(model: Any, layers: int = 1) -> pd.DataFrame:
    return tp.additivity(model, TOKENS, layers=range(layers), progress=False)


@pytest.fixture
def model(shared_model: Any) -> Any:
    return shared_model("bridge", "llama-gqa")


@pytest.fixture
def own() -> Any:
    """A model for one test alone, to be changed."""
    return zoo.bridge("llama-gqa")


def test_other_models() -> None:
    """Those of Hugging Face too, which are not wrapped without being asked for."""
    for other in (LINEAR, zoo.hf_model("llama"), None, "gpt2", object):
        kind = type(other).__name__
        message = f"model must be a HookedTransformer, a TransformerBridge or another model .* got {kind}"
        with pytest.raises(ValueError, match=message):
            table(other)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
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
    "in training mode, with dropout": _dropping,
    "frozen": lambda model: model.requires_grad_(False),
    "with gradients": lambda model: model.requires_grad_(True),
    "a hook that changes nothing": _watched,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_does_not_change_scores(change: Callable[[Any], Any], own: Any, model: Any) -> None:
    """The same table, and the model stays changed."""
    changed = change(own)
    before = state(own)
    assert table(changed, 2).equals(table(model, 2))
    assert state(own) == before
