"""A text whose scores cannot fit is refused before it runs, and layers are held one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import zoo
from support.lanes import slow
from support.live_bytes import LiveBytes

import tl_posdisent as tp
from tl_posdisent.models.running import memory

LAYER_BY_LAYER = ("additivity", "controlled_distance", "subspace_patterns", "positional_symbolic")


@pytest.mark.parametrize("tool", [*LAYER_BY_LAYER[:2], *slow(LAYER_BY_LAYER[2:])])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_layers_are_held_one_at_a_time(kind: str, name: str, tool: str) -> None:
    """Four more layers of the same width add less than the scores of one."""
    tokens, most = zoo.random_tokens(256, 1), []
    for layers in (2, 6):
        model = {"bridge": zoo.bridge, "hooked": zoo.hooked}[kind](
            name, num_hidden_layers=layers, max_position_embeddings=1024
        )
        tp.read_model(model)
        with torch.no_grad(), LiveBytes() as live:
            getattr(tp.experiments, tool)(model, tokens, progress=False)
        most.append(live.most)
    assert most[1] - most[0] < 8 * 256**2 * 4


def test_additivity_refuses_what_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it runs, and only where one layer's scores alone are more than there is."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=256)
    scores = 8 * 256**2 * 4
    monkeypatch.setattr(memory, "free_memory", lambda devices: scores - 1)
    with pytest.raises(MemoryError, match=r"scores of one layer .* use fewer or shorter texts$"):
        tp.additivity(model, tokens, progress=False)
    monkeypatch.setattr(memory, "free_memory", lambda devices: scores)
    assert len(tp.additivity(model, tokens, layers=[0], progress=False)) == 8
    monkeypatch.setattr(memory, "free_memory", lambda devices: None)  # not known: not refused
    assert len(tp.additivity(model, tokens, layers=[1], progress=False)) == 8


def test_free_memory(tmp_path: Path) -> None:
    free = memory.free_memory(["cpu", "mps"])
    assert free is not None
    assert 0 < free < 2**50
    assert memory.free_memory(["mps"]) is None
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 50\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._left_by_group(tmp_path) == [350]
    assert [memory.gigabytes(n) for n in (2.5e9, 3e13)] == ["2.5 GB", "30,000 GB"]
