"""Which subspaces break additivity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.utils.tables import index_columns

from .moments import Moments
from .trilinear import Effect, all_frequencies, read_factors
from .variance_decomposition import Numbers, check_distances, check_effect, check_scale, decompose_factors, share_of

INTERACTIONS: tuple[Effect, ...] = ("distance:key", "distance:query:key")


@dataclass(frozen=True, eq=False, repr=False)
class SubspaceShares:
    """Effects on the scores' variance, spelled out by subspace.

    A variance of a sum over subspaces has a term for each pair of them; what a pair shares is given to both in equal
    halves. The parts of an effect therefore add up to it exactly, and a part is negative where a subspace undoes more
    of what others do than it does itself. All tensors are float64.

    Attributes:
        effects: names of the effects, ``("distance:key", "distance:query:key")`` unless others were asked for.
        variances: ``[effect, head, subspace]``, in units of the scores squared.
        total: ``[head]``, variance of the scores, all effects together.
        frequencies: ``[subspace]``, θ in radians per position. Coordinates that RoPE leaves alone follow its
            subspaces, two by two, at frequency 0.

    Example:
        >>> import torch
        >>> from tl_posdisent import Moments, Rotary, interaction_by_subspace
        >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
        >>> moments = Moments.from_qk(torch.randn(100, 8, 6), torch.randn(100, 8, 6), rotary)
        >>> table = interaction_by_subspace(moments, range(50), scale=0.5).to_frame()
        >>> table[table["head"] == 3].round(2)[["subspace", "frequency", "wavelength"]].values.tolist()
        [[0.0, 1.0, 6.28], [1.0, 0.1, 62.83], [2.0, 0.0, inf]]
    """

    effects: tuple[Effect, ...]
    variances: Float64[Tensor, "effect head subspace"]
    total: Float64[Tensor, "head"]
    frequencies: Float64[Tensor, "subspace"]

    @property
    def wavelengths(self) -> Float64[Tensor, "subspace"]:
        """Positions per full turn; infinite for frequency 0."""
        return 2 * torch.pi / self.frequencies

    @property
    def shares(self) -> Float64[Tensor, "effect head subspace"]:
        """Parts of the scores' variance; NaN where the scores do not vary."""
        return share_of(self.variances, self.total[:, None])

    def share(self, effect: Effect) -> Float64[Tensor, "head subspace"]:
        """Parts of one effect's share."""
        if effect not in self.effects:
            raise ValueError(f"effect must be one of {', '.join(self.effects)}, got {effect!r}")
        return self.shares[self.effects.index(effect)]

    def to_frame(self) -> pd.DataFrame:
        """One row per head and subspace: ``frequency``, ``wavelength``, and a column of shares for every effect."""
        return subspace_frame(self.frequencies, {effect: self.share(effect) for effect in self.effects})

    def __repr__(self) -> str:
        n_heads, n_subspaces = self.variances.shape[1:]
        lines = [f"SubspaceShares of {n_heads} heads, {n_subspaces} subspaces; on average over heads:"]
        for effect, x in zip(self.effects, self.shares.nanmean(1), strict=True):
            most = int(x.nan_to_num().abs().argmax())
            where = f"subspace {most} (wavelength {self.wavelengths[most].item():.3g})"
            lines.append(f"  {effect} {x.sum().item():.3f}, most of it in {where}: {x[most].item():.3f}")
        return "\n".join(lines)


def interaction_by_subspace(
    moments: Moments,
    distances: Numbers,
    *,
    scale: float,
    weights: Numbers | None = None,
    effects: Sequence[Effect] = INTERACTIONS,
) -> SubspaceShares:
    """The address of what is not additive: each subspace's part in ``distance:key`` and ``distance:query:key``.

    These two are what the two-axis model ``f(query, distance) + g(query, key)`` leaves unexplained. Arguments and
    errors are those of ``decompose``; ``effects`` may name any of its effects.

    Example:
        >>> import torch
        >>> from tl_posdisent import Moments, Rotary, interaction_by_subspace
        >>> rotary = Rotary(torch.tensor([1.0, 1e-6], dtype=torch.float64))  # a fast subspace and one that stands
        >>> moments = Moments.from_qk(*torch.randn(2, 300, 1, 4), rotary)
        >>> parts = interaction_by_subspace(moments, range(32), scale=0.5).share("distance:query:key")
        >>> bool(parts[0, 0] > 0.9 * parts.sum()), bool(parts[0, 1].abs() < 1e-6)  # all of it is in the fast one
        (True, True)
    """
    if isinstance(effects, str):
        raise ValueError(f"effects must be a sequence of effects, got the one word {effects!r}")
    effects = tuple(check_effect(effect, "effects") for effect in effects)
    if not effects:
        raise ValueError("effects must name at least one effect")
    factors = read_factors(moments, *check_distances(moments, distances, weights), check_scale(scale))
    # Pairs are symmetric, so a row holds each subspace's own term and half of what it shares with every other.
    pairs = [factors.pair(effect) for effect in effects]
    rows = torch.stack([(hermitian + plain).real.sum(-1) / 2 for hermitian, plain in pairs])
    return SubspaceShares(effects, rows, decompose_factors(factors).total, all_frequencies(moments))


def subspace_frame(frequencies: Float64[Tensor, "subspace"], columns: dict[str, Tensor]) -> pd.DataFrame:
    """One row per head and subspace of columns that are ``[head, subspace]``."""
    n_heads, n_subspaces = next(iter(columns.values())).shape
    index = {
        "subspace": torch.arange(n_subspaces).repeat(n_heads),
        "frequency": frequencies.repeat(n_heads),
        "wavelength": (2 * torch.pi / frequencies).repeat(n_heads),
    }
    table = {name: x.flatten().tolist() for name, x in (index | columns).items()}
    return pd.DataFrame({**index_columns((n_heads,), repeat=n_subspaces), **table})
