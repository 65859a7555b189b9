"""Queries and keys as an affine function of the residual stream while every norm divides by what it divided by.

A norm is linear once its scale is frozen: ``norm(x) = t · gain ∘ x`` (``x`` less its mean, for some), with one number t
for every vector. A pre-norm, the projections and a QK-norm then make a query of a vector x of the stream as
``r · gain ∘ (s · M x + bias)``, and the mean query is the same map of a weighted mean of x, with the weights ``r · s``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.models.reading.observe import score_tolerance
from tl_posdisent.models.reading.spec import AttentionSpec, Tap

from .qk_readout import Reading, Side, measure_readings, plain_tap

_ROUNDS = 4


@dataclass(frozen=True)
class FrozenNorm:
    """A norm without its scale: ``v = t · gain ∘ u``, or of ``u`` less its mean.

    Attributes:
        gain: ``[head, size]``, of mean square 1 for every head.
        centred: whether the mean is subtracted first.
    """

    gain: Float64[Tensor, "head size"]
    centred: bool

    def linear(self, u: Float64[Tensor, "*batch head size"]) -> Float64[Tensor, "*batch head size"]:
        """``gain ∘ u``."""
        return self.gain * (u - u.mean(-1, keepdim=True) if self.centred else u)

    def scales(
        self, u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"]
    ) -> Float64[Tensor, "*batch head"]:
        """t of every vector, by least squares."""
        return _factor(self.linear(u), v, -1)

    def error(self, u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"]) -> float:
        """Largest difference of the norm's output from this form of it."""
        return float((self.scales(u, v)[..., None] * self.linear(u) - v).abs().amax())


def fit_norm(
    u: Float64[Tensor, "vector head size"], v: Float64[Tensor, "vector head size"], dtype: torch.dtype
) -> FrozenNorm | None:
    """The norm that made ``v`` of ``u``; None if there is none with a gain and one scale for each vector.

    ``dtype`` is that of the model, whose rounding is allowed.
    """
    found = [_fit(u, v, centred) for centred in (False, True)]
    best = min(found, key=lambda norm: norm.error(u, v))
    return best if best.error(u, v) <= score_tolerance(dtype) * float(v.abs().amax()) else None


def _fit(u: Tensor, v: Tensor, centred: bool) -> FrozenNorm:
    """``v / u`` is a table of rank one, gains times scales: its medians are the scales, but for rounding, and
    alternating least squares makes the best of rounding."""
    x = u - u.mean(-1, keepdim=True) if centred else u
    t = (v / x).abs().nanmedian(-1).values.nan_to_num(nan=0.0, posinf=0.0)
    for _ in range(_ROUNDS):
        gain = _factor(t[..., None] * x, v, 0)
        norm = gain.square().mean(-1, keepdim=True).sqrt()
        gain = torch.where(norm > 0, gain / norm, gain)
        t = _factor(gain * x, v, -1)
    return FrozenNorm(gain, centred)


def _factor(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """The number c that brings ``c x`` nearest to y, along an axis; 0 where x is 0."""
    size = x.square().sum(dim)
    return torch.where(size > 0, (x * y).sum(dim) / size, 0.0)


@dataclass(frozen=True)
class FrozenReadout:
    """How one layer makes its queries (or keys) of the residual stream at frozen scales.

    Attributes:
        reading: the affine map before any QK-norm.
        qk_norm: the QK-norm; None without.
        needed: how messages begin.
    """

    reading: Reading
    qk_norm: FrozenNorm | None
    needed: str

    @property
    def source(self) -> str:
        """The hook of the stream that is read."""
        return self.reading.source

    @property
    def n_weights(self) -> int:
        """Weights of a token: one, or one for each head."""
        return 1 if self.qk_norm is None else len(self.qk_norm.gain)

    def weights(
        self,
        spec: AttentionSpec,
        x: Float[Tensor, "batch pos d_model"],
        plain: Float[Tensor, "batch pos head d_head"],
        seen: Float[Tensor, "batch pos head d_head"],
    ) -> tuple[Float64[Tensor, "batch pos weight"], Float64[Tensor, "batch pos weight"]]:
        """What a vector of the stream and what the bias are multiplied by: one weight, with a QK-norm one per head.

        Args:
            spec: the layer.
            x: the residual stream.
            plain: its queries or keys before any QK-norm.
            seen: the same after it, before rotation.

        Raises:
            ValueError: they are no such function of the stream.
        """
        scale = self.reading.scales(spec, x.double(), plain, self.needed)[..., 0]
        if self.qk_norm is None:
            return scale, torch.ones_like(scale)
        u, v = plain.double(), seen.double()
        if not self.qk_norm.error(u, v) <= score_tolerance(seen.dtype) * float(v.abs().amax()):
            raise _no_norm(spec, self.reading.side, self.needed)
        own = self.qk_norm.scales(u, v)
        return scale * own, own

    def of_heads(self, heads: list[int]) -> FrozenReadout:
        """The same of some heads, in this order."""
        index = torch.tensor(heads, device=self.reading.bias.device)
        reading = replace(self.reading, matrix=self.reading.matrix[index], bias=self.reading.bias[index])
        norm = self.qk_norm and replace(self.qk_norm, gain=self.qk_norm.gain[index])
        return replace(self, reading=reading, qk_norm=norm)

    def vectors(self, sums: Float64[Tensor, "source weight d_model"]) -> Float64[Tensor, "source head d_head"]:
        """Queries or keys of weighted means of the stream, without the bias."""
        by_head = sums.expand(-1, len(self.reading.matrix), -1)
        return self._normed(torch.einsum("shm,hdm->shd", by_head, self.reading.matrix))

    def bias(self, weight: Float64[Tensor, "weight"]) -> Float64[Tensor, "head d_head"]:
        """Queries or keys of the bias, at its mean weight."""
        return self._normed(weight[:, None] * self.reading.bias)

    def _normed(self, u: Tensor) -> Tensor:
        return u if self.qk_norm is None else self.qk_norm.linear(u)


def plain_taps(spec: AttentionSpec) -> dict[Side, Tap]:
    """Where queries and keys of a layer are read before any QK-norm."""
    return {"q": plain_tap(spec, "q"), "k": plain_tap(spec, "k")}


def measure_frozen(
    model: Any,
    spec: AttentionSpec,
    tokens: Int[Tensor, "batch pos"],
    plain: dict[Side, Tensor],
    seen: dict[Side, Tensor],
    needed: str,
) -> dict[Side, FrozenReadout]:
    """The read-out of queries and keys.

    Args:
        model, spec, tokens: what is run; of the tokens only the length matters.
        plain: queries and keys of a text before any QK-norm, ``[batch, pos, head, d_head]``.
        seen: the same after it, before rotation.
        needed: how messages begin.

    Raises:
        ValueError: queries or keys that do not read the residual stream; another norm than one with a gain and one
            scale for each vector.
    """
    found: dict[Side, FrozenReadout] = {}
    for reading in measure_readings(model, spec, tokens, plain_taps(spec), needed):
        side, norm = reading.side, None
        if not torch.equal(plain[side], seen[side]):
            u, v = (x.double().flatten(0, 1) for x in (plain[side], seen[side]))
            norm = fit_norm(u, v, seen[side].dtype) if u.shape == v.shape else None
            if norm is None:
                raise _no_norm(spec, side, needed)
        found[side] = FrozenReadout(reading, norm, needed)
    return found


def _no_norm(spec: AttentionSpec, side: Side, needed: str) -> ValueError:
    name = {"q": "queries", "k": "keys"}[side]
    return ValueError(
        f"{needed} {name} that are those before the QK-norm times a gain and one number for each token and head, but "
        f"in layer {spec.layer} of {spec.architecture} they are not"
    )
