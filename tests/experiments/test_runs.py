"""Changes of several kinds in one batch: each output is that of a full pass under its hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import zoo
from support.lanes import slow
from torch import Tensor

from tl_posdisent.experiments.measuring import runs as module
from tl_posdisent.experiments.measuring.runs import Change, Runs
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
    return [*scaled(3.0, heads), (f"blocks.{LAYER}.hook_resid_post", lambda x, hook: x + 0.1 * x.flip(-1))]


def not_apart(group: int, heads: Sequence[int]) -> list[Any]:
    """Each head's result depends on how many are changed."""
    return scaled(float(len(heads)) + 1, heads)


def nothing(group: int, heads: Sequence[int]) -> list[Any]:
    return []


def failing(group: int, heads: Sequence[int]) -> list[Any]:
    def fail(z: Tensor, hook: Any) -> Tensor:
        raise ValueError("no result")

    return [(f"blocks.{LAYER}.attn.hook_z", fail)]


SHARED: dict[str, list[tuple[str, Any]]] = {
    "of one name": [("a", honest), ("a", of_z)],
    "of two names": [("a", honest), ("b", of_z)],
    "one beyond z": [("a", honest), ("b", beyond_z), ("c", of_z)],
    "the first beyond z": [("b", beyond_z), ("a", honest)],
    "one not apart": [("a", honest), ("b", not_apart)],
    "one without effect": [("b", nothing), ("a", honest), ("b", beyond_z)],
}


def changes_of(named: Sequence[tuple[str, Any]]) -> list[Change]:
    """One change of each head under each hooks, and one of all heads."""
    return [
        Change(name, heads, hooks) for name, hooks in named for heads in (*((head,) for head in HEADS), tuple(HEADS))
    ]


def outputs(model: Any, changes: Sequence[Change]) -> list[Any]:
    runs = Runs(model, read_texts(model, TOKENS), [LAYER])
    return [run()[0] for run, _ in runs.changed(LAYER, changes, runs.shortcuts)]


def check_outputs(model: Any, changes: Sequence[Change], found: Sequence[Tensor]) -> None:
    for change, output in zip(changes, found, strict=True):
        with torch.no_grad(), applied(model, change.hooks(0, change.heads)):
            torch.testing.assert_close(output, model(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [3, *slow([1, 32])])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_outputs_are_those_of_full_passes(
    kind: str,
    name: str,
    shared: str,
    at_once: int,
    shared_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared_model(kind, name)
    monkeypatch.setattr(module, "texts_at_once", lambda cfg, length: at_once * len(TOKENS))
    changes, sizes = changes_of(SHARED[shared]), list[int]()
    unembedding = model.unembed.register_forward_pre_hook(lambda part, args: sizes.append(len(args[0])))
    with running(model):
        found = outputs(model, changes)
    unembedding.remove()
    assert max(sizes) == len(TOKENS)  # logits are large: those of one change at a time
    check_outputs(model, changes, found)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_each_name_is_compared_once_and_all_share_a_batch(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    changes = changes_of([("a", honest), ("a", of_z), ("b", of_z)])
    sizes: list[int] = []
    last = model.blocks[-1].mlp.register_forward_hook(lambda part, inputs, x: sizes.append(len(x)))
    with running(model):
        runs = Runs(model, read_texts(model, TOKENS), [LAYER])
        once, again, shortcuts = [], [], runs.shortcuts
        for outputs in (once, again):
            for run, known in runs.changed(LAYER, changes, shortcuts):
                outputs.append(run()[0])
                shortcuts = known
    last.remove()
    # The clean run; all changes and an unmodified text, and a full pass for each name; and all changes once more.
    batch = 2 * len(changes) + 1
    assert sizes == [2, batch, 2, 2, batch]
    check_outputs(model, changes, once)
    check_outputs(model, changes, again)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_after_a_difference_all_passes_are_full(kind: str, name: str, shared_model: Any) -> None:
    model, sizes = shared_model(kind, name), list[int]()
    with running(model):
        runs = Runs(model, read_texts(model, TOKENS), [LAYER])
        changes = changes_of([("b", beyond_z)])
        outputs, shortcuts = [], runs.shortcuts
        for run, known in runs.changed(LAYER, changes, shortcuts):
            outputs.append(run()[0])
            shortcuts = known
        check_outputs(model, changes, outputs)
        last = model.blocks[-1].mlp.register_forward_hook(lambda part, inputs, x: sizes.append(len(x)))
        changes = changes_of([("a", honest)])
        outputs = [run()[0] for run, _ in runs.changed(LAYER, changes, shortcuts)]
        last.remove()
    assert sizes == [2] * len(changes)
    check_outputs(model, changes, outputs)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_change_that_fails_fails_alone(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    changes = changes_of([("a", of_z), ("b", failing), ("c", honest)])
    with running(model):
        runs = Runs(model, read_texts(model, TOKENS), [LAYER])
        for change, (run, _) in zip(changes, [*runs.changed(LAYER, changes, runs.shortcuts)], strict=True):
            if change.hooks is failing:
                with pytest.raises(ValueError, match="no result"):
                    run()
            else:
                check_outputs(model, [change], run())


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_name_is_compared_in_one_layer_where_layers_share_the_stream_alone(
    kind: str, name: str, shared_model: Any
) -> None:
    model = shared_model(kind, name)

    def halved(layer: int) -> Any:
        def halve(z: Tensor, hook: Any) -> Tensor:
            return z / 2

        return lambda group, heads: [(f"blocks.{layer}.attn.hook_z", halve)]

    outputs: dict[int, list[int]] = {}
    with running(model):
        runs = Runs(model, read_texts(model, TOKENS), [0, 1])
        shortcuts = runs.shortcuts
        for layer in (0, 1):
            outputs[layer] = []
            count = model.blocks[-1].mlp.register_forward_hook(
                lambda part, inputs, x, sizes=outputs[layer]: sizes.append(len(x))
            )
            [(run, shortcuts)] = runs.changed(layer, [Change("halved", tuple(HEADS), halved(layer))], shortcuts)
            found = run()[0]
            count.remove()
            with torch.no_grad(), applied(model, halved(layer)(0, HEADS)):
                torch.testing.assert_close(found, model(TOKENS), rtol=1e-4, atol=1e-4)
    # The change and an unmodified text, and a full pass; and the other change.
    assert outputs == {0: [3, 2], 1: [3]}
