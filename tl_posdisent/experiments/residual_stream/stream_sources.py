"""The residual stream before a layer as a sum: the embedding, and what each head, bias and MLP of earlier layers added.

A head adds ``z @ W_O`` (times the frozen scale of a norm after the attention, where there is one), which is linear in
z: of weighted means over tokens, only those of z are formed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.models.reading.attributes import architecture
from tl_posdisent.models.reading.forward import run
from tl_posdisent.models.reading.tolerance import score_tolerance

from .qk_readout import FrozenNorm, fit_norm, keep, residual_hook

EMBEDDING = "embedding"
_NAME = re.compile(r"L(\d+)(?:H(\d+)| (MLP|bias))")
_ADDED = ("hook_resid_pre", "attn.hook_z", "hook_attn_out", "hook_mlp_out")


class Batch(NamedTuple):
    """Texts of equal length, and one or several weights of each token."""

    tokens: Int[Tensor, "batch pos"]
    weights: Float64[Tensor, "batch pos weight"]


def weighted_sources(
    model: Any, batches: Sequence[Batch], layer: int, tool: str
) -> tuple[list[str], Float64[Tensor, "source weight d_model"]]:
    """Sum over the tokens, weighted, what every source has added to the stream before a layer.

    Returns:
        Names of the sources: ``"embedding"``, ``"L0H3"``, ``"L0 bias"`` (of the attention's output, if it has one),
        ``"L0 MLP"`` …; and the sums.

    Raises:
        ValueError: a model whose residual stream is not that sum, or whose attention is not linear in z.
    """
    layers = [_LayerSums(_Output(model, number, tool)) for number in range(layer)]
    embedding = torch.zeros(())
    for batch in batches:
        embedding = embedding + _add(model, batch, layers)
    names, parts = [EMBEDDING], [embedding]
    for number, sums in enumerate(layers):
        heads, bias = sums.of_heads(), sums.of_bias()
        names += [f"L{number}H{head}" for head in range(len(heads))]
        parts += heads.unbind(0)
        if bool(bias.any()):
            names.append(f"L{number} bias")
            parts.append(bias)
        names.append(f"L{number} MLP")
        parts.append(sums.mlp)
    return names, torch.stack(parts)


def tokens_of_source(
    model: Any, tokens: Int[Tensor, "batch pos"], source: str, tool: str = "distance_sources"
) -> Float64[Tensor, "batch pos d_model"]:
    """What one source adds to the stream at every token."""
    seen: dict[str, Tensor] = {}
    if source == EMBEDDING:
        run(model, tokens, [keep(residual_hook(0), seen)], stop=1)
        return seen[residual_hook(0)].double()
    number, head, part = parse_source(source)
    names = [_hook(number, short) for short in _ADDED]
    run(model, tokens, [keep(name, seen) for name in names], stop=number + 1)
    _, z, added, mlp = (seen[name] for name in names)
    if part == "MLP":
        return mlp.double()
    output = _Output(model, number, tool)
    scale = output.scales(z, added)
    own = output.bias.expand(*tokens.shape, -1) if head is None else z[:, :, head].double() @ output.weight[head]
    return scale[..., None] * output.normed(own)


def parse_source(source: str) -> tuple[int, int | None, str | None]:
    """Layer, head, and ``"MLP"`` or ``"bias"``, of a source other than the embedding."""
    match = _NAME.fullmatch(source)
    assert match is not None
    return int(match[1]), None if match[2] is None else int(match[2]), match[3]


class _Output:
    """How a layer's attention makes what it adds to the stream: ``z @ W_O + b_O``, and a norm after it, if any."""

    def __init__(self, model: Any, number: int, tool: str) -> None:
        for short in _ADDED:
            if _hook(number, short) not in model.hook_dict:
                raise ValueError(f"{tool} needs the hook {_hook(number, short)}, which {architecture(model)} lacks")
        self.where = f"{tool} needs, in layer {number} of {architecture(model)},"
        self.attention = model.blocks[number].attn
        if not isinstance(weight := getattr(self.attention, "W_O", None), Tensor) or weight.ndim != 3:
            raise ValueError(f"{self.where} output weights W_O [head, d_head, d_model]")
        self.norm: FrozenNorm | None = None

    @property
    def weight(self) -> Float64[Tensor, "head d_head d_model"]:
        """W_O; converted when used, so that the layers' weights are not held twice."""
        weight: Tensor = self.attention.W_O
        return weight.detach().double()

    @property
    def bias(self) -> Float64[Tensor, "d_model"]:
        """b_O, or zeros."""
        bias: Tensor | None = getattr(self.attention, "b_O", None)
        return self.weight[0, 0] * 0 if bias is None else bias.detach().double()

    def scales(self, z: Tensor, added: Tensor) -> Float64[Tensor, "batch pos"]:
        """The scale of the norm after the attention at every token, 1 without one; fits the norm to the first tokens.

        Raises:
            ValueError: what is added is no such function of z.
        """
        weight, wanted = self.weight, added.double()
        if z.ndim != 4 or z.shape[2:] != weight.shape[:2]:
            raise ValueError(f"{self.where} heads at hook_z (batch, pos, head, d_head), got {tuple(z.shape)}")
        plain = torch.einsum("bphd,hdm->bpm", z.double(), weight) + self.bias
        if near(plain, wanted, added.dtype):
            return torch.ones_like(plain[..., 0])
        u, v = plain[..., None, :], wanted[..., None, :]
        self.norm = self.norm or fit_norm(u, v, added.dtype)
        if self.norm is None or not self.norm.makes(u, v, added.dtype):
            raise ValueError(
                f"{self.where} attention whose output is a linear function of hook_z, added as it is or after a norm, "
                "and here it is not (a gate, hooks of your own, or another layout)"
            )
        return self.norm.scales(u, v)[..., 0]

    def normed(self, x: Float64[Tensor, "*batch d_model"]) -> Float64[Tensor, "*batch d_model"]:
        """A part of the attention's output after the norm, but for its scale."""
        return x if self.norm is None else self.norm.linear(x[..., None, :])[..., 0, :]


class _LayerSums:
    """Weighted sums of what one layer adds, over the tokens seen so far."""

    def __init__(self, output: _Output) -> None:
        self.output = output
        self.z = self.mlp = self.scale = torch.zeros(())

    def add(self, weights: Tensor, before: Tensor, z: Tensor, added: Tensor, mlp: Tensor, after: Tensor) -> None:
        if not near(before.double() + added.double() + mlp.double(), after.double(), after.dtype):
            raise ValueError(
                f"{self.output.where} a residual stream to which attention and MLP are added, and here they are not"
            )
        scale = weights * self.output.scales(z, added)[..., None]
        self.z = self.z + torch.einsum("bpw,bphd->whd", scale, z.double())
        self.mlp = self.mlp + torch.einsum("bpw,bpm->wm", weights, mlp.double())
        self.scale = self.scale + scale.sum((0, 1))

    def of_heads(self) -> Float64[Tensor, "head weight d_model"]:
        return self.output.normed(torch.einsum("whd,hdm->hwm", self.z, self.output.weight))

    def of_bias(self) -> Float64[Tensor, "weight d_model"]:
        return self.output.normed(self.scale[:, None] * self.output.bias)


def _add(model: Any, batch: Batch, layers: Sequence[_LayerSums]) -> Float64[Tensor, "weight d_model"]:
    """Run some texts and add up their sums, layer by layer; returns those of the embedding."""
    start: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    hooks = [keep(residual_hook(0), start)]
    for number, sums in enumerate(layers):
        names = [_hook(number, short) for short in _ADDED]

        def reduce(after: Tensor, hook: Any, sums: _LayerSums = sums, names: list[str] = names) -> None:
            before, z, added, mlp = (seen.pop(name) for name in names)
            sums.add(batch.weights, before, z, added, mlp, after)

        hooks += [*(keep(name, seen) for name in names), (_hook(number, "hook_resid_post"), reduce)]
    run(model, batch.tokens, hooks, stop=max(len(layers), 1))
    return torch.einsum("bpw,bpm->wm", batch.weights, start[residual_hook(0)].double())


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors differ by no more than the rounding of a model of this type."""
    return bool((found - wanted).abs().amax() <= score_tolerance(dtype) * wanted.abs().amax())


def _hook(number: int, short: str) -> str:
    return f"blocks.{number}.{short}"
