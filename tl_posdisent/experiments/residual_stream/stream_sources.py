"""The residual stream before a layer as a sum over its sources: embeddings, and earlier heads, biases and MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.residual_stream.qk_readout import (
    FrozenNorm,
    FrozenReadout,
    fit_norm,
    residual_hook,
)
from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.running.forward_pass import Hook, Recorded, running
from tl_posdisent.models.running.model_parts import FIRST_HOOK, architecture
from tl_posdisent.utils.precision import score_tolerance

EMBEDDING, POSITION = "embedding", "positional embedding"
BIAS = "bias"
"""The bias of a layer's own queries and keys and the offset of its norm, which no source of the stream has added."""
_POSITION_HOOK = "hook_pos_embed"
_ADDED = ("hook_resid_pre", "attn.hook_z", "hook_attn_out", "hook_mlp_out")

Reduce = Callable[[Tensor], Tensor]
"""A linear function from ``[batch, pos, …]`` to ``[row, …]``: weighted sums over tokens, or a choice of tokens."""


# A head adds ``z @ W_O`` (times the frozen scale of a norm after the attention, if there is one). As this is linear in
# z, it is enough to reduce z, which has fewer numbers than what it becomes.
def stream_sources(
    model: Any, tokens: Int[Tensor, "batch pos"], reduce: Reduce, layer: int, tool: str
) -> Iterator[tuple[str, Float64[Tensor, "row d_model"]]]:
    """Yield each source of the residual stream before a layer with what it has added, reduced.

    The sources are ``EMBEDDING`` and, where the stream begins as a sum of both, ``POSITION``; then ``"L0H3"``,
    ``"L0 bias"``, ``"L0 MLP"`` and so on. One forward pass up to the layer.

    Raises:
        ValueError: a model whose residual stream is not that sum, or whose attention is not linear in z.
    """
    layers = [_Layer(model, number, tool) for number in range(layer)]
    first = Recorded()
    hooks = [hook for added in layers for hook in added.hooks(reduce)]
    # Hooks of the model, because Granite's bridge computes what a layer adds only for hooks that it knows of.
    with applied(model, [*first.hooks([residual_hook(0)]), *hooks]), running(model) as p:
        names = [name for name in (FIRST_HOOK, _POSITION_HOOK) if name in p.points]
        seen = p.record(tokens, names, stop=max(layer, 1))
    for name, x in _embeddings(first[residual_hook(0)], seen).items():
        yield name, reduce(x)
    for added in layers:
        yield from added.sources()


def _embeddings(first: Tensor, seen: Recorded) -> dict[str, Float64[Tensor, "batch pos d_model"]]:
    """Split the first residual stream into the embeddings of tokens and positions, if it is their sum."""
    position, tokens = seen.get(_POSITION_HOOK), seen.get(FIRST_HOOK)
    if position is None or tokens is None or not _near(tokens.double() + position.double(), first):
        return {EMBEDDING: first.double()}
    of_position = position.double().expand_as(first)
    return {EMBEDDING: first.double() - of_position, POSITION: of_position}


def source_part(
    frozen: FrozenReadout, name: str, x: Float64[Tensor, "*batch head_or_one d_model"]
) -> Float64[Tensor, "*batch head d_head"]:
    """Map what a source has added, scales included, to its part of queries or keys.

    It is 0 where keys are read from the embedded input and the source is none of the embeddings.
    """
    part = frozen.linear(x)
    return part if frozen.source != residual_hook(0) or name in (EMBEDDING, POSITION) else torch.zeros_like(part)


class _Layer:
    """What one layer adds, reduced: ``z @ W_O + b_O``, normalised if there is a norm after it, and its MLP."""

    def __init__(self, model: Any, number: int, tool: str) -> None:
        self.number, self.names = number, [f"blocks.{number}.{short}" for short in _ADDED]
        for name in self.names:
            if name not in model.hook_dict:
                raise ValueError(f"{tool} needs the hook {name}, which {architecture(model)} lacks")
        self.where = f"{tool} needs, in layer {number} of {architecture(model)},"  # begins error messages
        self.attention = model.blocks[number].attn
        weight = None
        with suppress(NotImplementedError):  # of TransformerLens, for weights that are quantised
            weight = getattr(self.attention, "W_O", None)
        if not isinstance(weight, Tensor) or weight.ndim != 3:
            raise ValueError(f"{self.where} output weights W_O [head, d_head, d_model], not quantised")
        self.norm: FrozenNorm | None = None
        self.z = self.mlp = self.scale = torch.zeros(())

    def _weights(self) -> tuple[Float64[Tensor, "head d_head d_model"], Float64[Tensor, " d_model"]]:
        """Convert W_O and b_O to float64, only when needed, so that weights of all layers are not held twice."""
        weight = self.attention.W_O.detach().double()
        bias = getattr(self.attention, "b_O", None)
        return weight, weight[0, 0] * 0 if bias is None else bias.detach().double()

    def hooks(self, reduce: Reduce) -> list[Hook]:
        """Return hooks that set ``z``, ``mlp`` and ``scale`` to the reduced vectors of a pass."""
        seen = Recorded()

        def read(after: Tensor, hook: Any) -> None:
            if missing := [name for name in self.names if name not in seen]:
                raise ValueError(f"{self.where} the hook {missing[0]} to fire in a forward pass, but it does not")
            before, z, added, mlp = (seen.pop(name) for name in self.names)
            if not _near(before.double() + added.double() + mlp.double(), after):
                raise ValueError(
                    f"{self.where} a residual stream to which attention and MLP outputs are added, but here it differs "
                    "from their sum"
                )
            scale = self._scales(z, added)
            self.z = reduce(scale[..., None, None] * z.double())
            self.mlp, self.scale = reduce(mlp.double()), reduce(scale)

        return [*seen.hooks(self.names), (residual_hook(self.number, "post"), read)]

    def _scales(self, z: Tensor, added: Tensor) -> Float64[Tensor, "batch pos"]:
        """Compute the scale of the norm after the attention at every token, 1 without one; fit the norm first."""
        weight, bias = self._weights()
        if z.ndim != 4 or z.shape[2:] != weight.shape[:2]:
            raise ValueError(f"{self.where} heads at hook_z (batch, pos, head, d_head), got {tuple(z.shape)}")
        plain = torch.einsum("bphd,hdm->bpm", z.double(), weight) + bias
        if _near(plain, added):
            return torch.ones_like(plain[..., 0])
        u, v = plain[..., None, :], added.double()[..., None, :]
        self.norm = fit_norm(u, v, added.dtype)
        if self.norm is None or not self.norm.makes(u, v, added.dtype):
            raise ValueError(
                f"{self.where} attention whose output is a linear function of hook_z, added as it is or after a norm, "
                "but here it is not (because of a gate, hooks of your own, or another layout)"
            )
        return self.norm.scales(u, v)[..., 0]

    def sources(self) -> Iterator[tuple[str, Float64[Tensor, "row d_model"]]]:
        """Yield what each head, the bias, if there is one, and the MLP have added."""
        weight, bias = self._weights()
        for head, matrix in enumerate(weight):
            yield f"L{self.number}H{head}", self._normed(self.z[:, head] @ matrix)
        biases = self._normed(self.scale[:, None] * bias)
        if bool(biases.any()):
            yield f"L{self.number} bias", biases
        yield f"L{self.number} MLP", self.mlp

    def _normed(self, x: Float64[Tensor, "row d_model"]) -> Float64[Tensor, "row d_model"]:
        """Apply the norm after the attention without its scale, which is part of the reduced vectors."""
        return x if self.norm is None else self.norm.linear(x[:, None])[:, 0]


def _near(x: Float64[Tensor, "*any"], expected: Tensor) -> bool:
    """Say whether two tensors differ by no more than the rounding of a model of the second's type."""
    difference = (x - expected.double()).abs().amax()
    return bool(difference <= score_tolerance(expected.dtype) * expected.double().abs().amax())
