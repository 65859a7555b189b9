"""A model is as it was: after every public function, after exceptions, and under hooks of the user's own."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.attention_law import TOKENS, Subject
from support.lanes import by_cost
from support.public_calls import Function, call, functions
from support.untouched import state
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import Hooks, joined

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

MODELS = zoo.cases("llama-gqa")
NO_PASS = (applied, tp.cut_text)
EVERY_FUNCTION = pytest.mark.parametrize("function", by_cost(f for f in functions() if f not in NO_PASS))


class Stopped(Exception):
    """Breaks off a pass."""


def logits(model: Any, hooks: Any = (), tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        return model(tokens)


@EVERY_FUNCTION
def test_after_a_function(function: Function, shared_model: Any) -> None:
    """Good values of ``public_calls`` are not the reason for any refusal either."""
    model = shared_model("bridge", "llama-gqa")
    plain, before = logits(model), state(model)
    result = call(function, model)
    del result
    assert state(model) == before
    assert torch.equal(logits(model), plain)


@EVERY_FUNCTION
def test_after_an_exception(function: Function, shared_model: Any) -> None:
    """Ctrl-C in the first layer of the function's first pass, and of a later one; it passes unchanged."""
    kind = "bridge" if zoo.TL_MAJOR > 3 else "hooked"  # the other one than above
    model, point, before = shared_model(kind, "llama-gqa"), "blocks.0.attn.hook_z", None
    plain = logits(model)

    def run(stopped_at: int) -> int:
        calls = 0

        def count(z: Tensor, hook: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == stopped_at:
                raise KeyboardInterrupt

        with model.hooks(fwd_hooks=[(point, count)]):
            nonlocal before
            before = state(model)
            try:
                call(function, model)
            finally:
                assert state(model) == before
        return calls

    for at in (1, 4):  # a function may end before
        with contextlib.suppress(KeyboardInterrupt):
            assert run(at) < at
        assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "deepseek_v3"))
def test_hooks_after_a_stopped_pass(kind: str, name: str, shared_model: Any) -> None:
    """A pass ends at any hook, with an error or early, or has another length: the next one is as any."""
    model = shared_model(kind, name)
    subject = Subject(model, 0)
    names = ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "hook_z")
    points = [at for at in (f"blocks.{layer}.attn.{x}" for layer in (0, 1) for x in names) if at in model.hook_dict]
    before, plain = state(model), logits(model)

    def stop(x: Tensor, hook: Any) -> None:
        raise Stopped

    for n, one in enumerate(subject.calls()[::3]):
        hooks = subject.hooks_of(one.on([1, 6]))
        expected = logits(model, hooks)
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            with contextlib.suppress(Stopped), model.hooks(fwd_hooks=[(points[n % len(points)], stop)]):
                model(TOKENS.flip(1))
            assert torch.equal(model(TOKENS), expected), one
            with contextlib.suppress(ValueError):  # made for texts of this length
                model(TOKENS[:1, :5])
            model(TOKENS.flip(1), stop_at_layer=1)
            assert torch.equal(model(TOKENS), expected), one
    assert state(model) == before
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_nothing_of_a_pass_is_held(kind: str, name: str, shared_model: Any) -> None:
    """Of queries, keys and values, under hooks that can be used again."""
    model, seen = shared_model(kind, name), list[Any]()
    subject = Subject(model, 0)
    hooks = joined(subject.hooks_of(one.on([n % 8])) for n, one in enumerate(subject.calls()[:4]))
    names = [f"blocks.0.attn.{x}" for x in ("hook_q", "hook_k", "hook_v", "hook_pattern")]
    watch = [(x, lambda x, hook: seen.append(weakref.ref(x))) for x in names]
    assert torch.equal(logits(model, [*hooks, *watch]), logits(model, hooks))
    assert len(seen) == len(names)
    gc.collect()
    assert not any(ref() is not None for ref in seen)


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
def test_what_does_not_change_scores(change: Callable[[Any], Any], shared_model: Any) -> None:
    """The same table, and the model stays changed."""
    changed = change(zoo.bridge("llama-gqa"))
    before = state(changed)
    tables = [tp.additivity(m, TOKENS, progress=False) for m in (changed, shared_model("bridge", "llama-gqa"))]
    assert tables[0].equals(tables[1])
    assert state(changed) == before


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_hooks_of_the_user_stay(kind: str, name: str) -> None:
    """Within ``applied`` they act as well; they are there when it ends, with an error or not."""
    model, point = zoo.load(kind, name), "blocks.0.attn.hook_z"

    def double(x: Tensor, hook: Any) -> Tensor:
        return 2 * x

    model.hook_dict[point].add_hook(double)
    doubled = logits(model)
    ours: Hooks = tp.dummy_distance(model, 5, layers=[1])
    with applied(model, ours):
        edited = logits(model)
    assert not torch.equal(edited, doubled)
    assert torch.equal(logits(model), doubled)
    with contextlib.suppress(Stopped), applied(model, ours):
        assert torch.equal(logits(model), edited)
        raise Stopped
    assert torch.equal(logits(model), doubled)
