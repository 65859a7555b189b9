"""Ctrl-C in a long public function: the model is as it was to the last bit, and no file is half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import GOOD, TOKENS, call, functions
from support.untouched import state

import tl_posdisent as tp

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]
# These run no model of yours: copies of it, none but in your block, none to change the order of words.
LEFT_OUT = ("random_control", "applied", "perturb")
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


def test_an_interrupted_experiment_says_how_to_keep_results(model: Any) -> None:
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", Presser(1))]), pytest.raises(KeyboardInterrupt) as pressed:
        tp.additivity(model, TOKENS)
    assert "tl_posdisent.sweeps.sweep" in "".join(pressed.value.__notes__)
