"""After a pass that ends early, with an error or not, the next one under the same hooks is as any."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, TOOLS_FOR_ANY_LENGTH, close, logits
from torch import Tensor

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
OTHER = TOKENS.flip(1)
AT = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_attn_scores", "hook_pattern", "hook_z")


class Stopped(Exception):
    """Breaks off a pass."""


def stop(x: Tensor, hook: Any) -> None:
    raise Stopped


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_after_an_interrupted_pass_the_next_is_as_any(kind: str, name: str, shared_model: Any) -> None:
    """Of the same list, left on the model: an error at any hook, a pass that ends early, another length."""
    model = shared_model(kind, name)
    points = [f"blocks.{layer}.attn.{at}" for layer in (0, 1) for at in AT]
    points = [at for at in points if at in model.hook_dict]
    for n, make in enumerate(TOOLS_FOR_ANY_LENGTH.values()):
        hooks = make(model, heads=[1, 6])
        expected, short = logits(model, hooks), logits(model, hooks, TOKENS[:1, :5])
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            for at in (points[n % len(points)], points[(n + 5) % len(points)]):
                with contextlib.suppress(Stopped), model.hooks(fwd_hooks=[(at, stop)]):
                    model(OTHER)
                close(model(TOKENS), expected, 0)
                model(OTHER, stop_at_layer=1)
                close(model(TOKENS[:1, :5]), short, 0)
                close(model(TOKENS), expected, 0)
