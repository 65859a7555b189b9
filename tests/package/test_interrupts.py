"""Ctrl-C anywhere in a long public function: the model is as it was to the last bit, and no file is half.

It comes where it does most harm, inside a forward pass, and where users mostly press it, while a bar moves on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import tqdm
from support import zoo
from support.interrupts import Interrupt
from support.public_calls import GOOD, LABELS, SAMPLES, TASK, TOKENS, call, functions, synthetic
from support.untouched import state, state_of_model

import tl_posdisent as tp
from tl_posdisent.hooks import applied
from tl_posdisent.models.running.model_parts import modules
from tl_posdisent.synthetic import evaluate, head_drops, positional_gradients
from tl_posdisent.utils.restoring import without_gradients

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]
# These run no model of yours: copies of it, none but in your block, none to change the order of words.
# The last calls what is tried here.
LEFT_OUT = ("random_control", "applied", "perturb", "check_model")
RUNS_THE_MODEL = [f for f in functions() if f.__name__ not in LEFT_OUT]


class Presser:
    """Presses Ctrl-C at one of its calls."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.calls = at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.bridge("llama-gqa")


def weights(model: Any) -> list[torch.Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


@pytest.mark.parametrize("function", RUNS_THE_MODEL, ids=lambda function: function.__name__)
def test_inside_a_forward_pass(function: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first pass, in the middle and in the last, in the first layer: some passes end there."""
    monkeypatch.setitem(GOOD, "path", tmp_path / "report.html")
    point = model.blocks[0].attn.hook_z
    with torch.no_grad():
        plain = model(TOKENS)
    before, numbers = state(model), weights(model)

    def press(at: int | None) -> int:
        presser = Presser(at)
        point.add_hook(presser, is_permanent=True)
        try:
            call(function, model)
        finally:
            point.remove_hooks("fwd", including_permanent=True)
        return presser.calls

    calls = press(None)
    (tmp_path / "report.html").unlink(missing_ok=True)
    assert calls, "it never runs the model: leave it out, with the reason"
    for at in sorted({1, (calls + 1) // 2, calls}):
        with pytest.raises(KeyboardInterrupt):
            press(at)
        assert state(model) == before, at
        assert not list(tmp_path.iterdir()), at
    assert all(torch.equal(a, b) for a, b in zip(weights(model), numbers, strict=True))
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("function", functions("progress"), ids=lambda function: function.__name__)
def test_while_the_bar_moves(function: Any, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GOOD, "path", tmp_path / "report.html")
    before = state(model)
    presser, update = Presser(1), tqdm.std.tqdm.update

    def pressed(self: Any, n: float | None = 1) -> Any:
        presser()
        return update(self, n)

    def iterated(self: Any) -> Iterator[Any]:
        for x in self.iterable:
            presser()
            yield x

    monkeypatch.setattr(tqdm.std.tqdm, "update", pressed)
    monkeypatch.setattr(tqdm.std.tqdm, "__iter__", iterated)
    with pytest.raises(KeyboardInterrupt) as pressed_keys:
        call(function, model, progress=True)
    monkeypatch.undo()
    if ".experiments." in function.__module__:
        assert "tl_posdisent.sweeps.sweep" in "".join(pressed_keys.value.__notes__)
    assert state(model) == before
    assert not list(tmp_path.iterdir())


SYNTHETIC: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda model: evaluate(model, SAMPLES, LABELS, batch_size=4),
    "head_drops": lambda model: head_drops(model, SAMPLES, LABELS, progress=False),
    "positional_gradients": lambda model: positional_gradients(model, TASK, batches=3, batch_size=4, progress=False),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_models(name: str, training: bool) -> None:
    model = synthetic(n_layers=2, dropout=0.2)
    model.train(training)
    model.blocks[0].eval()  # a mode of one part alone is kept too
    point, before, numbers = model.blocks[1].attn.hook_z, state(model), weights(model)
    counter = Presser()
    point.add_hook(counter, is_permanent=True)
    expected = SYNTHETIC[name](model)
    for at in sorted({1, (counter.calls + 1) // 2, counter.calls}):
        point.remove_hooks("fwd", including_permanent=True)
        point.add_hook(Presser(at), is_permanent=True)
        with pytest.raises(KeyboardInterrupt):
            SYNTHETIC[name](model)
        point.remove_hooks("fwd", including_permanent=True)
        assert state(model) == before
        assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights(model), numbers, strict=True))
    again = SYNTHETIC[name](model)
    assert again.equals(expected) if isinstance(expected, pd.DataFrame) else again == expected


ANYWHERE: dict[str, Callable[[Any], Any]] = {
    "additivity": lambda model: tp.additivity(model, TOKENS, layers=0, progress=False),
    "capture": lambda model: [layer.layer for layer in tp.capture(model, TOKENS)],
    "head_ablation": lambda model: tp.head_ablation(model, TOKENS, heads=[(0, 1)], progress=False),
    "hooks": lambda model: run_hooked(model),
}
PLACES = {"additivity": 30, "capture": 30, "head_ablation": 30, "hooks": 150}  # which run in 10 to 30 ms


def run_hooked(model: Any) -> None:
    # TransformerLens's norms enter torch.no_grad(), which leaves gradients off if it is interrupted there.
    with without_gradients(), applied(model, tp.dummy_distance(model, 3)):
        model(TOKENS)


def everything(model: Any) -> tuple[Any, ...]:
    """Hooks, modes, and what is kept in the place of a module's own methods."""
    parts = modules(model)
    own = [[name for name in ("forward", "_call_impl") if name in vars(part)] for part in parts]
    return (*state_of_model(model), own, [len(part._forward_pre_hooks) for part in parts], torch.is_grad_enabled())


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize(("kind", "architecture"), zoo.cases("llama-gqa"))
def test_wherever_python_looks_for_signals(kind: str, architecture: str, name: str) -> None:
    """Random places between two instructions of the library, of contextlib, of torch's gradient modes and of hook
    points, where a real signal can come."""
    model = zoo.load(kind, architecture)
    ANYWHERE[name](model)
    whole = Interrupt()
    assert not whole.run(lambda: ANYWHERE[name](model))
    before, rng = everything(model), random.Random(0)
    places = rng.sample(range(1, whole.count + 1), PLACES[name])
    changed = []
    for at in places:
        assert Interrupt(at).run(lambda: ANYWHERE[name](model)) or whole.count - at < 100  # of garbage, which varies
        if everything(model) != before:
            changed.append(at)
    assert changed == []
