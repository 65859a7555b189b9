"""Laws of ``read_model``: one reading serves many calls, and one that no longer fits its model is noticed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import (
    additivity,
    capture,
    controlled_distance,
    dummy_distance,
    head_ablation,
    longer_context,
    read_attention,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.experiments import dummy_distance_check


def count_passes(model: Any, call: Callable[[], Any]) -> int:
    """Forward passes of the model on texts as short as those on which it is read."""
    passes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[-1]))
    try:
        call()
    finally:
        handle.remove()
    return sum(length < 16 for length in passes)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_reading_is_kept_with_its_model(kind: str, name: str) -> None:
    """And goes with it."""
    model = zoo.load(kind, name)
    assert count_passes(model, lambda: read_model(model, [1])) == (4 if kind == "bridge" else 3)
    assert count_passes(model, lambda: read_model(model, [1])) == 0
    reading = read_model(model)  # reads what it lacks
    assert count_passes(model, lambda: read_model(model)) == 0
    assert read_model(model).specs() == reading.specs()
    assert all(a is b for a, b in zip(read_model(model).specs(), reading.specs(), strict=True))
    assert read_model(reading) is reading
    gone = weakref.ref(model)
    del model, reading
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_layers_as_in_python(kind: str, name: str, shared_model: Any) -> None:
    reading = read_model(shared_model(kind, name))
    assert [spec.layer for spec in reading.specs([1, 0])] == [1, 0]
    assert reading.specs([1, 0]) == [*reading.specs(-1), read_attention(reading, 0)]
    assert reading.heads(0, -1) == {0: [reading.specs()[0].n_heads - 1]}
    assert reading.heads(heads=[(1, 2), (0, 1)]) == {0: [1], 1: [2]}
    assert [spec.layer for spec in reading.rotary(-1, "a tool")] == [1]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_all_layers_are_those_of_the_model(kind: str, name: str) -> None:
    """Not those that were read: a reading reads what it lacks, in any order."""
    reading = read_model(zoo.load(kind, name), -1)
    assert repr(reading).startswith("ModelReading(1 of 2 layers")
    assert reading.heads(heads=0) == {0: [0], 1: [0]}
    assert [spec.layer for spec in reading.specs()] == [0, 1]
    hooks = dummy_distance(read_model(zoo.load(kind, name), [1]), 5)
    assert sorted({x.spec.layer for x in hooks.interventions}) == [0, 1]


def _one_weight(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1.0


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: setattr(m.cfg, "ungroup_grouped_query_attention", True), "grouping of keys"),
    (lambda m: m.to(torch.bfloat16), "dtypes"),
    (lambda m: m.hook_dict["blocks.0.attn.hook_q"].add_hook(lambda x, hook: x, is_permanent=True), "permanent hooks"),
    (lambda m: next(m.parameters()).data.mul_(1.5), "weights"),
    (_one_weight, "weights"),
    (lambda m: setattr(m.cfg, "attn_scores_soft_cap", 7.0), "settings"),
]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_changed_model_is_noticed(kind: str, name: str, change: Any, what: str) -> None:
    """A reading that was kept is made anew, one that is passed on is refused."""
    model = zoo.load(kind, name)
    reading = read_model(model)
    change(model)
    with pytest.raises(ValueError, match=rf"has changed in (.*, )?{what}(, .*)?: read it again"):
        read_model(reading)
    assert count_passes(model, lambda: read_model(model)) > 0
    assert read_model(model).specs()[0] is not reading.specs()[0]


def test_a_copy_of_a_model_is_another_model(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = read_model(model).specs()[0]
    assert read_model(copy.deepcopy(model)).specs()[0] is not spec


@zoo.needs_bridge
def test_another_attention_implementation_is_noticed() -> None:
    model = zoo.bridge("llama-gqa")
    reading = read_model(model)
    model.original_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="has changed in attention implementation: read it again"):
        read_model(reading)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "capture": lambda model, tokens: list(capture(model, tokens)),
    "longer_context": lambda model, tokens: entered(longer_context(model, 20)),
    "additivity": lambda model, tokens: additivity(model, tokens, progress=False),
    "controlled_distance": lambda model, tokens: controlled_distance(model, tokens, progress=False),
    "dummy_distance_check": lambda model, tokens: dummy_distance_check(model, tokens, distances=[1, 3]),
    "head_ablation": lambda model, tokens: head_ablation(model, tokens, progress=False),
    "swap_positions": lambda model, tokens: swap_positions(model, torch.arange(tokens.shape[1])),
    "remap_distance": lambda model, tokens: remap_distance(model, lambda d: d),
}


def entered(context: Any) -> None:
    with context:
        pass


@pytest.mark.parametrize("name", READERS)
def test_a_public_call_reads_its_model_once(name: str) -> None:
    """The first one; later ones not at all."""
    model, tokens = zoo.bridge("llama-gqa"), zoo.random_tokens(16)
    first = count_passes(model, lambda: READERS[name](model, tokens))
    given = count_passes(model, lambda: READERS[name](model, tokens))
    assert first >= given + 4
    assert count_passes(model, lambda: READERS[name](read_model(model), tokens)) == given
