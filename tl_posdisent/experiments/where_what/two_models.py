"""Two models of one architecture: whether they can be compared head by head, and which of their weights are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.running.model_parts import architecture, device_of
from tl_posdisent.utils.errors import ArgumentError, naming

_OF_HEADS: Final = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")


def read_both(before: Any, after: Any) -> tuple[ModelReading, ModelReading]:
    """Read two models; raise unless they are two of one architecture."""
    with naming(model="before"):
        first = read_model(before)
    with naming(model="after"):
        second = read_model(after)
    if first.model is second.model:
        raise ArgumentError(
            "after",
            "must be another model than before, got the same one twice: where a model is trained in place, keep a "
            "copy.deepcopy of it from before",
        )
    for (what, of_first), (_, of_second) in zip(_described(first), _described(second), strict=False):
        if of_first != of_second:
            raise ArgumentError("after", f"must have the same {what} as before, {of_first}, got {of_second}")
    return first, second


def _described(reading: ModelReading) -> Iterator[tuple[str, str]]:
    """Yield what two models must have in common to be compared: its name and its value, in words."""
    model = reading.model
    yield "architecture", architecture(model)
    yield "number of layers", str(reading.n_layers)
    yield "width", str(model.cfg.d_model)
    yield "vocabulary", f"{model.cfg.d_vocab} tokens"
    yield "device", str(device_of(model))
    yield "layers with attention", ", ".join(str(spec.layer) for spec in reading.attention)
    for spec in reading.attention:
        seen = "all keys" if spec.window is None else f"a window of {spec.window} keys"
        heads = f"{spec.n_heads} heads of size {spec.d_head}, {spec.n_kv_heads} of keys"
        rotated = "without RoPE" if spec.rotary is None else "with RoPE"
        causal = "causal" if spec.causal else "not causal"
        yield f"attention in layer {spec.layer}", f"{heads}, {seen}, {causal}, {rotated}"


def same_heads(before: ModelReading, after: ModelReading, pairs: Sequence[Head]) -> list[bool]:
    """Say of each head whether its weights and those of its layer's input norm are equal in both models.

    Where a layer has no matrices by head (latent attention), all parameters of its attention must be equal.
    """
    n_heads = {spec.layer: spec.n_heads for spec in before.attention}
    both = (before.model, after.model)
    return [_equal(*(_of_head(model, layer, head, n_heads[layer]) for model in both)) for layer, head in pairs]


def _of_head(model: Any, layer: int, head: int, n_heads: int) -> list[Tensor]:
    block = model.blocks[layer]
    norm = getattr(block, "ln1", None)
    of_norm = [] if norm is None else list(norm.parameters())
    try:
        matrices = [x for name in _OF_HEADS if (x := getattr(block.attn, name, None)) is not None]
        return [*of_norm, *(x[head * len(x) // n_heads] for x in matrices)]
    except (NotImplementedError, ValueError):
        return [*of_norm, *block.attn.parameters()]


def same_models(before: ModelReading, after: ModelReading) -> bool:
    """Say whether all parameters of two models are equal."""
    return _equal([*before.model.parameters()], [*after.model.parameters()])


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(some, others, strict=True)
    )
