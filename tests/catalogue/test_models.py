"""Models of another kind, without rotation, compiled, quantised, in training, with hooks, frozen, spoilt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.public_calls import TARGETS, TOKENS, Function, call, functions
from support.untouched import state

import tl_posdisent as tp
from tl_posdisent.experiments import rope_hadamard
from tl_posdisent.hooks import applied, phase_noise
from tl_posdisent.models.loading.load import has_hooked

pytestmark = pytest.mark.usefixtures("unchecked")

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


# --- without a rotation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "use", "message"),
    [
        ("gpt2", lambda model: tp.swap_positions(model, TARGETS), "GPT2"),
        ("bloom", lambda model: tp.swap_positions(model, TARGETS), "Bloom"),
        ("gpt2", lambda model: tp.dummy_distance(model, 3), "GPT2"),
        ("bloom", lambda model: phase_noise(model, 0.1), "Bloom"),
        ("gpt2", lambda model: tp.controlled_distance(model, TOKENS, progress=False), "GPT2"),
        ("deepseek_v3", lambda model: tp.subspace_patterns(model, TOKENS, progress=False), "DeepseekV3"),
        ("gpt2", lambda model: rope_hadamard(model, TOKENS, 0), "GPT2"),
        ("gpt2", lambda model: tp.longer_context(model, 10**4).__enter__(), "length must be at most"),
    ],
)
def test_positions_of_another_kind(name: str, use: Callable[[Any], Any], message: str, shared_model: Any) -> None:
    with pytest.raises(ValueError, match=message):
        use(shared_model("bridge", name))


def test_learned_positions_have_no_controlled_distance(shared_model: Any) -> None:
    got = tp.disentanglement(shared_model("bridge", "gpt2"), TOKENS, progress=False)
    assert got[["r_three_axis", "r_two_axis"]].isna().all(axis=None)
    assert got["r"].notna().all()


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


def test_a_users_hook_that_changes_queries_is_part_of_the_model(own: Any, model: Any) -> None:
    own.blocks[0].attn.hook_q.add_hook(lambda x, hook: x.flip(1))
    before = state(own)
    assert not table(own).equals(table(model))
    assert state(own) == before


def test_compiled_models(own: Any, model: Any) -> None:
    with pytest.raises(ValueError, match=r"compiled.*_orig_mod"):
        table(torch.compile(model))
    own.compile()
    with pytest.raises(ValueError, match=r"compiled.*loaded anew"):
        table(own)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value: float, own: Any) -> None:
    with torch.no_grad():
        own.original_model.model.layers[0].self_attn.q_proj.weight[0, 0] = value
    for use in (table, lambda model: next(tp.capture(model, TOKENS))):
        with pytest.raises(ValueError, match=r"NaN.*weights"):
            use(own)
    with pytest.raises(ValueError, match="NaN"):
        tp.read_attention(own, 0)


def test_hooks_that_never_fire(model: Any) -> None:
    with pytest.raises(RuntimeError, match="never fired"), applied(model, tp.dummy_distance(model, 1)):
        pass


# --- loading ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_wrapped(model: Any) -> None:
    wraps = [tp.bridge_from_hf, tp.hooked_from_hf] if has_hooked() else [tp.bridge_from_hf]
    for wrap in wraps:
        for other in (None, LINEAR, model):
            with pytest.raises(ValueError, match=f"hf_model must be .*{type(other).__name__}"):
                wrap(other)
    if not has_hooked():
        with pytest.raises(ValueError, match="no HookedTransformer"):
            tp.hooked_from_hf(zoo.hf_model("llama"))
