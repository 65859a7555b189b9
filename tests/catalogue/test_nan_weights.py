"""One weight that is NaN: tools refuse the model in words, in both classes, also where the class hides it."""

from __future__ import annotations

import math

import pytest
import torch
from support import zoo
from support.public_calls import call, callables

TOOLS = ["ablate_heads", "additivity", "attention_ladder", "controlled_distance", "disentanglement", "head_ablation"]
TOOLS += ["position_patching", "preference_flips", "streaming_ablation", "substitute_attention"]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("tool", TOOLS)
def test_a_layer_whose_scores_are_nan(kind: str, name: str, tool: str) -> None:
    model = zoo.load(kind, name)
    with torch.no_grad():
        query = model.blocks[1].attn.W_Q if kind == "hooked" else model.blocks[1].attn.q.weight
        query.view(-1)[0] = math.nan
    changed = {"heads": [(1, 0)]} if tool == "ablate_heads" else {}
    with pytest.raises(ValueError, match=r"layer 1 .*NaN or infinite"):
        call(callables()[tool], model, **changed)
