"""Queries and keys of every rotary layer of a run, ready for the mathematics."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.lens.attention import AttentionSpec, read_rotary_layers
from tl_posdisent.lens.capture import stream
from tl_posdisent.maths.rotary import Rotary


class RotaryLayer(NamedTuple):
    """One layer's vectors before rotation, and how it makes scores of them."""

    layer: int
    rotary: Rotary
    scale: float
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]


def rotary_specs(model: Any, layers: Iterable[int] | None, tool: str) -> list[AttentionSpec]:
    """Layers that ``tool`` can work on, or an error that says which cannot."""
    specs = read_rotary_layers(model, layers, tool)
    for spec in specs:
        spec.require_scale()
    return specs


def check_burn_in(burn_in: int, length: int, *, leave: int = 1) -> None:
    """Refuse a burn-in that leaves fewer than ``leave`` positions."""
    if isinstance(burn_in, bool) or not isinstance(burn_in, int) or not 0 <= burn_in <= length - leave:
        raise ValueError(f"burn_in must be an integer from 0 to {length - leave}, got {burn_in!r}")


def rotary_layers(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec], *, burn_in: int, progress: bool
) -> Generator[RotaryLayer, None, None]:
    """One forward pass without score matrices, one layer in memory; the first ``burn_in`` positions left out.

    Close it: the pass waits in a thread of its own until it is used up or closed.
    """
    with closing(stream(model, tokens, specs, scores=False)) as run:
        for layer in tqdm(run, total=len(specs), desc="layers", disable=not progress):
            assert layer.q is not None
            assert layer.k is not None
            assert layer.spec.rotary is not None
            scale = layer.spec.require_scale()
            yield RotaryLayer(layer.layer, layer.spec.rotary, scale, layer.q[:, burn_in:], layer.k[:, burn_in:])
