"""Gradients with respect to results of heads: the unembedding's share is computed once, where it is linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.experiments.measuring import result_gradients as module
from tl_posdisent.experiments.measuring.result_gradients import drawn_labels, predictions, result_gradients

TOKENS = zoo.random_tokens(length=9, batch=3)
DRAWS = 5
LINEAR = ("llama-gqa", "gptj", "gpt2", "bloom")


def loss(outputs: list[Tensor]) -> Tensor:
    (logits,) = outputs
    return cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def draws() -> Tensor:
    return torch.rand(DRAWS, *TOKENS.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_by_one(model: Any, uniforms: Tensor) -> list[dict[int, Tensor]]:
    """One whole backward pass for each draw."""
    results: dict[int, Tensor] = {}

    def keep(z: Tensor, hook: Any) -> Tensor:
        results[hook.layer()] = z if results else z.detach().requires_grad_()
        return results[hook.layer()]

    hooks = [(f"blocks.{layer}.attn.hook_z", keep) for layer in range(2)]
    with torch.enable_grad():
        log_p = predictions(model.run_with_hooks(TOKENS, fwd_hooks=hooks), TOKENS)
        assert log_p is not None
        labels = drawn_labels(log_p, uniforms)
        surprises = [-log_p.gather(-1, y[..., None]).sum() for y in labels]
        found = [torch.autograd.grad(x, [*results.values()], retain_graph=True) for x in surprises]
    return [dict(zip(results, each, strict=True)) for each in found]


def n_of_unembedding(model: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count backward passes through what follows the unembedding."""
    counted = 0

    def log_probabilities(logits: Tensor) -> Tensor:
        def count(gradient: Tensor) -> None:
            nonlocal counted
            counted += 1

        found = logits.float().log_softmax(-1)
        found.register_hook(count)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "as_log_probabilities", log_probabilities)
        result_gradients(model, [TOKENS], [0, 1], loss, [draws()])
    return counted


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*LINEAR, "gemma2"))
def test_gradients_are_those_of_a_backward_pass_for_each_draw(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    (found,) = result_gradients(model, [TOKENS], [0, 1], loss, [draws()])
    expected = one_by_one(model, draws())
    assert len(found.surprise) == len(expected) == DRAWS
    for some, wanted in zip(found.surprise, expected, strict=True):
        for layer in (0, 1):
            torch.testing.assert_close(
                some[layer], wanted[layer], rtol=1e-4, atol=1e-5 * float(wanted[layer].abs().max())
            )


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*LINEAR))
def test_the_vocabulary_is_summed_twice_and_not_once_for_each_draw(
    kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert n_of_unembedding(shared_model(kind, name), monkeypatch) == 2


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gemma2"))
def test_a_soft_cap_is_differentiated_in_each_draw(
    kind: str, name: str, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two draws are tried."""
    assert n_of_unembedding(shared_model(kind, name), monkeypatch) == DRAWS + 2


def test_logits_of_the_users_own_are_differentiated_in_each_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks may do anything to what the unembedding reads and returns."""
    model = zoo.load("bridge", "llama-gqa")
    model.hook_dict["unembed.hook_out"].add_hook(lambda x, hook: 3 * x.tanh())
    assert n_of_unembedding(model, monkeypatch) == DRAWS
    (found,) = result_gradients(model, [TOKENS], [0, 1], loss, [draws()])
    for some, wanted in zip(found.surprise, one_by_one(model, draws()), strict=True):
        torch.testing.assert_close(some[0], wanted[0], rtol=1e-4, atol=1e-6)
