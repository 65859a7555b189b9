"""Fits of attention by distances alone and by keys alone, solved when one of their shares is first read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.attention.features import KeyFeatures
from tl_posdisent.additive.attention.newton import Problem, solve_attention, solve_keys_alone
from tl_posdisent.additive.attention.sums import Layout, Stacked
from tl_posdisent.additive.cells import Cells, on_device
from tl_posdisent.utils.precision import own_sums

_AIM = 1e-5  # precision of these fits, of which only the explained share is reported, see ``Problem.aim``


@dataclass(frozen=True, eq=False, repr=False)
class PartialFits:
    """Marginals of a pattern, from which the fits by distances alone and by keys alone are computed when asked for.

    These are O(length) numbers for each head and text, and a copy of the keys' features. ``system`` and ``text`` are
    those of ``Layout``.

    Attributes:
        cells: the cells of the mask.
        batch: leading axes of the scores.
        pooled: whether all entries of the first axis share one distance component.
        is_band: whether the cells are all those between two distances.
        own, marginals: total attention of each distance and key, without and with the pseudo-count.
        entropy: sum of the entropies of the pattern's queries.
        from_uniform: divergence of the pattern from uniform attention.
        keys: features ``[*texts, key, kv_head, feature]`` as given to ``fit_attention``, or None.
        sinks: number of first keys that have a separate term each.
    """

    cells: Cells
    batch: tuple[int, ...]
    pooled: bool
    is_band: bool
    own: Stacked
    marginals: Stacked
    entropy: Float64[Tensor, " system"]
    from_uniform: Float64[Tensor, " system"]
    keys: Float[Tensor, "*texts key kv feature"] | None
    sinks: int

    @own_sums()
    def explained(self, *, distance: bool) -> Float64[Tensor, "*fit"]:
        """Compute the share that the distances (or the keys) explain alone; NaN where that fit has not converged."""
        layout = Layout.of(self.cells, (), self.batch, pool=self.pooled, named=self.is_band)
        if not distance and self.keys is None and layout.is_causal:
            stacked, log_z = solve_keys_alone(layout, self.marginals)
            converged = torch.ones(len(log_z), dtype=torch.bool, device=log_z.device)
        else:
            features = self._no_features(layout) if distance else self._features(layout)
            found = solve_attention(Problem(layout, self.marginals, distance, features, _AIM))
            stacked, log_z, converged = found.stacked, found.log_z, found.converged
        divergence = log_z.sum((-2, -1)) - self.entropy - (stacked * self.own).sum((-2, -1))
        fit = self.batch[1:] if self.pooled else self.batch
        kind = "attention by distances alone" if distance else "attention by keys alone"
        warn_of_unconverged(kind, converged.reshape(fit), "their share is NaN", stacklevel=6)
        share = explained_share(divergence, self.from_uniform, layout.n_query)
        return torch.where(converged, share, torch.nan).reshape(fit)

    def _no_features(self, layout: Layout) -> Float64[Tensor, "system text key none"]:
        return self.own.new_zeros(*self.own.shape[:2], layout.n_key, 0)

    def _features(self, layout: Layout) -> Float64[Tensor, "system text key combination"] | None:
        if self.keys is None:
            return None
        shape = (*self.batch, layout.n_query, layout.n_key)
        return KeyFeatures.of(self.keys, shape, layout, pool=self.pooled, sinks=self.sinks).values

    def to(self, device: torch.device | str) -> PartialFits:
        """Return the same on another device."""
        return on_device(self, device)


def explained_share(
    divergence: Float64[Tensor, " system"], from_uniform: Float64[Tensor, " system"], n_query: int
) -> Float64[Tensor, " system"]:
    """Compute the share of the divergence from uniform attention that a fit removes; NaN if the pattern is uniform."""
    return torch.where(from_uniform > 1e-12 * n_query, 1 - divergence / from_uniform, torch.nan)


def warn_of_unconverged(kind: str, converged: Bool[Tensor, "*fit"], consequence: str, *, stacklevel: int) -> None:
    """Warn once, naming all fits that have not converged."""
    missing = (~converged).nonzero().tolist()
    if missing:
        shown = ", ".join(str(tuple(index)) for index in missing[:10]) + (", …" if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {converged.numel()} fits of {kind} have not converged, at index {shown}: "
            f"{consequence}; a larger pseudo_count makes the problem better posed",
            UserWarning,
            stacklevel=stacklevel,
        )
