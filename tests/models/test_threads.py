"""One model used by several threads: reading and capturing in one leaves the passes of the others as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import call
from support.results import assert_same

from tl_posdisent import (
    additivity,
    attention_ladder,
    capture,
    controlled_distance,
    distance_sources,
    head_ablation,
    random_control,
    read_model,
    swap_positions,
)

TOKENS = zoo.random_tokens()


def beside(work: Callable[[], Any], other: Callable[[], Any], times: int) -> list[Any]:
    """Results of ``work``, many times, while another thread does ``other`` again and again."""
    stop, errors = threading.Event(), []

    def loop() -> None:
        try:
            while not stop.is_set():
                other()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        got = [work() for _ in range(times)]
    finally:
        stop.set()
        thread.join(60)
    assert not errors
    return got


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_hooks_of_another_thread_stay_in_force_while_a_model_is_read(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with torch.no_grad(), model.hooks(fwd_hooks=swap_positions(model, torch.arange(12).flip(0))):
        expected = model(TOKENS)
        for got in beside(lambda: model(TOKENS), lambda: read_model(model), 40):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_readings_in_threads_agree(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    expected = [str(spec) for spec in read_model(model).specs()]
    for got in beside(lambda: read_model(model), lambda: read_model(model), 10):
        assert [str(spec) for spec in got.specs()] == expected


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_captures_in_threads_are_of_their_own_texts(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    reading = read_model(model)
    expected = [layer.scores for layer in capture(reading, TOKENS)]
    longer = zoo.random_tokens(17, seed=1)
    for got in beside(lambda: list(capture(reading, TOKENS)), lambda: list(capture(reading, longer)), 20):
        assert all(torch.equal(layer.scores, scores) for layer, scores in zip(got, expected, strict=True))


@zoo.needs_bridge
def test_random_copies_in_threads() -> None:
    """They are drawn from random numbers that torch has once for all threads."""
    model, other = zoo.bridge("llama-gqa"), zoo.bridge("llama-gqa")
    expected, state = next(random_control(model, [1])).state_dict(), torch.get_rng_state()
    for got in beside(lambda: next(random_control(model, [1])), lambda: next(random_control(other, [2])), 20):
        assert all(torch.equal(x, expected[name]) for name, x in got.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [additivity, controlled_distance, head_ablation, attention_ladder, distance_sources])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_threads_with_models_of_their_own(kind: str, name: str, tool: Callable[..., Any]) -> None:
    model, other = zoo.load(kind, name), zoo.load(kind, name)
    for parameter in other.parameters():
        parameter.data *= 1.5
    expected = call(tool, model)
    for got in beside(lambda: call(tool, model), lambda: call(tool, other), 2):
        assert_same(got, expected, rtol=0, atol=0)
