"""Interventions that happened, and a model that is as before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import dummy_distance
from tl_posdisent.hooks import applied

TOKENS = zoo.random_tokens()
Q, Z, LATE = "blocks.0.attn.hook_q", "blocks.0.attn.hook_z", "blocks.1.attn.hook_z"
CASES = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))


def double(x: Tensor, hook: Any) -> Tensor:
    return 2 * x


def run(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


@CASES
def test_the_block_sees_the_hooks_and_nothing_after_it_does(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = run(model)
    with applied(model, [(Z, double), (LATE, functools.partial(double))]) as inside:
        assert inside is model
        changed = run(inside)
        assert torch.equal(run(inside), changed)
    assert not torch.equal(changed, plain)
    assert torch.equal(run(model), plain)
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[(Z, double), (LATE, double)]), changed)


def test_hooks_that_accept_none_of_the_names(shared_model: Any) -> None:
    """As those of a model whose hooks all have other names."""
    model = shared_model("bridge", "llama-gqa")
    for function in (double, dummy_distance(model, 3)[0][1]):
        with pytest.raises(ValueError, match=r"hooks must name hooks of this model, got .* filter accepts none"):  # noqa: SIM117
            with applied(model, [(lambda name: False, function)]):
                run(model)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


@CASES
def test_idle_hooks_are_named(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    idle = [hook for hook in ("blocks.0.attn.hook_rot_q", "blocks.1.attn.hook_rot_k") if kind == "bridge"]
    if name == "gptj" and kind == "bridge":  # they exist and never fire
        with pytest.raises(RuntimeError, match=f"these hooks never fired.*: {idle[0]}, {idle[1]}$"):  # noqa: SIM117
            with applied(model, [(idle[0], double), (Z, double), (idle[1], double)]):
                run(model)
    with pytest.raises(RuntimeError, match=f"never fired, so nothing was changed there: {LATE}$"):  # noqa: SIM117
        with applied(model, [(Z, double), (LATE, double)]):
            model(TOKENS, stop_at_layer=1)


@CASES
def test_a_block_in_which_the_model_does_not_run(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with pytest.raises(RuntimeError, match=f"{Q}, {Z}; was the model run inside the block"):  # noqa: SIM117
        with applied(model, [(Q, double), (Z, double)]):
            pass
    with applied(model, []) as inside:
        assert inside is model


@CASES
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([("blocks.0.attn.hook_w", double)], r"hooks names 'blocks\.0\.attn\.hook_w', which the model does not have"),
        ([Q], rf"hooks must be a list of \(hook name or filter, function\), got '{Q}' in it"),
        ([(Q, 3)], rf"hooks must be a list of \(hook name or filter, function\), got \('{Q}', 3\) in it"),
    ],
)
def test_what_is_no_list_of_hooks(kind: str, name: str, hooks: Any, message: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with pytest.raises(ValueError, match=message), applied(model, hooks):
        run(model)
    with pytest.raises(ValueError, match="model must be a HookedTransformer"), applied(torch.nn.Linear(2, 2), []):
        pass
