"""Hooks for positions are plain lists: every way to apply them, and nothing is held after the run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import EVERY_INTERVENTION, FEW, TOKENS, TOOLS_FOR_ANY_LENGTH, logits
from support.lanes import slow
from support.live_bytes import LiveBytes
from torch import Tensor

pytestmark = pytest.mark.tl4


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


@pytest.mark.parametrize("tools", [["swap", "lambda"], *slow([[*TOOLS_FOR_ANY_LENGTH]])], ids=["two", "all"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_a_pass_without_a_cache_leaves_nothing(kind: str, name: str, tools: list[str], shared_model: Any) -> None:
    """In memory, while the hooks stay on the model; what a pass leaves without them is the model's own."""
    model, tokens = shared_model(kind, name), zoo.random_tokens(100)

    def left() -> int:
        model(TOKENS)
        with LiveBytes() as live:
            model(tokens)
            gc.collect()
            return live.now

    with torch.no_grad():
        plain = left()
        for tool in tools:
            with model.hooks(fwd_hooks=TOOLS_FOR_ANY_LENGTH[tool](model, heads=[1, 6])):
                assert left() == plain, tool
