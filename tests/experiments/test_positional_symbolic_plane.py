"""The positional–symbolic plane at a model: the pure function on what the model computes, and what training changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import stories, zoo

from tl_posdisent import capture, positional_symbolic, random_control
from tl_posdisent.rope import positional_symbolic_qk

Model = Callable[[str, str], Any]
TOKENS = zoo.random_tokens(length=12, batch=2)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "neox", "gptj", "qwen3", "gemma2"))
@pytest.mark.parametrize("sinks", [0, 4])
def test_is_the_plane_of_captured_vectors(kind: str, name: str, sinks: int, shared_model: Model) -> None:
    model = shared_model(kind, name)
    table = positional_symbolic(model, TOKENS, sinks=sinks, progress=False)
    by_subspace = positional_symbolic(model, TOKENS, sinks=sinks, by_subspace=True, progress=False)
    assert table.columns.tolist() == ["batch", "layer", "head", "positional", "symbolic"]
    for layer in capture(model, TOKENS, scores=False):
        plane = positional_symbolic_qk(layer.q[:, sinks:], layer.k[:, sinks:], layer.spec.rotary)
        for mine, whole, parts in (
            ("positional", plane.positional, plane.positional_by_subspace),
            ("symbolic", plane.symbolic, plane.symbolic_by_subspace),
        ):
            for frame, expected in ((table, whole), (by_subspace, parts)):
                found = torch.tensor(frame[frame["layer"] == layer.layer][mine].tolist())
                torch.testing.assert_close(found, expected.flatten().float())
    some = by_subspace[(by_subspace["layer"] == 1) & (by_subspace["head"] == 2) & (by_subspace["batch"] == 0)]
    assert some["frequency"].tolist() == layer.spec.rotary.frequencies.tolist()


def test_training_makes_heads_positional(shared_model: Model) -> None:
    """In the stories model most scores stay with the place, at random initialisation hardly any; fast subspaces alone
    are positional where slow ones alone are symbolic."""
    model, text = shared_model("bridge", "stories"), stories.sample_story(200, 0)
    trained = positional_symbolic(model, text, sinks=20, progress=False)
    chance = positional_symbolic(next(random_control(model)), text, sinks=20, progress=False)
    assert trained["positional"].mean() > 0.4 > 0.3 > chance["positional"].mean()
    parts = positional_symbolic(model, text, sinks=20, by_subspace=True, progress=False)
    parts = parts.groupby("subspace")[["positional", "symbolic"]].mean()
    assert parts["symbolic"].idxmax() == 3
    assert parts["positional"].idxmin() == 3
