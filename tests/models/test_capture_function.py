"""A function that is given captured layers may fail and may use the model, and no more than one layer is held."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import additivity, capture, dummy_distance
from tl_posdisent.models import Captured

TOKENS = zoo.random_tokens()
SOME = ("llama-gqa", "gptj", "gemma2")


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_the_text_is_run_once(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    passes: list[int] = []
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: passes.append(x.shape[1]))]):
        assert capture(model, TOKENS, lambda layer: layer.layer) == [0, 1]
    assert passes == [12]


class Left(Exception):
    pass


def by_error(model: Any) -> None:
    error = Left("in the middle")

    def leave(layer: Captured) -> None:
        raise error

    with pytest.raises(Left) as caught:
        capture(model, TOKENS, leave)
    assert caught.value is error


def by_error_in_the_model(model: Any) -> None:
    def fail(x: Tensor, hook: Any) -> None:
        raise Left("in the model")

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", fail)]), pytest.raises(Left, match="in the model"):
        capture(model, TOKENS)


@pytest.mark.parametrize("leave", [by_error, by_error_in_the_model])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_leaving_leaves_nothing(kind: str, name: str, leave: Callable[[Any], None], shared_model: Any) -> None:
    model = shared_model(kind, name)  # which checks that no hook stays
    with torch.no_grad():
        plain = model(TOKENS)
        leave(model)
        assert torch.equal(model(TOKENS), plain)
        assert len(capture(model, TOKENS)) == 2


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_the_function_may_use_the_model(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    undisturbed = [layer.scores for layer in capture(model, TOKENS)]
    table = additivity(model, TOKENS.flip(0), progress=False)
    with torch.no_grad():
        plain = model(TOKENS)

    def use(layer: Captured) -> Tensor:
        assert torch.equal(model(TOKENS), plain)
        assert torch.equal(model.run_with_cache(TOKENS)[0], plain)
        assert not torch.equal(model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", zero)]), plain)
        assert capture(model, TOKENS.flip(0), lambda inner: inner.layer) == [0, 1]
        assert additivity(model, TOKENS.flip(0), progress=False).equals(table)
        return layer.scores

    for found, expected in zip(capture(model, TOKENS, use), undisturbed, strict=True):
        assert torch.equal(found, expected)


def zero(x: Tensor, hook: Any) -> Tensor:
    return 0 * x


INNER: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(TOKENS.flip(1)),
    "run_with_hooks": lambda model: model.run_with_hooks(TOKENS.flip(1), fwd_hooks=[("blocks.0.attn.hook_z", zero)]),
    "capture": lambda model: capture(model, TOKENS.flip(1)),
    "a reading": lambda model: dummy_distance(model, 3, layers=[0]),
}


@pytest.mark.parametrize(
    ("inner", "at"),
    [
        ("forward", "blocks.0.hook_resid_pre"),
        ("run_with_hooks", "blocks.0.attn.hook_k"),
        ("capture", "blocks.0.attn.hook_k"),
        ("a reading", "blocks.1.attn.hook_q"),
    ],
)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_hook_that_runs_the_model_is_not_listened_to(
    kind: str, name: str, inner: str, at: str, shared_model: Any
) -> None:
    """The pass that it makes is its own, and what is captured is of the text that was given."""
    model, busy, made = shared_model(kind, name), [], []
    undisturbed = [layer.scores for layer in capture(model, TOKENS)]
    table = additivity(model, TOKENS, progress=False)

    def run(x: Tensor, hook: Any) -> None:
        if not busy:
            busy.append(1)
            made.append(INNER[inner](model))
            busy.clear()

    with model.hooks(fwd_hooks=[(at, run)]):
        found = capture(model, TOKENS, lambda layer: layer.scores)
        assert additivity(model, TOKENS, progress=False).equals(table)
    assert made
    assert len(found) == len(undisturbed)
    assert all(torch.equal(a, b) for a, b in zip(found, undisturbed, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes_of_the_caller(mode: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        grads = capture(model, TOKENS, lambda layer: (torch.is_grad_enabled(), layer.scores.requires_grad))
        assert grads == [(False, False)] * 2
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    with torch.enable_grad():
        assert model(TOKENS).requires_grad


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_no_more_than_one_layer_is_held(kind: str, name: str, shared_model: Any) -> None:
    """Neither what is handed out nor what the model made it of; a layer that is dropped is gone when the next comes."""
    model = shared_model(kind, name)
    seen: list[tuple[int, weakref.ref[Any]]] = []

    def watch(layer: int, *held: Any) -> None:
        seen.extend((layer, weakref.ref(x)) for x in held)

    def left(before: int) -> list[Any]:
        return [ref for layer, ref in seen if layer < before and ref() is not None]

    def look(layer: Captured) -> None:
        assert left(before=layer.layer) == []
        watch(layer.layer, layer, layer.q, layer.k_rot, layer.scores)

    names = [f"blocks.{layer}.attn.hook_q" for layer in range(model.cfg.n_layers)]  # some hold the last pattern
    with model.hooks(fwd_hooks=[(name, lambda x, hook: watch(int(hook.name.split(".")[1]), x)) for name in names]):
        capture(model, TOKENS, look)
    assert left(before=model.cfg.n_layers) == []
    assert len(seen) == 5 * model.cfg.n_layers


@pytest.mark.usefixtures("unchecked")
def test_a_function_that_cannot_be_called_is_refused(shared_model: Any) -> None:
    with pytest.raises(ValueError, match=r"function must be callable with a Captured, got \[0\]"):
        capture(shared_model("bridge", "llama-gqa"), TOKENS, [0])
