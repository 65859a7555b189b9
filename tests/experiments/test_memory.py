"""Layers are held one at a time."""

from __future__ import annotations

import pytest
import torch
from support import zoo
from support.lanes import slow
from support.live_bytes import LiveBytes

import tl_posdisent as tp

LAYER_BY_LAYER = ("additivity", "controlled_distance", "subspace_patterns")


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
