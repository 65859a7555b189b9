"""Distance patterns: size, phase concentration and variance shares of queries and keys in each rotary subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.utils.pictures import HasTable, figure_function
from tl_posdisent.utils.precision import own_sums

from .covariance import Spread, chunks, spread_of, total
from .moments import Moments
from .rotary import Rotary, to_complex
from .subspace_interactions import interaction_bound, interaction_by_subspace, subspace_frame
from .variance_decomposition import COMPONENTS, Numbers, check_distances, share_of


@dataclass(frozen=True, eq=False, repr=False)
class SubspacePatterns(HasTable):
    """Size and phase of queries and keys in each rotary subspace of a layer, and the subspace's part in the scores.

    All tensors are float64, ``[head, subspace]`` unless said otherwise, per *query* head: with grouped queries a key's
    numbers stand once for each head that reads it. Subspaces are complex numbers ``q_c``, ``k_c``. Coordinates that
    RoPE leaves alone follow, two by two, at frequency 0; which two make a pair is arbitrary, so their phases and
    concentrations are NaN.

    Phases are weighted by magnitude: the phase is ``arg E[z]``, the concentration ``|E[z]| / E[|z|]``, which is 1 where
    all point the same way. The variance of the scores is made of these: ``E|z - E z|² = size² (1 + variation² -
    concentration²)``.

    Attributes:
        query_size, key_size: mean of ``|q_c|`` and of ``|k_c|``, in the units of the vectors.
        query_variation, key_variation: their coefficient of variation, standard deviation over mean.
        query_phase, key_phase: circular mean of their phases, radians, -π … π.
        query_concentration, key_concentration: resultant length of these phases, 0 … 1.
        distance, semantic, interaction: parts of the scores' variance at controlled distances. ``distance``; ``query``,
            ``key`` and ``query:key`` together; and ``distance:query``, ``distance:key``, ``distance:query:key``.
            Over subspaces and all three they add up to 1. A part is negative where the subspace undoes more of what
            others do than it does itself (see ``interaction_by_subspace``).
        spread: what the subspace can break of additivity, in standard deviations of the scores: size of the mean query
            × standard deviation of the key × ``turn``, with scale and attention factor. ``distance:key`` has at most
            the share ``spread.sum(-1) ** 2`` (see ``interaction_bound``).
        turn: ``[subspace]``, 0 … 1: the standard deviation of ``exp(i θ_c d)`` over the distances.
        frequencies: ``[subspace]``, θ in radians per position.
    """

    query_size: Float64[Tensor, "head subspace"]
    query_variation: Float64[Tensor, "head subspace"]
    query_phase: Float64[Tensor, "head subspace"]
    query_concentration: Float64[Tensor, "head subspace"]
    key_size: Float64[Tensor, "head subspace"]
    key_variation: Float64[Tensor, "head subspace"]
    key_phase: Float64[Tensor, "head subspace"]
    key_concentration: Float64[Tensor, "head subspace"]
    distance: Float64[Tensor, "head subspace"]
    semantic: Float64[Tensor, "head subspace"]
    interaction: Float64[Tensor, "head subspace"]
    spread: Float64[Tensor, "head subspace"]
    turn: Float64[Tensor, "subspace"]
    frequencies: Float64[Tensor, "subspace"]

    @property
    def relative_phase(self) -> Float64[Tensor, "head subspace"]:
        """Circular mean of ``arg q_c - arg k_c`` over all pairs, radians, -π … π; the mean score of the subspace is
        largest where ``relative_phase + θ_c d`` is a full turn."""
        return torch.remainder(self.query_phase - self.key_phase + torch.pi, 2 * torch.pi) - torch.pi

    @property
    def relative_concentration(self) -> Float64[Tensor, "head subspace"]:
        """Resultant length of the relative phases, the product of both concentrations: pairs combine freely."""
        return self.query_concentration * self.key_concentration

    def to_frame(self) -> pd.DataFrame:
        """One row per head and subspace: ``frequency``, ``wavelength``, ``turn``, and the attributes above."""
        heads = len(self.query_size)
        sides = [f"{side}_{x}" for side in ("query", "key") for x in ("size", "variation", "phase", "concentration")]
        names = (*sides, "relative_phase", "relative_concentration", "distance", "semantic", "interaction", "spread")
        columns = {"turn": self.turn.expand(heads, -1)} | {name: getattr(self, name) for name in names}
        return subspace_frame(self.frequencies, columns)

    def plot(self, value: str = "key_concentration", **options: Any) -> Any:
        """Plot a measure of each subspace of each head: ``plot_subspaces``, with its options."""
        return figure_function("plot_subspaces")(self.to_frame(), value, **options)

    def __repr__(self) -> str:
        heads, n = self.query_size.shape
        order = self.frequencies.abs().argsort(descending=True)
        lines = [f"SubspacePatterns of {heads} heads, {n} subspaces; on average over heads:"]
        for name, half in (("faster", order[: n // 2]), ("slower", order[n // 2 :])):
            parts = "   ".join(
                f"{x} {getattr(self, x)[:, half].sum(-1).nanmean().item():.3f}"
                for x in ("distance", "semantic", "interaction")
            )
            concentration = self.key_concentration[:, half].nanmean().item()
            lines.append(f"  {name} half: key concentration {concentration:.3f}   {parts}")
        return "\n".join(lines)


@own_sums()
def subspace_patterns_qk(
    q: Float[Tensor, "*n_q head d_head"],
    k: Float[Tensor, "*n_k kv_head d_head"],
    rotary: Rotary,
    distances: Numbers,
    *,
    scale: float,
    weights: Numbers | None = None,
) -> SubspacePatterns:
    """Measure the distance patterns of arXiv 2503.13305 (Observation 1, Theorem 2) in one layer's queries and keys.

    Scores are additive in position and content where every subspace either hardly turns over the distances (slow: it
    can carry content), or has keys that are nearly alike (concentrated: it can carry position).

    Args:
        q, k, rotary: as in ``Moments.from_qk``.
        distances, scale, weights: as in ``decompose``.

    Returns:
        ``SubspacePatterns``.

    Raises:
        ValueError: what ``Moments.from_qk`` and ``decompose`` refuse.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, subspace_patterns_qk
        >>> rotary = Rotary(torch.tensor([1.0], dtype=torch.float64))
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[:, None]  # two keys of length 1, a right angle apart
        >>> patterns = subspace_patterns_qk(torch.tensor([[[0.0, 2.0]]]), k, rotary, range(8), scale=1.0)
        >>> [round(float(x), 3) for x in (patterns.key_size, patterns.key_phase, patterns.key_concentration)]
        [1.0, 0.785, 0.707]
        >>> round(float(patterns.relative_phase), 3)  # the query is 1/8 of a turn ahead of the mean key
        0.785
    """
    moments = Moments.from_qk(q, k, rotary)
    parts = interaction_by_subspace(moments, distances, scale=scale, weights=weights, components=COMPONENTS)
    bound = interaction_bound(moments, distances, scale=scale, weights=weights)
    semantic = [i for i, component in enumerate(COMPONENTS) if "distance" not in component]
    mixed = [i for i, component in enumerate(COMPONENTS) if component.startswith("distance:")]
    group = q.shape[-2] // k.shape[-2]
    return SubspacePatterns(
        **{f"query_{name}": x for name, x in _side(q, moments.query, rotary).items()},
        **{f"key_{name}": x.repeat_interleave(group, 0) for name, x in _side(k, moments.key, rotary).items()},
        distance=parts.share("distance"),
        semantic=parts.shares[semantic].sum(0),
        interaction=parts.shares[mixed].sum(0),
        spread=share_of(bound.spreads, parts.total.sqrt()[:, None]),
        turn=_turn(moments, distances, weights, len(parts.frequencies)),
        frequencies=parts.frequencies,
    )


def _side(x: Tensor, vectors: Spread, rotary: Rotary) -> dict[str, Float64[Tensor, "head subspace"]]:
    """Size, variation, phase and concentration of queries or of keys."""
    pad, odd = torch.nn.functional.pad, x.shape[-1] % 2

    def magnitudes(part: Tensor) -> Float64[Tensor, "part head subspace"]:
        planes, rest = to_complex(part, rotary)
        pairs = pad(rest, (0, odd)).reshape(*rest.shape[:-1], (rest.shape[-1] + odd) // 2, 2)
        return torch.cat([planes.abs(), pairs.norm(dim=-1)], -1)

    spread = total(spread_of(magnitudes(part)) for part in chunks(x.detach()))
    size, deviation = spread.mean, spread.cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    mean = torch.view_as_complex(pad(vectors.mean, (0, odd)).unflatten(-1, (-1, 2)))
    phase, concentration = torch.where(size > 0, mean.angle(), torch.nan), share_of(mean.abs(), size).clamp(max=1)
    for values in (phase, concentration):
        values[:, len(rotary.frequencies) :] = torch.nan
    return {"size": size, "variation": share_of(deviation, size), "phase": phase, "concentration": concentration}


def _turn(moments: Moments, distances: Numbers, weights: Numbers | None, n: int) -> Float64[Tensor, "subspace"]:
    """Standard deviation of ``exp(i θ d)``; of what stands still, exactly 0."""
    d, w = check_distances(moments, distances, weights)
    angle = moments.rotary.angles(d)
    points = torch.stack([angle.cos(), angle.sin()], -1)
    points, w = points - points[0], (w / w.sum())[:, None, None]
    variance = (w * (points - (w * points).sum(0)) ** 2).sum((0, -1))
    return torch.nn.functional.pad(variance.sqrt(), (0, n - len(variance)))
