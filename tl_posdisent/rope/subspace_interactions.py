"""Interactions by rotary subspace: which subspaces break additivity, and a bound on how much they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.utils.pictures import HasTable
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_choice

from .moments import Moments
from .variance_decomposition import (
    Component,
    Numbers,
    all_frequencies,
    check_component,
    decompose_factors,
    read_factors,
    share_of,
)

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
