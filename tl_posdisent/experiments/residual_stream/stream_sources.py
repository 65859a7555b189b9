"""The residual stream before a layer as a sum: the embedding, and what each head, bias and MLP of earlier layers added.

A head adds ``z @ W_O`` (times the frozen scale of a norm after the attention, where there is one), which is linear in
z: of weighted means over tokens, only those of z are formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.models.reading.attributes import architecture
from tl_posdisent.models.reading.forward import Hook, run
from tl_posdisent.utils.precision import score_tolerance

from .qk_readout import FrozenNorm, fit_norm, keep, residual_hook

EMBEDDING = "embedding"
_ADDED = ("hook_resid_pre", "attn.hook_z", "hook_attn_out", "hook_mlp_out")


class Batch(NamedTuple):
    """Texts of equal length, and one or several weights of each token."""

    tokens: Int[Tensor, "batch pos"]
    weights: Float64[Tensor, "batch pos weight"]


def weighted_sources(
    model: Any, batches: Sequence[Batch], layer: int, tool: str
) -> dict[str, Float64[Tensor, "weight d_model"]]:
    """Sum over the tokens, weighted, what every source has added to the stream before a layer; by source.

    Raises:
        ValueError: a model whose residual stream is not that sum, or whose attention is not linear in z.
    """
    layers = [_Layer(model, number, tool) for number in range(layer)]
    embedding = torch.zeros((), device="cpu")
    for tokens, weights in batches:
        start: dict[str, Tensor] = {}
        hooks = [hook for each in layers for hook in each.hooks(weights)]
        run(model, tokens, [keep(residual_hook(0), start), *hooks], stop=max(layer, 1))
        embedding = embedding + torch.einsum("bpw,bpm->wm", weights, start[residual_hook(0)].double())
    found = {EMBEDDING: embedding}
    for each in layers:
        found |= each.sources()
    return found


class _Layer:
    """Weighted sums of what one layer adds: ``z @ W_O + b_O``, with a norm after it if there is one, and its MLP."""

    def __init__(self, model: Any, number: int, tool: str) -> None:
        self.number, self.names = number, [f"blocks.{number}.{short}" for short in _ADDED]
        for name in self.names:
            if name not in model.hook_dict:
                raise ValueError(f"{tool} needs the hook {name}, which {architecture(model)} lacks")
        self.where = f"{tool} needs, in layer {number} of {architecture(model)},"
        self.attention = model.blocks[number].attn
        if not isinstance(weight := getattr(self.attention, "W_O", None), Tensor) or weight.ndim != 3:
            raise ValueError(f"{self.where} output weights W_O [head, d_head, d_model]")
        self.norm: FrozenNorm | None = None
        self.z = self.mlp = self.scale = torch.zeros((), device="cpu")

    def _weights(self) -> tuple[Float64[Tensor, "head d_head d_model"], Float64[Tensor, "d_model"]]:
        """W_O and b_O; converted when used, so that the layers' weights are not held twice."""
        weight = self.attention.W_O.detach().double()
        bias = getattr(self.attention, "b_O", None)
        return weight, weight[0, 0] * 0 if bias is None else bias.detach().double()

    def hooks(self, weights: Float64[Tensor, "batch pos weight"]) -> list[Hook]:
        """Hooks that add the sums of some texts."""
        seen: dict[str, Tensor] = {}

        def reduce(after: Tensor, hook: Any) -> None:
            before, z, added, mlp = (seen.pop(name) for name in self.names)
            if not _near(before.double() + added.double() + mlp.double(), after):
                raise ValueError(
                    f"{self.where} a residual stream to which attention and MLP are added, and here they are not"
                )
            scale = weights * self._scales(z, added)[..., None]
            self.z = self.z + torch.einsum("bpw,bphd->whd", scale, z.double())
            self.mlp = self.mlp + torch.einsum("bpw,bpm->wm", weights, mlp.double())
            self.scale = self.scale + scale.sum((0, 1))

        return [*(keep(name, seen) for name in self.names), (residual_hook(self.number, "post"), reduce)]

    def _scales(self, z: Tensor, added: Tensor) -> Float64[Tensor, "batch pos"]:
        """The scale of the norm after the attention at every token, 1 without one; the first tokens fit the norm."""
        weight, bias = self._weights()
        if z.ndim != 4 or z.shape[2:] != weight.shape[:2]:
            raise ValueError(f"{self.where} heads at hook_z (batch, pos, head, d_head), got {tuple(z.shape)}")
        plain = torch.einsum("bphd,hdm->bpm", z.double(), weight) + bias
        if _near(plain, added):
            return torch.ones_like(plain[..., 0])
        u, v = plain[..., None, :], added.double()[..., None, :]
        self.norm = self.norm or fit_norm(u, v, added.dtype)
        if self.norm is None or not self.norm.makes(u, v, added.dtype):
            raise ValueError(
                f"{self.where} attention whose output is a linear function of hook_z, added as it is or after a norm, "
                "and here it is not (a gate, hooks of your own, or another layout)"
            )
        return self.norm.scales(u, v)[..., 0]

    def sources(self) -> dict[str, Float64[Tensor, "weight d_model"]]:
        """The sums by source."""
        weight, bias = self._weights()
        heads = torch.einsum("whd,hdm->hwm", self.z, weight)
        biases = self.scale[:, None] * bias
        if self.norm is not None:  # of a part of the output, but for its scale
            heads, biases = (self.norm.linear(x[..., None, :])[..., 0, :] for x in (heads, biases))
        found = {f"L{self.number}H{head}": x for head, x in enumerate(heads)}
        if bool(biases.any()):
            found[f"L{self.number} bias"] = biases
        return found | {f"L{self.number} MLP": self.mlp}


def _near(found: Float64[Tensor, "*any"], wanted: Tensor) -> bool:
    """Whether two tensors differ by no more than the rounding of a model of the second's type."""
    difference = (found - wanted.double()).abs().amax()
    return bool(difference <= score_tolerance(wanted.dtype) * wanted.double().abs().amax())
