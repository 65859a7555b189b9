"""A hook of the user's that runs the model within a pass: both passes are as each alone, in every intervention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, TOOLS, close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("unchecked")
MODELS = [*zoo.cases("llama-gqa"), ("bridge", "gptj"), ("bridge", "neox")]
OTHER = TOKENS.flip(1)
AT = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_attn_scores", "hook_pattern", "hook_z")


class Stopped(Exception):
    """Breaks off an inner pass."""


def whole(model: Any) -> Tensor:
    return model(OTHER)


def of_one_text(model: Any) -> Tensor:
    return model(OTHER[:1, :5])


def beginning(model: Any) -> Tensor:
    return model(OTHER, stop_at_layer=1)


def broken_off(model: Any) -> None:
    def stop(x: Tensor, hook: Any) -> None:
        raise Stopped

    with contextlib.suppress(Stopped), model.hooks(fwd_hooks=[("blocks.0.attn.hook_v", stop)]):
        model(OTHER)


def twice_and_deeper(model: Any) -> Tensor:
    def again(x: Tensor, hook: Any) -> None:
        model(TOKENS)

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_k", once(again))]):
        model(OTHER)
    return model(OTHER)


def once(hook: Callable[..., None]) -> Callable[..., None]:
    """Not in the passes that it makes itself."""
    busy = [False]

    def run(x: Tensor, hook: Any, inner: Any = hook) -> None:
        if not busy[0]:
            busy[0] = True
            try:
                inner(x, hook)
            finally:
                busy[0] = False

    return run


INNER = [whole, of_one_text, beginning, broken_off, twice_and_deeper]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_an_inner_pass_changes_nothing_in_the_outer_one(
    kind: str, name: str, inner: Callable[[Any], Any], shared_model: Any
) -> None:
    model = shared_model(kind, name)
    points = [f"blocks.0.attn.{at}" for at in AT if f"blocks.0.attn.{at}" in model.hook_dict]
    tools = list(TOOLS.items())
    some = tools if inner is whole and name == "llama-gqa" else tools[INNER.index(inner) :: 4]
    for n, (tool, make) in enumerate(some):
        if tool in ("swap", "vectors", "scores", "noise") and inner is of_one_text:
            continue  # given for each slot
        hooks = make(model, layers=[0], heads=[1, 6])
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            wanted, wanted_inner = model(TOKENS), inner(model)
        for at in (points[n % len(points)], points[(n + 3) % len(points)]):
            found = []
            mine = (at, once(lambda x, hook: found.append(inner(model))))  # noqa: B023
            for both in ([mine, *hooks], [*hooks, mine]):
                with torch.no_grad(), model.hooks(fwd_hooks=both):
                    close(model(TOKENS), wanted, 1e-5)
            for each in found:
                assert each is None or close(each, wanted_inner, 1e-5) is None
            assert len(found) in (0, 2)  # a bridge has hooks that never fire
