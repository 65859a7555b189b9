"""Distance patterns in each rotary subspace: sizes, phases and variance shares; which subspaces break additivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.rope.moments import Moments, Spread, chunks, spread_of, total
from tl_posdisent.rope.rotary import Rotary, to_complex
from tl_posdisent.rope.variance_decomposition import (
    COMPONENTS,
    Component,
    Numbers,
    all_frequencies,
    check_component,
    check_distances,
    decompose_factors,
    read_factors,
    share_of,
)
from tl_posdisent.utils.pictures import HasTable, figure_function
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_choice

INTERACTIONS: tuple[Component, ...] = ("distance:key", "distance:query:key")


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceShares(HasTable):
    """Components of the variance decomposition, split by subspace.

    A variance of a sum over subspaces has a term for each pair of them; what a pair shares is given to both in equal
    halves. The parts of a component add up to it, and a part is negative where a subspace undoes more of what others do
    than it does itself. All tensors are float64.

    Attributes:
        components: names of the components.
        variances: ``[component, head, subspace]``, in units of the scores squared.
        total: ``[head]``, variance of the scores, all components together.
        frequencies: ``[subspace]``, θ in radians per position. Coordinates that RoPE leaves alone follow its
            subspaces, two by two, at frequency 0.
    """

    components: tuple[Component, ...]
    variances: Float64[Tensor, "component head subspace"]
    total: Float64[Tensor, "head"]
    frequencies: Float64[Tensor, "subspace"]

    @property
    def shares(self) -> Float64[Tensor, "component head subspace"]:
        """Parts of the scores' variance; NaN where the scores do not vary."""
        return share_of(self.variances, self.total[:, None])

    def share(self, component: Component) -> Float64[Tensor, "head subspace"]:
        """Parts of one component's share."""
        check_choice("component", component, self.components)
        return self.shares[self.components.index(component)]

    def to_frame(self) -> pd.DataFrame:
        """One row per head and subspace: ``frequency``, ``wavelength``, and a column of shares for every component."""
        return subspace_frame(self.frequencies, {component: self.share(component) for component in self.components})

    def __repr__(self) -> str:
        n_heads, n_subspaces = self.variances.shape[1:]
        lines = [f"SubspaceShares of {n_heads} heads, {n_subspaces} subspaces; on average over heads:"]
        for component, x in zip(self.components, self.shares.nanmean(1), strict=True):
            most = int(x.nan_to_num().abs().argmax())
            where = f"subspace {most} (wavelength {(2 * torch.pi / self.frequencies[most]).item():.3g})"
            lines.append(f"  {component} {x.sum().item():.3f}, most of it in {where}: {x[most].item():.3f}")
        return "\n".join(lines)


def interaction_by_subspace(
    moments: Moments,
    distances: Numbers,
    *,
    scale: float,
    weights: Numbers | None = None,
    components: Sequence[Component] = INTERACTIONS,
) -> SubspaceShares:
    """Split interactions of the variance decomposition by subspace: ``distance:key`` and ``distance:query:key``.

    These two are what the two-axis model ``f(query, distance) + g(query, key)`` leaves unexplained. Arguments and
    errors are those of ``decompose``; ``components`` may name any of its components. Returns ``SubspaceShares``.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Moments, Rotary, interaction_by_subspace
        >>> rotary = Rotary(torch.tensor([1.0, 1e-6], dtype=torch.float64))  # a fast subspace and one that stands
        >>> moments = Moments.from_qk(*torch.randn(2, 300, 1, 4), rotary)
        >>> parts = interaction_by_subspace(moments, range(32), scale=0.5).share("distance:query:key")
        >>> bool(parts[0, 0] > 0.9 * parts.sum()), bool(parts[0, 1].abs() < 1e-6)  # all of it is in the fast one
        (True, True)
    """
    if isinstance(components, str):
        raise ValueError(f"components must be a sequence of components, got the one word {components!r}")
    components = tuple(check_component(component, "components") for component in components)
    if not components:
        raise ValueError("components must name at least one component")
    factors = read_factors(moments, distances, weights, scale)
    # Pairs are symmetric, so a row holds each subspace's own term and half of what it shares with every other.
    pairs = [factors.pair(component) for component in components]
    rows = torch.stack([(hermitian + plain).real.sum(-1) / 2 for hermitian, plain in pairs])
    return SubspaceShares(components, rows, decompose_factors(factors).total, all_frequencies(moments))


def subspace_frame(frequencies: Float64[Tensor, "subspace"], columns: dict[str, Tensor]) -> pd.DataFrame:
    """Make a table with one row per head and subspace of columns that are ``[head, subspace]``."""
    n_heads, n_subspaces = next(iter(columns.values())).shape
    index = {
        "subspace": torch.arange(n_subspaces, device="cpu").repeat(n_heads),
        "frequency": frequencies.repeat(n_heads),
        "wavelength": (2 * torch.pi / frequencies).repeat(n_heads),
    }
    table = {name: x.flatten().tolist() for name, x in (index | columns).items()}
    return pd.DataFrame({**index_columns((n_heads,), repeat=n_subspaces), **table})


@dataclass(frozen=True, eq=False, repr=False)
class InteractionBound(HasTable):
    """Upper bounds of an interaction's variance, and each subspace's part in them.

    All tensors are float64, variances in units of the scores squared: ``variance ≤ pairwise ≤ separate``.

    Attributes:
        component: the interaction.
        variance: ``[head]``, its exact variance.
        pairwise: ``[head]``, the bound from the size of all covariances between subspaces.
        separate: ``[head]``, the bound from each subspace alone, ``spreads.sum(-1) ** 2``.
        spreads: ``[head, subspace]``, in units of the scores: size of the mean query (for ``distance:query:key``,
            standard deviation of the query) × standard deviation of the key × standard deviation of the rotation.
        total: ``[head]``, variance of the scores, all components together.
        frequencies: ``[subspace]``, θ in radians per position, 0 for coordinates that RoPE leaves alone.
    """

    component: Component
    variance: Float64[Tensor, "head"]
    pairwise: Float64[Tensor, "head"]
    separate: Float64[Tensor, "head"]
    spreads: Float64[Tensor, "head subspace"]
    total: Float64[Tensor, "head"]
    frequencies: Float64[Tensor, "subspace"]

    def to_frame(self) -> pd.DataFrame:
        """One row per head: shares of the scores' variance, ``share`` itself and its bounds; and ``total``."""
        columns = {"share": self.variance, "pairwise": self.pairwise, "separate": self.separate}
        columns = {name: share_of(x, self.total) for name, x in columns.items()} | {"total": self.total}
        return pd.DataFrame({**index_columns(self.total.shape), **{name: x.tolist() for name, x in columns.items()}})

    def __repr__(self) -> str:
        share, pairwise, separate = self.to_frame()[["share", "pairwise", "separate"]].mean()
        return (
            f"InteractionBound of {self.component} in {len(self.total)} heads; shares on average:\n"
            f"  {share:.3g} ≤ {pairwise:.3g} (pairwise) ≤ {separate:.3g} (separate)"
        )


def interaction_bound(
    moments: Moments,
    distances: Numbers,
    *,
    scale: float,
    weights: Numbers | None = None,
    component: Component = "distance:key",
) -> InteractionBound:
    """Bound the variance of an interaction; it is 0 if no subspace both rotates and has varying keys.

    In the notation of ``decompose``, with complex subspaces, mean query q̄, key covariances ``K = E[k_c conj(k_c')]``,
    ``K̃ = E[k_c k_c']`` of the centred keys, and U, Ũ likewise of the rotation ``u_c = scale · factor² · exp(i θ_c d)``,

        var(distance:key) = ½ Re Σ_cc' ( U q̄_c conj(q̄_c') conj(K) + Ũ q̄_c q̄_c' conj(K̃) )
                          ≤ ½ Σ_cc' |q̄_c| |q̄_c'| ( |K| |U| + |K̃| |Ũ| )                      (pairwise)
                          ≤ ( Σ_c |q̄_c| · sd(k_c) · sd(u_c) )²                               (separate)

    by the triangle inequality and Cauchy–Schwarz, with ``sd(k_c)² = E|k_c − k̄_c|²`` and
    ``sd(u_c)² = scale² factor⁴ (1 − |mean of exp(i θ_c d)|²)``, which is 0 for a subspace that does not turn over these
    distances. For ``distance:query:key`` the query's covariances stand where q̄ does.

    Arguments and errors are those of ``decompose``; ``component`` may be any of its components. Returns
    ``InteractionBound``.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Moments, Rotary, interaction_bound
        >>> rotary = Rotary(torch.tensor([torch.pi], dtype=torch.float64))  # turns over at every step
        >>> q, k = torch.ones(5, 1, 2), torch.arange(5.0)[:, None, None] * torch.ones(2)
        >>> bound = interaction_bound(Moments.from_qk(q, k, rotary), [0, 1], scale=1.0)
        >>> [round(float(x), 6) for x in (bound.variance, bound.pairwise, bound.separate)]  # as tight as can be
        [8.0, 8.0, 8.0]
    """
    component = check_component(component)
    factors = read_factors(moments, distances, weights, scale)
    hermitian, plain = factors.pair(component)
    spreads = hermitian.diagonal(dim1=-2, dim2=-1).real.clamp(min=0).sqrt()
    whole = decompose_factors(factors)
    return InteractionBound(
        component=component,
        variance=whole.variance(component),
        pairwise=(hermitian.abs() + plain.abs()).sum((-2, -1)) / 2,
        separate=spreads.sum(-1) ** 2,
        spreads=spreads,
        total=whole.total,
        frequencies=all_frequencies(moments),
    )


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
