"""Passes that do not run one after the other: nested, interrupted, run again for gradients."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, TOOLS, TOOLS_FOR_ANY_LENGTH, UNORDERED, close, logits
from support.lanes import slow
from support.live_bytes import LiveBytes
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tl_posdisent import remap_distance, swap_positions

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
MODELS = zoo.cases("llama-gqa", "gptj")
OTHER = TOKENS.flip(1)
AT = ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_attn_scores", "hook_pattern", "hook_z")


class Stopped(Exception):
    """Breaks off a pass."""


def whole(model: Any) -> Tensor:
    return model(OTHER)


def beginning(model: Any) -> Tensor:
    return model(OTHER, stop_at_layer=1)


def stop(x: Tensor, hook: Any) -> None:
    raise Stopped


INNER = [whole, *slow([beginning])]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_a_model_that_runs_in_a_hook_is_right_or_refused(
    kind: str, name: str, inner: Callable[[Any], Any], shared_model: Any
) -> None:
    """Between two layers both passes are right; within an edited one the outer pass raises, or is right."""
    model = shared_model(kind, name)
    within = [f"blocks.0.attn.{at}" for at in AT if f"blocks.0.attn.{at}" in model.hook_dict]
    between = ["blocks.0.hook_resid_pre", "blocks.0.hook_mlp_out"]
    n_refused, plain_other = 0, {}
    for n, (tool, make) in enumerate(TOOLS.items()):
        hooks = make(model, layers=[0], heads=[1, 6])
        expected, plain_other[tool] = logits(model, hooks), logits(model, hooks, OTHER)
        for at in (within[n % len(within)], within[(n + 3) % len(within)], *between):
            inside: list[Tensor] = []

            def run(x: Tensor, hook: Any, inside: list[Tensor] = inside) -> None:
                if not inside:
                    inside.append(torch.zeros(0))
                    inside[0] = inner(model)

            for both in ([(at, run), *hooks], [*hooks, (at, run)]):
                inside.clear()
                try:
                    with torch.no_grad(), model.hooks(fwd_hooks=both):
                        got = model(TOKENS)
                except ValueError as error:
                    assert "from its beginning, or see it twice: apply them once" in str(error)  # noqa: PT017
                    assert at in within, (tool, at)
                    n_refused += 1
                    continue
                assert torch.equal(got, expected), (tool, at)
                if inner is whole and inside:
                    assert torch.equal(inside[0], plain_other[tool]), (tool, at)
            assert torch.equal(logits(model, hooks), expected), tool
    assert n_refused > 0


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_another_model_in_a_hook(kind: str, name: str, shared_model: Any) -> None:
    """Two models with hooks of their own, one of which runs within the other's layers."""
    model, other = shared_model(kind, name), zoo.load(kind, name)
    for first, second in ((TOOLS["swap"], TOOLS["remap"]), (TOOLS["lambda"], TOOLS["swap"])):
        hooks, of_other = first(model), second(other)
        wanted, wanted_inner = logits(model, hooks), logits(other, of_other, OTHER)
        for at in ("hook_q", "hook_k", "hook_attn_scores"):
            found: list[Tensor] = []
            mine = (f"blocks.1.attn.{at}", lambda x, hook: found.append(other(OTHER)))  # noqa: B023
            with torch.no_grad(), other.hooks(fwd_hooks=of_other):
                assert torch.equal(logits(model, [mine, *hooks]), wanted)
            assert torch.equal(found[0], wanted_inner)


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_after_an_interrupted_pass_the_next_is_as_any(kind: str, name: str, shared_model: Any) -> None:
    """Of the same list, left on the model: an error at any hook, a pass that ends early, another length."""
    model = shared_model(kind, name)
    points = [f"blocks.{layer}.attn.{at}" for layer in (0, 1) for at in AT]
    points = [at for at in points if at in model.hook_dict]
    for n, (tool, make) in enumerate(TOOLS_FOR_ANY_LENGTH.items()):
        hooks = make(model, heads=[1, 6])
        expected, short = logits(model, hooks), logits(model, hooks, TOKENS[:1, :5])
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            for at in (points[n % len(points)], points[(n + 5) % len(points)]):
                with contextlib.suppress(Stopped), model.hooks(fwd_hooks=[(at, stop)]):
                    model(OTHER)
                close(model(TOKENS), expected, 0)
                model(OTHER, stop_at_layer=1)
                close(model(TOKENS[:1, :5]), short, 0)
                close(model(TOKENS), expected, 0), tool


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_what_an_interrupted_pass_leaves_is_released_when_its_hooks_run_again(
    kind: str, name: str, shared_model: Any
) -> None:
    """Until then a layer's queries and keys are kept."""
    model, text = shared_model(kind, name), zoo.random_tokens(100, 1)
    hooks, queries = remap_distance(model, lambda d: d.clamp(max=3), heads=[1, 6]), 100 * model.cfg.d_model * 4
    with torch.no_grad(), LiveBytes() as live:
        with contextlib.suppress(Stopped), model.hooks(fwd_hooks=[*hooks, ("blocks.0.attn.hook_v", stop)]):
            model(text)
        gc.collect()
        assert live.now >= queries
        with model.hooks(fwd_hooks=hooks):
            model(TOKENS[:1, :5])
        gc.collect()
        assert live.now < queries


@pytest.mark.parametrize("tool", ["swap", "remap"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_run_again_for_gradients(tool: str, reentrant: bool) -> None:
    """Gradient checkpointing runs each block once more, in the other order and without a first hook, if in a thread
    of its own, as torch does on a GPU."""
    model = zoo.load("bridge", "llama-gqa")
    model.original_model.config.use_cache = False  # blocks would add their keys once more
    parameter = next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB)
    hooks = TOOLS_FOR_ANY_LENGTH[tool](model)

    def gradient(thread: bool = False) -> Tensor:
        loss = model(TOKENS).double().pow(2).mean()
        found: list[Any] = []

        def backward() -> None:
            try:
                found.extend(torch.autograd.grad(loss, parameter) if not reentrant else [loss.backward()])
            except BaseException as error:  # noqa: BLE001 - raised below
                found.append(error)

        worker = threading.Thread(target=backward)
        (worker.start(), worker.join(60)) if thread else backward()
        if isinstance(found[0], BaseException):
            raise found[0]
        got = parameter.grad if reentrant else found[0]
        parameter.grad = None
        return got

    with model.hooks(fwd_hooks=hooks):
        expected = gradient()
        for block in model.blocks:
            own = block.forward

            def again(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                return checkpoint(lambda *x: own(*x, **kwargs), *args, use_reentrant=reentrant)

            vars(block)["forward"] = again  # a bridge would set it on the block that it wraps
        for thread in (False, True):
            close(gradient(thread), expected, 1e-6 * float(expected.abs().max()))
            close(gradient(thread), expected, 1e-6 * float(expected.abs().max()))


@pytest.mark.skipif("llama-gqa" not in zoo.HOOKED_NAMES, reason="no HookedTransformer")
def test_passes_from_a_later_layer_on(shared_model: Any) -> None:
    """They have no first hook."""
    model = shared_model("hooked", "llama-gqa")
    with torch.no_grad():
        before = model(TOKENS, stop_at_layer=1)
        for make in (lambda m: swap_positions(m, UNORDERED, layers=[1]), lambda m: remap_distance(m, abs, layers=[1])):
            hooks = make(model)
            expected = logits(model, hooks)
            with model.hooks(fwd_hooks=hooks):
                for _ in range(2):
                    assert torch.equal(model(before, start_at_layer=1), expected)
                model(TOKENS, stop_at_layer=1)
                assert torch.equal(model(before, start_at_layer=1), expected)
                assert torch.equal(model(TOKENS), expected)
