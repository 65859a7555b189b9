"""A loop over captured layers may be left at any time, the model used inside it, and no more than a layer is held."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import capture

TOKENS = zoo.random_tokens()
SOME = ("llama-gqa", "neox", "gptj", "gemma2")


@pytest.fixture(autouse=True)
def _no_thread_left() -> Any:
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "capture"] == []


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_the_text_is_run_once_and_only_when_asked_for(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    passes: list[int] = []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: passes.append(x.shape[1]))]):
        layers = capture(model, TOKENS)
        assert passes == []
        next(layers)
        assert passes == [12]
        assert len(list(layers)) == 1
    assert passes == [12]


class Left(Exception):
    pass


def by_break(model: Any) -> None:
    for _ in capture(model, TOKENS):
        break


def by_error(model: Any, error: BaseException | None = None) -> None:
    error = error or Left("in the middle")

    def leave() -> None:
        for _ in capture(model, TOKENS):
            raise error

    with pytest.raises(type(error)) as caught:
        leave()
    assert caught.value is error


def by_interrupt(model: Any) -> None:
    by_error(model, KeyboardInterrupt())


def by_closing(model: Any) -> None:
    layers = capture(model, TOKENS)
    next(layers)
    layers.close()


def by_forgetting(model: Any) -> None:
    layers = capture(model, TOKENS)
    next(layers)
    del layers


def by_error_in_the_model(model: Any) -> None:
    def fail(x: Tensor, hook: Any) -> None:
        raise Left("in the model")

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", fail)]), pytest.raises(Left, match="in the model"):
        for _ in capture(model, TOKENS):
            pass


@pytest.mark.parametrize("leave", [by_break, by_error, by_interrupt, by_closing, by_forgetting, by_error_in_the_model])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_leaving_leaves_nothing(kind: str, name: str, leave: Callable[[Any], None], shared_model: Any) -> None:
    model = shared_model(kind, name)  # which checks that no hook stays
    with torch.no_grad():
        plain = model(TOKENS)
        leave(model)
        assert torch.equal(model(TOKENS), plain)
        assert len(list(capture(model, TOKENS))) == 2


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_the_model_may_be_used_inside_the_loop(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    undisturbed = list(capture(model, TOKENS))
    with torch.no_grad():
        plain = model(TOKENS)
        for expected, layer in zip(undisturbed, capture(model, TOKENS), strict=True):
            assert torch.equal(model(TOKENS), plain)
            assert torch.equal(model.run_with_cache(TOKENS)[0], plain)
            assert not torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", zero)]), plain)
            assert [inner.layer for inner in capture(model, TOKENS.flip(0))] == [0, 1]
            assert torch.equal(layer.scores, expected.scores)


def zero(x: Tensor, hook: Any) -> Tensor:
    return 0 * x


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_contexts_may_overlap(kind: str, name: str, shared_model: Any) -> None:
    """The capture begins before a context of hooks and ends within it: neither takes off what is the other's."""
    model = shared_model(kind, name)
    fired: list[int] = []
    layers = capture(model, TOKENS)
    next(layers)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: fired.append(1))]):
        assert len(list(layers)) == 1
        model(TOKENS)
        assert fired == [1]
    model(TOKENS)
    assert fired == [1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes_of_the_caller(mode: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with mode():
        enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for layer in capture(model, TOKENS):
            assert not layer.scores.requires_grad
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (enabled, inference)
            float(layer.scores[..., 0, 0].sum())
    with torch.enable_grad():
        assert model(TOKENS).requires_grad


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME, "gemma3"))
def test_no_more_than_one_layer_is_held(kind: str, name: str, shared_model: Any) -> None:
    """Neither what is handed out nor what the model made it of; a layer that is dropped is gone when the next comes."""
    model = shared_model(kind, name)
    seen: list[tuple[int, weakref.ref[Any]]] = []

    def watch(layer: int, *held: Any) -> None:
        seen.extend((layer, weakref.ref(x)) for x in held)

    def left(before: int) -> list[Any]:
        return [ref for layer, ref in seen if layer < before and ref() is not None]

    names = [f"blocks.{layer}.attn.hook_q" for layer in range(model.cfg.n_layers)]  # some hold the last pattern
    with model.hooks(fwd_hooks=[(name, lambda x, hook: watch(int(hook.name.split(".")[1]), x)) for name in names]):
        for layer in capture(model, TOKENS):
            assert left(before=layer.layer) == []
            watch(layer.layer, layer, layer.q, layer.k_rot, layer.scores)
            del layer
    assert left(before=model.cfg.n_layers) == []
    assert len(seen) == 5 * model.cfg.n_layers
