"""Hooks for positions are plain lists: every way to apply them, and nothing is held after the run."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.intervention_cases import EVERY_INTERVENTION, FEW, TOKENS, logits
from torch import Tensor


@EVERY_INTERVENTION
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_every_way_to_apply_hooks(kind: str, name: str, intervention: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = intervention(model)
    assert isinstance(hooks, list)
    assert len(hooks) == 1
    plain, expected = logits(model, []), logits(model, hooks)
    assert (expected - plain).abs().max() > 0.1
    with torch.no_grad():
        assert torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=hooks), expected)
        with model.hooks(fwd_hooks=hooks):
            assert torch.equal(model(TOKENS), expected)
            assert torch.equal(model.run_with_cache(TOKENS)[0], expected)
            assert torch.equal(model(TOKENS), expected)  # hooks can be used again
    assert torch.equal(logits(model, hooks[::1]), expected)
    assert torch.equal(logits(model, []), plain)


@EVERY_INTERVENTION
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_nothing_is_held_after_the_run(kind: str, name: str, intervention: Any, shared_model: Any) -> None:
    model, seen = shared_model(kind, name), []

    def watch(x: Tensor, hook: Any) -> None:
        seen.append(weakref.ref(x))

    hooks = intervention(model)
    names = {f"blocks.0.attn.{x}" for x in ("hook_q", "hook_k", "hook_v", "hook_pattern")}
    logits(model, [*hooks, *((hook, watch) for hook in names)])
    assert len(seen) >= len(names)
    assert [ref for ref in seen if ref() is not None] == []
