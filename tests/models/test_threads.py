"""One thread uses a model at a time, and a second one is refused; models of their own are independent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import call
from support.results import assert_same
from support.untouched import state

from tl_posdisent import (
    additivity,
    attention_ladder,
    capture,
    controlled_distance,
    head_ablation,
    random_control,
    read_model,
    swap_positions,
)

pytestmark = pytest.mark.tl4

TOKENS = zoo.random_tokens()
REFUSED = "model must be used by one thread at a time, but two threads run it: give each thread a model of its own"


def in_another_thread(work: Callable[[], Any]) -> Any:
    """What another thread gets, or the error that it gets."""
    got: list[Any] = []

    def catching() -> None:
        try:
            got.append(work())
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            got.append(error)

    thread = threading.Thread(target=catching)
    thread.start()
    thread.join(60)
    return got[0]


WORK: dict[str, Callable[[Any], Any]] = {
    "a pass": lambda model: model(TOKENS),
    "a pass with a cache": lambda model: model.run_with_cache(TOKENS),
    "a pass with hooks": lambda model: model.run_with_hooks(TOKENS, fwd_hooks=[]),
    "a capture": lambda model: capture(model, TOKENS),
    "a table": lambda model: additivity(model, TOKENS, progress=False),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_second_thread_is_refused_while_a_tool_runs(kind: str, name: str, work: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    expected, before = [layer.scores for layer in capture(model, TOKENS)], state(model)
    seen: list[Any] = []

    def keep(layer: Any) -> Any:
        seen.append(in_another_thread(lambda: WORK[work](model)))
        return layer.scores

    found = capture(model, TOKENS, keep)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [str(error) for error in seen] == [REFUSED] * 2
    assert all(isinstance(error, ValueError) for error in seen)
    assert state(model) == before


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_pass_that_began_before_is_right_or_refused(kind: str, name: str) -> None:
    """Another thread reads the model in the middle of a pass under hooks, which would miss them from then on."""
    model = zoo.load(kind, name)
    hooks, reading = swap_positions(model, torch.arange(12).flip(0)), threading.Event()
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        expected = model(TOKENS)
    fresh = zoo.load(kind, name)
    hooks = swap_positions(fresh, torch.arange(12).flip(0))

    def wait(x: Any, hook: Any) -> None:
        if threading.current_thread() is not main and not reading.is_set():
            began.set()
            reading.wait(60)

    def hold(x: Any, hook: Any) -> None:
        """A permanent hook, which acts while the model is read: then the other pass goes on."""
        if threading.current_thread() is main and began.is_set() and not reading.is_set():
            reading.set()
            ended.wait(60)

    main, began, ended = threading.current_thread(), threading.Event(), threading.Event()
    got: list[Any] = []

    def under_hooks() -> None:
        try:
            with torch.no_grad(), fresh.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", wait), *hooks]):
                got.append(fresh(TOKENS))
        except ValueError as error:
            got.append(error)
        finally:
            ended.set()

    fresh.hook_dict["blocks.1.attn.hook_q"].add_hook(hold, is_permanent=True)
    thread = threading.Thread(target=under_hooks)
    thread.start()
    began.wait(60)
    read_model(fresh)  # the permanent hook is new to it
    thread.join(60)
    assert reading.is_set()
    assert str(got[0]) == REFUSED or torch.equal(got[0], expected)


def test_random_copies_in_threads() -> None:
    """They are drawn from random numbers that torch has once for all threads."""
    model, other = zoo.bridge("llama-gqa"), zoo.bridge("llama-gqa")
    expected, before = next(random_control(model, [1])).state_dict(), torch.get_rng_state()
    for got in beside(lambda: next(random_control(model, [1])), lambda: next(random_control(other, [2])), 20):
        assert all(torch.equal(x, expected[name]) for name, x in got.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def beside(work: Callable[[], Any], other: Callable[[], Any], times: int) -> list[Any]:
    """Results of ``work``, many times, while another thread does ``other`` again and again."""
    stop, errors = threading.Event(), []

    def loop() -> None:
        try:
            while not stop.is_set():
                other()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
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


@pytest.mark.slow
@pytest.mark.parametrize("tool", [additivity, controlled_distance, head_ablation, attention_ladder])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_threads_with_models_of_their_own(kind: str, name: str, tool: Callable[..., Any]) -> None:
    model, other = zoo.load(kind, name), zoo.load(kind, name)
    for parameter in other.parameters():
        parameter.data *= 1.5
    expected = call(tool, model)
    for got in beside(lambda: call(tool, model), lambda: call(tool, other), 2):
        assert_same(got, expected, rtol=0, atol=0)
