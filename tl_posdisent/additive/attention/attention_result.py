"""The result of a fit of additive attention."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells
from tl_posdisent.additive.result import mean_and_range
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_choice

AttentionPart = Literal["summary", "distance", "key", "query"]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionFit:
    """Additive attention ``softmax_j(distance[i - j] + key[band of i - j, j])`` nearest to a pattern.

    All tensors are float64; coefficients are in nats, the units of scores. ``*batch`` are the leading axes of the
    scores; ``*fit`` are the same, less the first (the texts) if the fit is pooled.

    **Gauge.** The pattern and ``kl`` are unique, the components are not: the softmax ignores constants, and a straight
    line (``+t·d`` in the distance, ``+t·j`` in the key) changes all logits of a query alike. The convention is that of
    ``AdditiveFit``: components have mean 0 over the cells (the key in each band) and ``key`` has no linear trend over
    positions. With features of the keys, ``key`` is ``direction · features`` as it is, and the distance has mean 0.

    Attributes:
        distance: ``[*fit, distance]``, entry ``n`` belongs to ``distances[n]``; 0 for a distance without cells.
        key: ``[*batch, band, key]``, importance of each key; one band unless there are ``edges``.
        distances: ``[distance]``, query position minus key position, ascending.
        edges: distances at which a new band begins.
        direction: ``[*fit, band, feature]`` of the importances, or None if these are free.
        sink: ``[*fit, band]``, the term of the first key, which is also in ``key``; None if there is none.
        kl: ``[*batch, query]``, divergence KL(pattern ‖ fit) in nats; 0 for a query without cells.
        explained: ``[*fit]``, 1 - KL(pattern ‖ fit) / KL(pattern ‖ uniform), both summed over queries: 0 for uniform
            attention, 1 for the pattern itself. NaN where the pattern is uniform.
        explained_distance, explained_key: ``[*fit]``, the same of the best fit by distances alone, or by keys alone.
        cells: those of the mask.
        pooled: whether all entries of the first axis share one distance component.
        pseudo_count: part of the pattern that was replaced by uniform attention for the fit.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_attention
        >>> distance = torch.arange(8.0)[:, None] - torch.arange(8.0)
        >>> fit = fit_attention(torch.stack([-distance, -(distance**2)]))  # two heads that read the distance alone
        >>> fit
        AttentionFit of 2 patterns, 8 queries × 8 keys
          explained 1.000   KL ... nats per query
          alone: distance 1.000   key ...
        >>> fit.to_frame().columns.tolist()
        ['head', 'explained', 'explained_distance', 'explained_key', 'kl']
    """

    distance: Float64[Tensor, "*fit distance"]
    key: Float64[Tensor, "*batch band key"]
    distances: Int64[Tensor, "distance"]
    edges: tuple[int, ...]
    direction: Float64[Tensor, "*fit band feature"] | None
    sink: Float64[Tensor, "*fit band"] | None
    kl: Float64[Tensor, "*batch query"]
    explained: Float64[Tensor, "*fit"]
    explained_distance: Float64[Tensor, "*fit"]
    explained_key: Float64[Tensor, "*fit"]
    cells: Cells
    pooled: bool
    pseudo_count: float

    @property
    def mask(self) -> Bool[Tensor, "*mask query key"]:
        """True where a cell took part in the fit."""
        return self.cells.to_mask()

    def logits(self) -> Float64[Tensor, "*batch query key"]:
        """The sum of the components at each cell; ``-inf`` outside the mask."""
        cells = self.cells
        d = torch.arange(cells.n_query, device=self.key.device)[:, None] + cells.offset
        d = d - torch.arange(cells.n_key, device=self.key.device)
        band = torch.bucketize(d, d.new_tensor(self.edges), right=True)
        by_key = self.key[..., band, torch.arange(cells.n_key, device=d.device).expand_as(d)]
        by_distance = self.distance[..., d.clamp(cells.low, cells.high) - cells.low]
        return torch.where(self.mask, by_distance + by_key, -torch.inf)

    def pattern(self) -> Float64[Tensor, "*batch query key"]:
        """The fitted attention; 0 outside the mask."""
        return self.logits().softmax(-1).nan_to_num(nan=0.0)  # queries without cells

    def to_frame(self, part: AttentionPart = "summary") -> pd.DataFrame:
        """The fit as a table.

        ``"summary"`` has one row per fit: its leading index, the shares explained, and the mean ``kl`` per query.
        ``"distance"``, ``"key"`` and ``"query"`` (the divergences) have one row per value.
        """
        check_choice("part", part, ("summary", "distance", "key", "query"))
        if part == "summary":
            names = ("explained", "explained_distance", "explained_key")
            columns: dict[str, Any] = {name: getattr(self, name).flatten().tolist() for name in names}
            columns["kl"] = self._mean_kl().flatten().tolist()
            return pd.DataFrame({**index_columns(self.explained.shape, pooled=self.pooled), **columns})
        values = self.kl if part == "query" else getattr(self, part)
        axis = (self.distances if part == "distance" else torch.arange(values.shape[-1])).tolist()
        leading = values.shape[: values.ndim - (2 if part == "key" else 1)]
        bands = {} if part != "key" or not self.edges else self._bands(len(axis))
        n_row = len(axis) * (values.shape[-2] if part == "key" else 1)
        index = index_columns(leading, pooled=self.pooled and part == "distance", repeat=n_row)
        n_leading = leading.numel()
        columns = {name: column * n_leading for name, column in bands.items()}
        columns |= {part: axis * (values.numel() // len(axis)), "value": values.flatten().tolist()}
        return pd.DataFrame({**index, **columns})

    def _bands(self, repeat: int) -> dict[str, list[int]]:
        """First distance of the band of each key's coefficient."""
        starts = [min(self.cells.low, *self.edges), *self.edges]
        return {"band": [start for start in starts for _ in range(repeat)]}

    def _mean_kl(self) -> Float64[Tensor, "*fit"]:
        used = (self.cells.split(self.cells.counts).query > 0).expand(self.kl.shape)
        sums, n = self.kl.sum(-1), used.sum(-1)
        return sums.sum(0) / n.sum(0) if self.pooled else sums / n

    def _repr_html_(self) -> str:
        title = html.escape(repr(self).splitlines()[0])
        return f"<p>{title}</p>{self.to_frame().round(3).to_html(index=False)}"

    def __repr__(self) -> str:
        batch = "×".join(map(str, self.kl.shape[:-1])) or "one"
        kind = ", pooled over the first axis" if self.pooled else ""
        kind += f", {len(self.edges) + 1} bands" if self.edges else ""
        if self.direction is not None:
            kind += f", static: {self.direction.shape[-1]} features" + (" and a sink" if self.sink is not None else "")
        kl, alone = self._mean_kl(), (self.explained_distance, self.explained_key)
        return "\n".join(
            [
                f"AttentionFit of {batch} patterns, {self.cells.n_query} queries × {self.cells.n_key} keys{kind}",
                f"  explained {mean_and_range(self.explained)}   KL {mean_and_range(kl)} nats per query",
                f"  alone: distance {mean_and_range(alone[0])}   key {mean_and_range(alone[1])}",
            ]
        )
