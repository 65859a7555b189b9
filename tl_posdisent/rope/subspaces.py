"""Distance patterns: size, phase concentration and variance shares of queries and keys in each rotary subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.utils.pictures import HasTable, figure_function

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
    all point the same way and near 0 where they point anywhere. Without weights, a vector next to zero, whose direction
    is noise and which no score feels, would count like any other; and only the weighted concentration is what the
    variance of the scores is made of, ``E|z - E z|² = size² (1 + variation² - concentration²)``.

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
        turn: ``[subspace]``, 0 … 1, how much the subspace turns over the distances: the standard deviation of
            ``exp(i θ_c d)``. Near 0 it stands still.
        frequencies: ``[subspace]``, θ in radians per position.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, subspace_patterns_qk
        >>> rotary = Rotary(torch.tensor([1.0, 0.001], dtype=torch.float64))
        >>> q, k = torch.ones(500, 2, 4), torch.ones(500, 1, 4) + 0.1 * torch.randn(500, 1, 4)
        >>> patterns = subspace_patterns_qk(q, k, rotary, range(100), scale=0.5)
        >>> patterns.key_concentration.round(decimals=1).tolist(), patterns.turn.round(decimals=1).tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [1.0, 0.0])
        >>> bool((patterns.distance[:, 0] > 0.9).all())  # keys are nearly alike, and the first subspace turns
        True
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
    def wavelengths(self) -> Float64[Tensor, "subspace"]:
        """Positions per full turn; infinite for frequency 0."""
        return 2 * torch.pi / self.frequencies

    @property
    def relative_phase(self) -> Float64[Tensor, "head subspace"]:
        """Circular mean of ``arg q_c - arg k_c`` over all pairs, radians, -π … π.

        The mean score of the subspace is largest at the distances where ``relative_phase + θ_c d`` is a full turn.
        """
        return torch.remainder(self.query_phase - self.key_phase + torch.pi, 2 * torch.pi) - torch.pi

    @property
    def relative_concentration(self) -> Float64[Tensor, "head subspace"]:
        """Resultant length of the relative phases, the product of both concentrations: pairs combine freely."""
        return self.query_concentration * self.key_concentration

    def to_frame(self) -> pd.DataFrame:
        """One row per head and subspace: ``frequency``, ``wavelength``, ``turn``, and the attributes above."""
        heads = len(self.query_size)
        columns = {"turn": self.turn.expand(heads, -1)}
        for side in ("query", "key"):
            columns |= {
                f"{side}_{x}": getattr(self, f"{side}_{x}") for x in ("size", "variation", "phase", "concentration")
            }
        names = ("relative_phase", "relative_concentration", "distance", "semantic", "interaction", "spread")
        return subspace_frame(self.frequencies, columns | {name: getattr(self, name) for name in names})

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


@torch.no_grad()
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

    Scores are additive in position and content where every subspace either hardly turns over the distances that matter
    (slow: it can carry content), or has keys that are hardly different from each other (concentrated: it can carry
    position). Size, variation and concentration say which; the shares say what each subspace is used for.

    Args:
        q: queries before rotation and after any QK-norm, ``[*n_q, head, d_head]``, all leading axes pooled.
        k: keys likewise, ``[*n_k, kv_head, d_head]``; ``kv_head`` divides ``head``.
        rotary: the layer's rotation.
        distances: query position minus key position in tokens, 1-D: at which scores are taken, each by all pairs.
        scale: what the model multiplies ``⟨q, k⟩`` by, usually ``d_head ** -0.5``.
        weights: one non-negative number per distance; all the same if None.

    Returns:
        ``SubspacePatterns``, float64.

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
    sides = {f"query_{name}": x for name, x in _side(q, moments.query, rotary).items()}
    for name, x in _side(k, moments.key, rotary).items():
        sides[f"key_{name}"] = x.repeat_interleave(q.shape[-2] // k.shape[-2], 0)
    return SubspacePatterns(
        **sides,
        distance=parts.share("distance"),
        semantic=parts.shares[semantic].sum(0),
        interaction=parts.shares[mixed].sum(0),
        spread=share_of(bound.spreads, parts.total.sqrt()[:, None]),
        turn=_turn(moments, distances, weights, len(parts.frequencies)),
        frequencies=parts.frequencies,
    )


def _side(x: Tensor, vectors: Spread, rotary: Rotary) -> dict[str, Float64[Tensor, "head subspace"]]:
    """Size, variation, phase and concentration of queries or of keys."""
    magnitudes = total(spread_of(_magnitudes(part, rotary)) for part in chunks(x.detach()))
    size, deviation = magnitudes.mean, magnitudes.cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    odd = vectors.mean.shape[-1] % 2
    mean = torch.view_as_complex(torch.nn.functional.pad(vectors.mean, (0, odd)).unflatten(-1, (-1, 2)))
    phase, concentration = mean.angle(), share_of(mean.abs(), size).clamp(max=1)
    for values in (phase, concentration):
        values[:, len(rotary.frequencies) :] = torch.nan
    phase = torch.where(size > 0, phase, torch.nan)
    variation = share_of(deviation, size)
    return {"size": size, "variation": variation, "phase": phase, "concentration": concentration}


def _magnitudes(x: Float64[Tensor, "part head d_head"], rotary: Rotary) -> Float64[Tensor, "part head subspace"]:
    planes, rest = to_complex(x, rotary)
    odd = rest.shape[-1] % 2
    pairs = torch.nn.functional.pad(rest, (0, odd)).reshape(*rest.shape[:-1], (rest.shape[-1] + odd) // 2, 2)
    return torch.cat([planes.abs(), pairs.norm(dim=-1)], -1)


def _turn(moments: Moments, distances: Numbers, weights: Numbers | None, n: int) -> Float64[Tensor, "subspace"]:
    """Standard deviation of ``exp(i θ d)``; of what stands still, exactly 0."""
    d, w = check_distances(moments, distances, weights)
    angle = moments.rotary.angles(d)
    points = torch.stack([angle.cos(), angle.sin()], -1)
    points, w = points - points[0], (w / w.sum())[:, None, None]
    variance = (w * (points - (w * points).sum(0)) ** 2).sum((0, -1))
    return torch.nn.functional.pad(variance.sqrt(), (0, n - len(variance)))
