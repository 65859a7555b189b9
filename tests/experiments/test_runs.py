"""Changes of several kinds in one batch: each output is that of a full pass under its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent.experiments.causal import runs as module
from tl_posdisent.experiments.causal.runs import COUPLED, Change, Runs
from tl_posdisent.hooks import applied
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import read_texts

TOKENS = zoo.random_tokens(length=10, batch=2)
LAYER = 1
HEADS = range(4)


def scaled(by: float, heads: Sequence[int]) -> list[Any]:
    def scale(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, list(heads)] *= by
        return z

    return [(f"blocks.{LAYER}.attn.hook_z", scale)]


def of_z(group: int, heads: Sequence[int]) -> list[Any]:
    return scaled(0.5, heads)


def honest(group: int, heads: Sequence[int]) -> list[Any]:
    return scaled(-1.0, heads)


def beyond_z(group: int, heads: Sequence[int]) -> list[Any]:
    """Changes what follows, too: a run with the changed z alone is wrong."""
    return [*scaled(3.0, heads), (f"blocks.{LAYER}.hook_resid_post", lambda x, hook: 1.1 * x)]


def not_apart(group: int, heads: Sequence[int]) -> list[Any]:
    """Each head's result depends on how many are changed."""
    return scaled(float(len(heads)) + 1, heads)


def nothing(group: int, heads: Sequence[int]) -> list[Any]:
    return []


def failing(group: int, heads: Sequence[int]) -> list[Any]:
    def fail(z: Tensor, hook: Any) -> Tensor:
        raise ValueError("no result")

    return [(f"blocks.{LAYER}.attn.hook_z", fail)]


KINDS: dict[str, list[Change]] = {
    "of one kind": [Change(honest, "a"), Change(of_z, "a")],
    "of two kinds": [Change(honest, "a"), Change(of_z)],
    "one beyond z": [Change(honest, "a"), Change(beyond_z, "b"), Change(of_z)],
    "the first beyond z": [Change(beyond_z, "b"), Change(honest, "a")],
    "coupled": [Change(honest, "a"), Change(not_apart, COUPLED)],
    "one without effect": [Change(nothing, "b"), Change(honest, "a"), Change(beyond_z, "b")],
}


@pytest.mark.parametrize("at_once", [1, 3, 32])
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_outputs_are_those_of_full_passes(
    kind: str, name: str, changes: str, start: int, at_once: int, shared_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "texts_at_once", lambda cfg, length: at_once * len(TOKENS))
    model, own = shared_model(kind, name), KINDS[changes]
    changed = [([head], change) for change in own for head in HEADS]
    with running(model):
        found = [run()[0] for run in Runs(model, read_texts(model, TOKENS), [LAYER], start=start).each(LAYER, changed)]
    for (heads, change), output in zip(changed, found, strict=True):
        with torch.no_grad(), applied(model, change.hooks(0, heads)):
            expected = model(TOKENS)
        torch.testing.assert_close(output[:, start:], expected[:, start:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_each_kind_is_compared_once_and_all_share_a_batch(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    runs = Runs(model, read_texts(model, TOKENS), [LAYER])
    sizes: list[int] = []
    last = model.blocks[-1].mlp.register_forward_hook(lambda part, inputs, x: sizes.append(len(x)))
    changes = [Change(honest, "a"), Change(of_z, "a"), Change(of_z, "b"), Change(of_z)]
    with running(model):
        for run in runs.each(LAYER, [([head], change) for change in changes for head in HEADS]):
            run()
    last.remove()
    # Is the last block alone right? Then all changes and an unmodified text, and a full pass for each of two kinds.
    assert sizes == [2, 2 * len(changes) * len(HEADS) + 1, 2, 2]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_change_that_fails_fails_alone(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    changed = [([head], change) for change in (Change(of_z), Change(failing), Change(honest, "a")) for head in HEADS]
    with running(model):
        found = [*Runs(model, read_texts(model, TOKENS), [LAYER]).each(LAYER, changed)]
        for (heads, change), run in zip(changed, found, strict=True):
            if change.hooks is failing:
                with pytest.raises(ValueError, match="no result"):
                    run()
                continue
            with torch.no_grad(), applied(model, change.hooks(0, heads)):
                torch.testing.assert_close(run()[0], model(TOKENS), rtol=1e-4, atol=1e-4)
