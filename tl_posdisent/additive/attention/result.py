"""The result of a fit of additive attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.attention.features import first_keys
from tl_posdisent.additive.cells import Cells, MaskKind, cell_distances, make_cells
from tl_posdisent.additive.result import CellsFit, mean_and_range, range_note
from tl_posdisent.additive.score_checks import check_finite_tensor
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_choice, check_indices

AttentionComponent = Literal["summary", "distance", "key", "query"]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionFit(CellsFit):
    """Additive attention ``softmax_j(distance[i - j] + key[j])`` closest to a pattern.

    All tensors are float64; coefficients are in nats, the units of scores. ``*batch`` are the leading axes of the
    scores; ``*fit`` are the same axes without the first (the texts) if the fit is pooled.

    **Gauge.** The pattern and ``kl`` are unique. The components are not: the softmax ignores constants and a straight
    line (``+t·d`` in the distance, ``+t·j`` in the key). The convention is that of ``AdditiveFit``: mean 0 over the
    cells, no linear trend in ``key``. With features, only the distance is centred.

    Attributes:
        distance: ``[*fit, distance]``, entry ``n`` belongs to ``distances[n]``; 0 for a distance without cells.
        key: ``[*batch, key]``, importance of each key.
        distances: ``[distance]``, query position minus key position, ascending.
        direction: ``[*fit, feature]``, direction of the importances in the features, or None if these are free.
        sinks: ``[*fit, sink]``, terms of the first keys, which ``key`` includes; None without such terms.
        kl: ``[*batch, query]``, divergence KL(pattern ‖ fit) in nats; 0 for a query without cells.
        explained: ``[*fit]``, 1 - KL(pattern ‖ fit) / KL(pattern ‖ uniform), both summed over queries: 0 for uniform
            attention, 1 for the pattern itself. NaN where the pattern is uniform. For the share of the distances
            alone, fit them alone: ``fit_attention(scores, keys=keys[..., :0], sinks=0)``.
        converged: ``[*fit]``, whether the fit has reached its optimum.
        gap: ``[*fit]``, estimate of how far the divergence is above its minimum, in nats per query.
        cells: the cells of the mask.
        pooled: whether all entries of the first axis share one distance component.
        pseudo_count: part of the pattern that was replaced by uniform attention for the fit.
        layers: the layer numbers of the axis before the heads, if several layers were fitted; else None.
    """

    distance: Float64[Tensor, "*fit distance"]
    key: Float64[Tensor, "*batch key"]
    distances: Int64[Tensor, " distance"]
    direction: Float64[Tensor, "*fit feature"] | None
    sinks: Float64[Tensor, "*fit sink"] | None
    kl: Float64[Tensor, "*batch query"]
    explained: Float64[Tensor, "*fit"]
    converged: Bool[Tensor, "*fit"]
    gap: Float64[Tensor, "*fit"]
    cells: Cells
    pooled: bool
    pseudo_count: float
    layers: tuple[int, ...] | None = None

    def logits(self) -> Float64[Tensor, "*batch query key"]:
        """Return the sum of the components at each cell; ``-inf`` outside the mask."""
        cells = self.cells
        d = cell_distances(cells.n_query, cells.n_key, self.key.device)
        by_distance = self.distance[..., d.clamp(cells.low, cells.high) - cells.low]
        return torch.where(self.mask, by_distance + self.key[..., None, :], -torch.inf)

    def pattern(self) -> Float64[Tensor, "*batch query key"]:
        """Return the fitted attention; 0 outside the mask."""
        return self.logits().softmax(-1).nan_to_num(nan=0.0)  # NaN: queries without cells

    def static_scores(
        self,
        keys: Float[Tensor, "*texts key kv feature"],
        *,
        mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
        window: int | None = None,
        heads: int | Iterable[int] | None = None,
    ) -> Float64[Tensor, "*texts head query key"]:
        """Apply static heads to keys of other texts: ``distance[i - j] + direction · keys[j] + sinks``.

        Args:
            keys: features of the keys ``[*texts, key, kv_head, feature]``, as in ``fit_attention``. Any texts if the
                fit is pooled (or its scores had no axis of texts), else those of the fit.
            mask, window: mask and window of these texts, as in ``fit_attention``; the first key is the first that some
                query sees.
            heads: which of the fit's heads to apply, default all; ``keys`` must have their key heads.

        Returns:
            Scores, ``-inf`` outside the mask; ``.softmax(-1)`` is the attention pattern.

        Raises:
            ValueError: a fit with free importances, which apply only to the keys of its own texts; keys of another
                shape or not finite; heads out of range; a distance that was not fitted.

        Example:
            >>> import torch
            >>> from tl_posdisent import fit_attention
            >>> keys = torch.randn(4, 16, 2, 3)  # four texts, 16 tokens, two key heads, three features
            >>> fit = fit_attention(torch.randn(4, 6, 16, 16), keys=keys)  # six heads
            >>> fit.static_scores(torch.randn(10, 2, 3)).shape  # a text that was not fitted
            torch.Size([6, 10, 10])
            >>> own = fit.static_scores(keys).softmax(-1)
            >>> bool(torch.allclose(own, fit.pattern()))
            True
        """
        if self.direction is None:
            raise ValueError(
                "static_scores needs a fit whose importances are linear in features of the keys (fit_attention with "
                "keys=), got one with free importances, which apply only to the keys of its own texts"
            )
        chosen = check_indices("heads", heads, self.direction.shape[-2])
        features = self._features_per_head(keys, len(chosen))
        n_key = features.shape[-2]
        shape = (*features.shape[:-2], mask.shape[-2] if isinstance(mask, Tensor) and mask.ndim > 1 else n_key, n_key)
        cells = make_cells(shape, mask, window, device=features.device)
        d = cell_distances(cells.n_query, n_key, features.device)
        inside = cells.to_mask()
        self._check_distances(d[inside.reshape(-1, *d.shape).any(0)])
        cell = d.clamp(self.cells.low, self.cells.high) - self.cells.low
        key = torch.einsum("...hkf,...hf->...hk", features, self.direction[..., chosen, :])
        if self.sinks is not None:
            marks = first_keys(cells.split(cells.counts).key > 0, self.sinks.shape[-1])
            marks = marks if marks.ndim > 2 else marks[None]  # an axis that broadcasts to the heads
            key = key + torch.einsum("...hkn,...hn->...hk", marks, self.sinks[..., chosen, :])
        return torch.where(inside, self.distance[..., chosen, :][..., cell] + key[..., None, :], -torch.inf)

    def _features_per_head(self, keys: Any, n_heads: int) -> Float64[Tensor, "*texts head key feature"]:
        assert self.direction is not None
        n_feature, texts = self.direction.shape[-1], tuple(self.direction.shape[:-2])
        check_finite_tensor("keys", keys)
        bad = keys.ndim < 3 or keys.shape[-1] != n_feature or keys.shape[-2] == 0 or n_heads % keys.shape[-2]
        if bad or 0 in keys.shape[:-1] or (texts and tuple(keys.shape[:-3]) != texts):
            leading = "".join(f"{n}, " for n in texts) if texts else "*texts, "
            raise ArgumentError(
                "keys",
                f"must have shape ({leading}key, kv_head, {n_feature}) with key heads for {n_heads} heads, got "
                f"{tuple(keys.shape)}",
            )
        per_head: Tensor = keys.detach().double().transpose(-3, -2).repeat_interleave(n_heads // keys.shape[-2], -3)
        return per_head

    def _check_distances(self, needed: Int64[Tensor, " cell"]) -> None:
        counts = self.cells.split(self.cells.counts).distance
        fitted = self.distances[counts.reshape(-1, counts.shape[-1]).amax(0) > 0]
        missing = needed[~torch.isin(needed, fitted)]
        if len(missing):
            raise ArgumentError(
                "keys",
                f"must come from texts whose distances were fitted, {int(fitted[0])} to {int(fitted[-1])}, got a text "
                f"with distance {int(missing.abs().max())}: fit longer texts, or pass shorter ones",
            )

    def to_frame(self, component: AttentionComponent = "summary") -> pd.DataFrame:
        """Return the fit as a table.

        ``"summary"`` has one row per fit: its leading index, the explained share, and the mean ``kl`` per query.
        ``"distance"``, ``"key"`` and ``"query"`` (the divergences) have one row per value.
        """
        check_choice("component", component, get_args(AttentionComponent))
        if component == "summary":
            columns = {"explained": self.explained.flatten().tolist(), "kl": self._mean_kl().flatten().tolist()}
            index = index_columns(self.explained.shape, pooled=self.pooled, layers=self.layers)
            return pd.DataFrame({**index, **columns})
        values = self.kl if component == "query" else getattr(self, component)
        axis = (self.distances if component == "distance" else torch.arange(values.shape[-1])).tolist()
        pooled = self.pooled and component == "distance"
        index = index_columns(values.shape[:-1], pooled=pooled, repeat=len(axis), layers=self.layers)
        columns = {component: axis * (values.numel() // len(axis)), "value": values.flatten().tolist()}
        return pd.DataFrame({**index, **columns})

    def _mean_kl(self) -> Float64[Tensor, "*fit"]:
        used = (self.cells.split(self.cells.counts).query > 0).expand(self.kl.shape)
        sums, n = self.kl.sum(-1), used.sum(-1)
        return sums.sum(0) / n.sum(0) if self.pooled else sums / n

    def __repr__(self) -> str:
        batch = "×".join(map(str, self.kl.shape[:-1])) or "1"
        patterns = "pattern" if batch == "1" else "patterns"
        kind = ", pooled over the first axis" if self.pooled else ""
        if self.direction is not None:
            n = 0 if self.sinks is None else self.sinks.shape[-1]
            kind += f", static: {self.direction.shape[-1]} features"
            kind += "" if n == 0 else " and a sink" if n == 1 else f" and {n} sinks"
        if not bool(self.converged.all()):
            kind += f", {int((~self.converged).sum())} not converged"
        return "\n".join(
            [
                f"AttentionFit of {batch} {patterns}, {self.cells.n_query} queries × {self.cells.n_key} keys{kind}",
                f"  explained {mean_and_range(self.explained)}   KL {mean_and_range(self._mean_kl())} nats per query",
                *range_note(self.explained, "patterns"),
            ]
        )
