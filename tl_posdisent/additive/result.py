"""The result of an additive fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, cell_distances, on_device
from tl_posdisent.additive.score_checks import check_scores, stack_layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.tables import HasTable, index_columns
from tl_posdisent.utils.validation import check_choice

Component = Literal["distance", "query", "key"]
TableComponent = Literal["summary", "distance", "query", "key"]
_Fit = TypeVar("_Fit", bound="CellsFit")  # not Self, which beartype refuses in methods that are checked one by one
SUMMARY = ("r", "r2", "r2_adjusted", "share_distance", "share_query", "share_key")  # columns of the table of fits


class CellsFit(HasTable):
    """Base class of fits to the cells of score matrices that a mask selects."""

    cells: Cells

    @property
    def mask(self) -> Bool[Tensor, "*mask query key"]:
        """True where a cell took part in the fit."""
        return self.cells.to_mask()

    def to(self: _Fit, device: torch.device | str) -> _Fit:
        """Return the same fit on another device."""
        return on_device(self, device)

    def plot(self, **options: Any) -> Any:
        """Plot the distance component of each head: ``plot_distance`` of this fit, with its options."""
        return public_name("viz", "plot_distance")(self, **options)


@dataclass(frozen=True, eq=False, repr=False)
class AdditiveFit(CellsFit):
    """Least-squares fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]``.

    All tensors are float64 and in the units of the scores. ``*batch`` are the leading axes of the scores; ``*fit``
    are the same axes without the first (the texts) if the fit is pooled.

    **Gauge.** Fitted values and ``r`` are unique, but constants can move between the components, and so can a straight
    line (``+t·d`` in the distance, ``-t·i`` in the query, ``+t·j`` in the key). By convention, every component has
    mean 0 over the cells, and ``key`` has no linear trend in the key's position, each key weighted by its number of
    cells (in all texts together, if pooled). If a mask falls into separate pieces (packed documents), compare
    components within a piece only.

    Attributes:
        intercept: ``[*batch]``, the mean of the scores; one per text if texts with equal masks are pooled.
        distance: ``[*fit, distance]``, entry ``n`` belongs to ``distances[n]``; 0 for a distance without cells.
        query: ``[*batch, query]``; 0 for a query without cells.
        key: ``[*batch, key]``; 0 for a key without cells.
        distances: ``[distance]``, query position minus key position, ascending.
        r: ``[*fit]``, Pearson correlation of scores and fitted scores. NaN where the scores do not vary, and where
            the fit has no residual degrees of freedom (``n_cells == n_parameters``, as with two tokens).
        r2: ``[*fit]``, the square of ``r``: the share of the scores' variance that the fit explains.
        r2_adjusted: ``[*fit]``, ``1 - (1 - r2)·(n_cells - 1)/(n_cells - n_parameters)``: about 0 for noise.
            ``r2`` and ``r2_adjusted`` are NaN where ``r`` is.
        share_distance, share_query, share_key: ``[*fit]``, the share of the variance that this axis explains by
            itself. The three need not add up to ``r2``, as the axes overlap under a causal mask.
        n_cells: number of cells in each fit.
        n_parameters: rank of the design, intercept included.
        pooled: whether all entries of the first axis share one distance component.
        layers: the layer numbers of the axis before the heads, if scores of several layers were fitted; else None.
    """

    intercept: Float64[Tensor, "*batch"]
    distance: Float64[Tensor, "*fit distance"]
    query: Float64[Tensor, "*batch query"]
    key: Float64[Tensor, "*batch key"]
    distances: Int64[Tensor, " distance"]
    r: Float64[Tensor, "*fit"]
    r2: Float64[Tensor, "*fit"]
    r2_adjusted: Float64[Tensor, "*fit"]
    share_distance: Float64[Tensor, "*fit"]
    share_query: Float64[Tensor, "*fit"]
    share_key: Float64[Tensor, "*fit"]
    n_cells: Int64[Tensor, "*fit"]
    n_parameters: Int64[Tensor, "*fit"]
    cells: Cells
    pooled: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def _shape(self) -> tuple[int, ...]:
        return (*self.intercept.shape, self.cells.n_query, self.cells.n_key)

    def component(self, name: Component) -> Float64[Tensor, "*batch query key"]:
        """Return one component at every cell, in the shape of the scores; 0 outside the mask."""
        check_choice("name", name, get_args(Component))
        return torch.where(self.mask, self._laid_out(name).expand(self._shape), 0.0)

    def _laid_out(self, name: Component) -> Tensor:
        """Reshape one component so that it broadcasts to the scores."""
        if name == "query":
            return self.query[..., :, None]
        if name == "key":
            return self.key[..., None, :]
        cells = self.cells
        distance = cell_distances(cells.n_query, cells.n_key, self.distance.device)
        return self.distance[..., distance.clamp(cells.low, cells.high) - cells.low]

    def fitted(self, *, fill: float = 0.0) -> Float64[Tensor, "*batch query key"]:
        """Return the fitted scores, with ``fill`` outside the mask (``fill=-inf`` makes them ready for a softmax)."""
        by_token = (self.intercept[..., None] + self.query)[..., :, None] + self._laid_out("key")
        return torch.where(self.mask, by_token + self._laid_out("distance"), fill)

    def residual(
        self, scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any
    ) -> Float64[Tensor, "*batch query key"]:
        """Subtract the fitted scores from scores, given as ``fit_additive`` takes them; 0 outside the mask."""
        shaped = as_fitted(self, scores)
        return torch.where(self.mask, shaped.to(self.query.device).double() - self.fitted(), 0.0)

    def to_frame(self, component: TableComponent = "summary") -> pd.DataFrame:
        """Return the fit as a table.

        ``"summary"`` has one row per fit: its index (those of ``batch``, ``layer`` and ``head`` that apply), ``r``,
        ``r2``, ``r2_adjusted`` and the shares. The other tables have one row per coefficient of that component.
        """
        check_choice("component", component, get_args(TableComponent))
        if component == "summary":
            columns = {name: getattr(self, name).flatten().tolist() for name in SUMMARY}
            return pd.DataFrame({**index_columns(self.r.shape, pooled=self.pooled, layers=self.layers), **columns})
        values = getattr(self, component)
        axis = self.distances if component == "distance" else torch.arange(values.shape[-1])
        pooled = self.pooled and component == "distance"
        index = index_columns(values.shape[:-1], pooled=pooled, repeat=len(axis), layers=self.layers)
        return pd.DataFrame(
            {**index, component: axis.tolist() * values[..., 0].numel(), "value": values.flatten().tolist()}
        )

    def show(self, tokens: Sequence[str], component: str = "fitted", **options: Any) -> Any:
        """Return a widget of one component of the scores: ``show_scores`` of this fit, with its options.

        ``"scores"`` and ``"residual"`` need ``scores=``, given as ``fit_additive`` takes them.
        """
        return public_name("viz", "show_scores")(self, tokens, component, **options)

    def __repr__(self) -> str:
        batch = "×".join(map(str, self.intercept.shape)) or "1"
        matrices = "score matrix" if batch == "1" else "score matrices"
        kind = "pooled over the first axis, " if self.pooled else ""
        lines = [
            f"AdditiveFit of {batch} {matrices}, {self.cells.n_query} queries × {self.cells.n_key} keys, {kind}"
            f"{mean_and_range(self.n_cells, '.0f')} cells, {mean_and_range(self.n_parameters, '.0f')} parameters",
            f"  r {mean_and_range(self.r)}   r² {mean_and_range(self.r2)}   "
            f"adjusted r² {mean_and_range(self.r2_adjusted)}",
            f"  alone: distance {mean_and_range(self.share_distance)}   query {mean_and_range(self.share_query)}   "
            f"key {mean_and_range(self.share_key)}",
            *range_note(self.r, "score matrices"),
        ]
        return "\n".join(lines)


def as_fitted(fit: AdditiveFit, scores: Any) -> Float[Tensor, "*batch query key"]:
    """Return scores, given as ``fit_additive`` takes them, as one tensor of the fitted shape, or raise.

    A list or a cache must have the layers of the fit, and a tensor its shape.
    """
    x, layers = (scores, fit.layers) if isinstance(scores, Tensor) else stack_layers(scores)
    shape = (*fit.intercept.shape, fit.cells.n_query, fit.cells.n_key)
    if tuple(check_scores(x).shape) != shape or layers != fit.layers:
        of_layers = "" if layers == fit.layers else f" of layers {layers}"
        fitted = f"{shape}{'' if fit.layers is None else f' of layers {fit.layers}'}"
        raise ArgumentError("scores", f"must have the fitted shape {fitted}, got {tuple(x.shape)}{of_layers}")
    return x.detach()


def range_note(x: Tensor, what: str) -> list[str]:
    """Say what the numbers of ``mean_and_range`` are, if there are several."""
    return [f"  mean (lowest…highest) of {x.numel()} {what}"] if x.numel() > 1 else []


def mean_and_range(x: Tensor, spec: str = ".3f") -> str:
    """Format a tensor as ``mean (lowest…highest)``, or as one number if all values are equal."""
    x = x.double()[~x.double().isnan()]
    if x.numel() == 0:
        return "undefined"
    low, mean, high = (format(v, spec) for v in (x.min().item(), x.mean().item(), x.max().item()))
    return mean if low == high else f"{mean} ({low}…{high})"
