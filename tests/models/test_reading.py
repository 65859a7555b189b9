"""Laws of ``read_model``: one reading serves many calls, and one that no longer fits its model is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import (
    additivity,
    capture,
    controlled_distance,
    head_ablation,
    longer_context,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.experiments import dummy_distance_check
from tl_posdisent.models import ModelReading


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
def test_reading_again_runs_nothing(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    reading = read_model(model)
    assert count_passes(model, lambda: read_model(model)) == (4 if kind == "bridge" else 3)
    assert count_passes(model, lambda: read_model(reading, [1])) == 0
    assert read_model(reading) is reading


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_layers_as_in_python(kind: str, name: str, shared_model: Any) -> None:
    reading = read_model(shared_model(kind, name))
    assert [spec.layer for spec in reading.specs()] == [0, 1]
    assert reading.specs([1, 0]) == [reading.specs(-1)[0], reading.specs(0)[0]]
    assert reading.heads(0, -1) == {0: [reading.specs()[0].n_heads - 1]}
    assert reading.heads(heads=[(1, 2), (0, 1)]) == {0: [1], 1: [2]}
    assert [spec.layer for spec in reading.rotary(-1, "a tool")] == [1]


def test_layers_that_were_not_read(shared_model: Any) -> None:
    reading = read_model(shared_model("bridge", "llama-gqa"), -1)
    assert reading.heads(heads=0) == {1: [0]}
    for ask in (lambda: reading.specs(0), lambda: reading.heads([0]), lambda: read_model(reading, [0])):
        with pytest.raises(ValueError, match=r"layers must be among those read, \[1\], got 0"):
            ask()


def _ungrouped(model: Any) -> None:
    model.cfg.ungroup_grouped_query_attention = True


def _halved(model: Any) -> None:
    model.to(torch.bfloat16)


def _hooked(model: Any) -> None:
    model.hook_dict["blocks.0.attn.hook_q"].add_hook(lambda x, hook: x.flip(1), is_permanent=True)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize(
    ("change", "what"), [(_ungrouped, "grouping of keys"), (_halved, "dtypes"), (_hooked, "permanent hooks")]
)
def test_a_changed_model_is_noticed(kind: str, name: str, change: Any, what: str) -> None:
    model = zoo.load(kind, name)
    reading = read_model(model)
    change(model)
    with pytest.raises(ValueError, match=f"has changed in {what}: read it again"):
        read_model(reading)
    assert isinstance(read_model(model), ModelReading)


@zoo.needs_bridge
def test_another_attention_implementation_is_noticed() -> None:
    model = zoo.bridge("llama-gqa")
    reading = read_model(model)
    model.original_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="has changed in attention implementation: read it again"):
        read_model(reading)


def test_hooks_of_the_user_are_no_part_of_the_reading(shared_model: Any) -> None:
    """It describes the bare model, so interventions that come and go leave it as true as it was."""
    model = shared_model("bridge", "llama-gqa")
    reading = read_model(model)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", lambda x, hook: x.flip(1))]):
        assert read_model(reading) is reading
        assert [str(spec) for spec in read_model(model).specs()] == [str(spec) for spec in reading.specs()]


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
def test_a_public_call_reads_its_model_once(name: str, shared_model: Any) -> None:
    """And not at all where it is given a reading."""
    model, tokens = shared_model("bridge", "llama-gqa"), zoo.random_tokens(16)
    reading = read_model(model)
    given = count_passes(model, lambda: READERS[name](reading, tokens))
    assert count_passes(model, lambda: READERS[name](model, tokens)) == given + 4
