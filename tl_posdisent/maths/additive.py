"""How nearly attention scores are a sum of a distance, a query and a key part (three-axis additivity [A])."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from .cells import Cells, MaskKind, cell_distances, make_cells
from .marginals import Marginals, read_marginals
from .parameters import count_parameters
from .solver import Parts, count_cells, fix_gauge, solve
from .tables import index_columns

Component = Literal["distance", "query", "key"]
TablePart = Literal["summary", "distance", "query", "key"]


@dataclass(frozen=True, repr=False)
class AdditiveFit:
    """Least-squares fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]``.

    All tensors are float64 and in the units of the scores. ``*batch`` are the leading axes of the scores; ``*fit``
    are the same, less the first (the texts) if the fit is pooled.

    **Gauge.** Fitted values, residuals, ``r`` and ``r2`` are unique; the components are not: constants can move
    between them, and so can a straight line (``+t·d`` in the distance, ``-t·i`` in the query, ``+t·j`` in the key).
    The convention is that every component has mean 0 over the cells and ``key`` has no linear trend over
    positions, so that a trend is always the distance's. With pooled texts the trend is that of all texts together.

    Attributes:
        intercept: ``[*batch]``, the mean of the scores (of each text, if pooled).
        distance: ``[*fit, distance]``, entry ``n`` belongs to ``distances[n]``; 0 for a distance without cells.
        query: ``[*batch, query]``; 0 for a query without cells.
        key: ``[*batch, key]``; 0 for a key without cells.
        distances: ``[distance]``, query position minus key position, ascending.
        r: ``[*fit]``, Pearson correlation of scores and fitted scores; NaN where the scores do not vary.
        r2: ``[*fit]``, its square, the share of the scores' variance that the fit explains.
        r2_adjusted: ``[*fit]``, ``1 - (1 - r2)·(n_cells - 1)/(n_cells - n_parameters)``: about 0 for noise. NaN
            where there are no more cells than parameters.
        share_distance, share_query, share_key: ``[*fit]``, the share of the variance that this axis explains when it
            is alone. They need not add up to ``r2``, as the axes overlap under a causal mask.
        n_cells: number of cells in each fit.
        n_parameters: rank of the design, intercept included.
        pooled: whether all entries of the first axis share one distance component.
    """

    intercept: Float64[Tensor, "*batch"]
    distance: Float64[Tensor, "*fit distance"]
    query: Float64[Tensor, "*batch query"]
    key: Float64[Tensor, "*batch key"]
    distances: Int64[Tensor, "distance"]
    r: Float64[Tensor, "*fit"]
    r2: Float64[Tensor, "*fit"]
    r2_adjusted: Float64[Tensor, "*fit"]
    share_distance: Float64[Tensor, "*fit"]
    share_query: Float64[Tensor, "*fit"]
    share_key: Float64[Tensor, "*fit"]
    n_cells: Int64[Tensor, "*mask"]
    n_parameters: Int64[Tensor, "*mask"]
    cells: Cells
    pooled: bool = False

    @property
    def mask(self) -> Bool[Tensor, "*mask query key"]:
        """True where a cell took part in the fit."""
        return self.cells.to_mask(self.query.device)

    def component(self, name: Component) -> Float64[Tensor, "*batch query key"]:
        """One component laid out like the scores; 0 outside the mask."""
        if name not in get_args(Component):
            raise ValueError(f"name must be one of {', '.join(get_args(Component))}, got {name!r}")
        shape = (*self.intercept.shape, self.cells.n_query, self.cells.n_key)
        if name == "distance":
            low, high = self.cells.low, self.cells.high
            where = cell_distances(*shape[-2:], self.distance.device).clamp(low, high) - low
            values = self.distance[..., where]
        else:
            values = self.query[..., :, None] if name == "query" else self.key[..., None, :]
        return torch.where(self.mask, values.expand(shape), 0.0)

    def fitted(self, *, fill: float = 0.0) -> Float64[Tensor, "*batch query key"]:
        """The fitted scores; ``fill`` outside the mask (``-inf`` makes them ready for a softmax)."""
        total = sum((self.component(name) for name in get_args(Component)), self.intercept[..., None, None])
        return torch.where(self.mask, total, fill)

    def residual(self, scores: Float[Tensor, "*batch query key"]) -> Float64[Tensor, "*batch query key"]:
        """What the fit leaves of the scores; 0 outside the mask.

        Raises:
            ValueError: scores of another shape than those that were fitted.
        """
        shape = (*self.intercept.shape, self.cells.n_query, self.cells.n_key)
        if tuple(scores.shape) != shape:
            raise ValueError(f"scores must have the fitted shape {shape}, got {tuple(scores.shape)}")
        return torch.where(self.mask, scores.detach().to(self.query.device).double() - self.fitted(), 0.0)

    def to(self, device: torch.device | str) -> AdditiveFit:
        """The same fit on another device."""
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def to_frame(self, part: TablePart = "summary") -> pd.DataFrame:
        """The fit as a table.

        ``"summary"`` has one row per fit: its leading index (``head``, or ``batch`` and ``head``, as TransformerLens
        lays scores out), ``r``, ``r2``, ``r2_adjusted`` and the shares. ``"distance"``, ``"query"`` and ``"key"``
        have one row per coefficient of that component.
        """
        if part not in get_args(TablePart):
            raise ValueError(f"part must be one of {', '.join(get_args(TablePart))}, got {part!r}")
        if part == "summary":
            names = ("r", "r2", "r2_adjusted", "share_distance", "share_query", "share_key")
            columns = {name: getattr(self, name).flatten().tolist() for name in names}
            return pd.DataFrame({**index_columns(self.r.shape, pooled=self.pooled), **columns})
        values = getattr(self, part)
        axis = self.distances if part == "distance" else torch.arange(values.shape[-1])
        pooled = self.pooled and part == "distance"
        index = index_columns(values.shape[:-1], pooled=pooled, repeat=len(axis))
        return pd.DataFrame(
            {**index, part: axis.tolist() * values[..., 0].numel(), "value": values.flatten().tolist()}
        )

    def __repr__(self) -> str:
        batch = "×".join(map(str, self.intercept.shape)) or "one"
        kind = "pooled over the first axis, " if self.pooled else ""
        lines = [
            f"AdditiveFit of {batch} score matrices, {self.cells.n_query} queries × {self.cells.n_key} keys, {kind}"
            f"{_range(self.n_cells, '.0f')} cells, {_range(self.n_parameters, '.0f')} parameters",
            f"  r {_range(self.r)}   r² {_range(self.r2)}   adjusted r² {_range(self.r2_adjusted)}",
            f"  alone: distance {_range(self.share_distance)}   query {_range(self.share_query)}   "
            f"key {_range(self.share_key)}",
        ]
        return "\n".join(lines)


@torch.no_grad()
def fit_additive(
    scores: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    pool: bool = False,
) -> AdditiveFit:
    """Fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]`` by least squares, for all heads at once.

    This is the three-axis model of arXiv 2503.13305, §3: how much of what a head's scores do is a sum of *where* (the
    distance), a bias of the query and an importance of the key. Cells outside the mask are never read: they may
    hold anything. Sums run in float64 whatever the dtype; one pass over the scores and about fifteen steps that cost
    O(length) each.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``. The
            last query stands at the last key: with fewer queries than keys, query ``i`` is at ``i + n_key - n_query``.
        mask: ``"causal"`` (key not after query), ``"full"`` (bidirectional), or a boolean tensor that is True where a
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes).
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        pool: one distance profile for all entries of the first axis (texts), each with its own query and key part.

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores of integer type, of less than two axes, empty or with a single key; a mask of wrong dtype
            or size or that leaves nothing; a cell inside the mask that is NaN, infinite or a masking value (says
            where); ``pool`` without a leading axis.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two loud keys
        >>> fit = fit_additive(scores)
        >>> round(fit.r.item(), 6), fit.distances.tolist()
        (1.0, [0, 1, 2, 3, 4, 5])
        >>> bool(torch.allclose(fit.fitted(), scores.double().tril()))
        True
    """
    scores = check_scores(scores).detach()
    if pool and scores.ndim < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(scores.shape)}")
    cells = make_cells(*scores.shape[-2:], _lifted(mask, scores), window)
    read = read_marginals(scores, cells)
    return additive_fit(read, cells, pool=pool)


def additive_fit(read: Marginals, cells: Cells, *, pool: bool = False) -> AdditiveFit:
    """The fit that belongs to marginal sums, wherever these come from."""
    if pool:
        read = _pooled(read, cells)
    sums, weights = read.sums, count_cells(cells, read.sums.query, pool=pool)
    offset, parts = fix_gauge(cells, solve(cells, sums, pool=pool), pool=pool)

    def over_texts(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True) if pool else x

    # Variation about the mean of all cells: in total, explained by the model, and by each axis alone.
    n_cells = weights.distance.sum(-1)
    mean = sums.distance.sum(-1) / n_cells
    total = read.squares - n_cells * mean**2
    centred = Parts(*(s - n * mean[..., None] for s, n in zip(sums, weights, strict=True)))
    explained, shares = torch.zeros_like(total), []
    for coefficient, s, ratio in zip(parts, centred, centred.over(weights), strict=True):
        pooled_axis = coefficient is not parts.distance
        along, alone = (coefficient * s).sum(-1), (ratio * s).sum(-1)
        explained = explained + (over_texts(along) if pooled_axis else along)
        shares.append((over_texts(alone) if pooled_axis else alone) / total)
    constant = total <= n_cells * (1e-14 * (read.pivot + mean)) ** 2
    r2 = torch.where(constant, torch.nan, (explained / total).clamp(0, 1))
    n_parameters = count_parameters(cells, read.sums.query.shape[0] if pool else None).to(r2.device)
    spare = n_cells - (n_parameters[None] if pool and n_parameters.ndim else n_parameters)
    adjusted = torch.where(spare > 0, 1 - (1 - r2) * (n_cells - 1) / spare, torch.nan)

    def of_fit(x: Tensor) -> Tensor:
        return x[0] if pool and x.ndim else x

    return AdditiveFit(
        intercept=read.pivot + offset,
        distance=of_fit(parts.distance),
        query=parts.query,
        key=parts.key,
        distances=cells.distances(r2.device),
        r=of_fit(r2.sqrt()),
        r2=of_fit(r2),
        r2_adjusted=of_fit(adjusted),
        share_distance=of_fit(torch.where(constant, torch.nan, shares[0].clamp(0, 1))),
        share_query=of_fit(torch.where(constant, torch.nan, shares[1].clamp(0, 1))),
        share_key=of_fit(torch.where(constant, torch.nan, shares[2].clamp(0, 1))),
        n_cells=of_fit(n_cells).long(),
        n_parameters=n_parameters,
        cells=cells,
        pooled=pool,
    )


def _pooled(read: Marginals, cells: Cells) -> Marginals:
    """Marginals about one pivot for all texts, the distance's and the squares summed over them."""
    common = read.pivot.mean(0, keepdim=True)
    shift = read.pivot - common
    counts = count_cells(cells, read.sums.query, pool=False)
    n_cells, total = counts.distance.sum(-1), read.sums.distance.sum(-1)
    squares = read.squares + 2 * shift * total + n_cells * shift**2
    by_distance, by_query, by_key = (
        s + n * shift[..., None] for s, n in zip(read.sums, counts, strict=True)
    )
    sums = Parts(by_distance.sum(0, keepdim=True), by_query, by_key)
    return Marginals(common, sums, squares.sum(0, keepdim=True))


@torch.no_grad()
def score_correlation(
    a: Float[Tensor, "*batch query key"],
    b: Float[Tensor, "*batch query key"],
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
) -> Float64[Tensor, "*batch"]:
    """Pearson correlation of two score tensors over the cells of a mask, one number per matrix, in float64.

    Args:
        a, b: scores of the same shape ``[*batch, query, key]``; cells outside the mask are ignored.
        mask, window: as in ``fit_additive``.

    Returns:
        ``[*batch]``, -1 … 1; NaN where one of the two does not vary.

    Raises:
        ValueError: different shapes, or what ``fit_additive`` refuses.

    Example:
        >>> import torch
        >>> from tl_posdisent import score_correlation
        >>> scores = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
        >>> score_correlation(scores, 3 - 2 * scores).tolist()
        [-1.0, -1.0]
    """
    check_scores(a, "a")
    check_scores(b, "b")
    if a.shape != b.shape:
        raise ValueError(f"a and b must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    cells = make_cells(*a.shape[-2:], _lifted(mask, a), window)
    inside = cells.to_mask(a.device)
    for scores in (a, b):
        read_marginals(scores, cells)  # refuses cells that are no scores
    n = inside.sum((-2, -1))
    x, y = (torch.where(inside, s.detach().double(), 0.0) for s in (a, b))
    x, y = (torch.where(inside, s - (s.sum((-2, -1)) / n)[..., None, None], 0.0) for s in (x, y))
    norm = x.square().sum((-2, -1)).sqrt() * y.square().sum((-2, -1)).sqrt()
    r = (x * y).sum((-2, -1)) / norm
    return torch.where(norm > 0, r.clamp(-1, 1), torch.nan)


def check_scores(scores: Any, name: str = "scores") -> Tensor:
    """Refuse what cannot be a score tensor."""
    if not isinstance(scores, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {scores.dtype}")
    if scores.ndim < 2:
        raise ValueError(f"{name} must have shape (..., query, key), got {tuple(scores.shape)}")
    if scores.numel() == 0 or scores.shape[-1] < 2:
        raise ValueError(f"{name} must hold at least one query and two keys, got shape {tuple(scores.shape)}")
    return scores


def _lifted(mask: Any, scores: Tensor) -> Any:
    """A boolean mask with leading axes gets as many as the scores have."""
    if not isinstance(mask, Tensor) or mask.ndim <= 2:
        return mask
    if mask.ndim > scores.ndim or any(
        m not in (1, s) for m, s in zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    ):
        raise ValueError(
            f"mask must broadcast to the scores' shape {tuple(scores.shape)}, got {tuple(mask.shape)}"
        )
    return mask.reshape((1,) * (scores.ndim - mask.ndim) + tuple(mask.shape)).to(scores.device)


def _range(x: Tensor, spec: str = ".3f") -> str:
    """``mean (lowest…highest)``, or the one number."""
    x = x.double()[~x.double().isnan()]
    if x.numel() == 0:
        return "undefined"
    low, mean, high = (format(v, spec) for v in (x.min().item(), x.mean().item(), x.max().item()))
    return mean if low == high else f"{mean} ({low}…{high})"
