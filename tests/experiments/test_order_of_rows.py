"""Tables of effects by head are in the order of the model, and largest effects of either sign can be found in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo

import tl_posdisent as tp

TOKENS, OTHERS = zoo.random_tokens(length=9, batch=2), zoo.random_tokens(length=9, batch=2, seed=5)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def interventions(model: Any) -> dict[str, Any]:
    return {name: tp.dummy_distance(model, 5 * n) for n, name in enumerate(("z", "a"))}


CALLS = {
    "head_effects": lambda model, **some: tp.head_effects(model, TOKENS, interventions(model), **some),
    "head_ablation": lambda model, **some: tp.head_ablation(model, TOKENS, **some),
    "head_patching": lambda model, **some: tp.head_patching(model, TOKENS, OTHERS, loss, **some),
    "component_patching": lambda model, **some: tp.component_patching(model, TOKENS, source=OTHERS, **some),
    "position_patching": lambda model, **some: tp.position_patching(model, TOKENS, torch.arange(9).flip(0), **some),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_in_the_order_of_the_model(name: str, shared_model: Any) -> None:
    heads = [(1, 3), (1, 0), (0, 2), (0, 1)]
    table = CALLS[name](shared_model("bridge", "llama-gqa"), heads=heads, progress=False)
    places = table[[x for x in ("intervention", "layer", "head", "batch", "position") if x in table]]
    if "intervention" in table:
        assert table["intervention"].unique().tolist() == ["z", "a"]  # as they were given
        places = places.assign(intervention=places["intervention"].map(["z", "a"].index))
    rows = [*places.itertuples(index=False, name=None)]
    assert rows == sorted(rows)
    assert {*zip(table["layer"], table["head"], strict=True)} == {*heads}
