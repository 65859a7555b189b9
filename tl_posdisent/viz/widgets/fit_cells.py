"""The cells of an additive fit that a widget shows; only these are computed, so texts may be long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.utils.validation import check_flag

from .selection import Choice, pick

Matrices = Float64[Tensor, "head query key"]


def check_fit(fit: Any) -> tuple[int, ...]:
    """The shape of the scores that were fitted."""
    if not isinstance(fit, AdditiveFit):
        raise ValueError(f"fit must be an AdditiveFit, got {type(fit).__name__}")
    return (*fit.intercept.shape, fit.cells.n_query, fit.cells.n_key)


def check_alike(fit: AdditiveFit, name: str, x: Any) -> None:
    """Raise unless a tensor has the scores' shape."""
    shape = check_fit(fit)
    if not isinstance(x, Tensor) or tuple(check_scores(x).shape) != shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must have the fitted shape {shape}, got {got}")


def components_of(fit: AdditiveFit, choice: Choice, scores: Tensor | None, *, centred: bool) -> dict[str, Matrices]:
    """All components of the chosen cells, 0 outside the mask; without the intercept if ``centred``."""
    check_flag("centred", centred)
    if scores is not None:
        check_alike(fit, "scores", scores)
    components, mean, inside = _cells(fit, choice, choice.positions)
    fitted = components["distance"] + components["query"] + components["key"] + (0.0 if centred else mean)
    components["fitted"] = fitted
    if scores is not None:
        components["scores"] = choice.of(scores.detach()).to(mean.device) - (mean if centred else 0.0)
        components["residual"] = components["scores"] - fitted
    return {name: torch.where(inside, x, 0.0) for name, x in components.items()}


def additive_pattern(fit: AdditiveFit, choice: Choice) -> tuple[Matrices, Bool[Tensor, "head query key"]]:
    """The softmax of the fitted scores over all keys, of the chosen cells; and which of these the mask leaves."""
    components, mean, inside = _cells(fit, choice, range(fit.cells.n_key))
    fitted = components["distance"] + components["query"] + components["key"] + mean
    pattern = fitted.masked_fill(~inside, -torch.inf).softmax(-1)[:, :, choice.positions]
    inside = inside[:, :, choice.positions]
    return torch.where(inside, pattern, 0.0), inside  # a row of nothing has no softmax


def _cells(
    fit: AdditiveFit, choice: Choice, keys: Sequence[int]
) -> tuple[dict[str, Matrices], Float64[Tensor, "head 1 1"], Bool[Tensor, "head query key"]]:
    """The three components at the chosen queries and these keys, the intercept, and the mask there."""
    cells, device = fit.cells, fit.query.device
    rows, columns = (torch.tensor(list(x), device=device) for x in (choice.positions, keys))
    block = cells.inside(slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    inside = block[..., rows - rows[0], :][..., columns - columns[0]]
    inside = pick(inside.expand(*fit.intercept.shape, *inside.shape[-2:]), choice.rows)
    distance, query, key = (pick(x, choice.rows, cell_axes=1) for x in (fit.distance, fit.query, fit.key))
    components = {
        "distance": distance[:, (rows[:, None] - columns).clamp(cells.low, cells.high) - cells.low],
        "query": query[:, rows, None].expand(inside.shape),
        "key": key[:, None, columns].expand(inside.shape),
    }
    return components, pick(fit.intercept, choice.rows, cell_axes=0)[:, None, None], inside
