"""The cells of an additive fit that a widget shows; only these are computed, so texts may be long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_scores
from tl_posdisent.utils.validation import check_flag

from .selection import Choice

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


def causal(fit: AdditiveFit) -> bool:
    """Whether no query sees a key after it."""
    return fit.cells.low >= 0


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
    at = torch.tensor(choice.positions, device=fitted.device)
    inside_shown = inside[:, :, at]
    pattern = fitted.masked_fill(~inside, -torch.inf).softmax(-1)[:, :, at]
    return torch.where(inside_shown, pattern, 0.0), inside_shown  # a row of nothing has no softmax


def _cells(
    fit: AdditiveFit, choice: Choice, keys: Sequence[int]
) -> tuple[dict[str, Matrices], Float64[Tensor, "head 1 1"], Bool[Tensor, "head query key"]]:
    """The three components at the chosen queries and these keys, the intercept, and the mask there."""
    cells, device = fit.cells, fit.query.device
    rows, columns = (torch.tensor(list(x), device=device) for x in (choice.positions, keys))
    block = cells.inside(slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    inside = block[..., rows - rows[0], :][..., columns - columns[0]]
    inside = choice.of_heads(inside.expand(*fit.intercept.shape, *inside.shape[-2:]))
    # The distances of pooled texts are one text's.
    by_distance = replace(choice, text=0) if fit.pooled else choice
    distance = (rows[:, None] - columns).clamp(cells.low, cells.high) - cells.low
    components = {
        "distance": by_distance.of_heads(fit.distance, cell_axes=1)[:, distance],
        "query": choice.of_heads(fit.query, cell_axes=1)[:, rows, None].expand(inside.shape),
        "key": choice.of_heads(fit.key, cell_axes=1)[:, None, columns].expand(inside.shape),
    }
    return components, choice.of_heads(fit.intercept, cell_axes=0)[:, None, None], inside
