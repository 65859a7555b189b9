"""From what a user calls a mask to a set of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from .cells import Cells, cell_distances
from .interval_cells import Runs
from .masked_cells import Scattered

MaskKind = Literal["causal", "full"]


def make_cells(
    shape: Sequence[int],
    mask: MaskKind | Bool[Tensor, "*mask query key"],
    window: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Cells:
    """The cells that a mask leaves of scores of this shape, ``(*batch, query, key)``.

    Raises:
        ValueError: an unknown mask, a mask of another size or dtype, a window below 1, nothing left.
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer of at least 1, or None, got {window!r}")
    if isinstance(mask, Tensor):
        mask = _checked(mask, shape, window).to(device)
        return Runs.from_mask(mask) or Scattered.from_mask(mask)
    if not (isinstance(mask, str) and mask in get_args(MaskKind)):
        raise ValueError(f'mask must be "causal", "full" or a boolean tensor, got {mask!r}')
    n_query, n_key = shape[-2:]
    if n_query > n_key:
        raise ValueError(
            f"scores with more queries than keys ({n_query} > {n_key}) have no distances: "
            "the last query must stand at the last key"
        )
    low, high = (0 if mask == "causal" else 1 - n_query), n_key - 1
    if window is not None:
        low, high = max(low, 1 - window), min(high, window - 1)
    return Runs.band(n_query, n_key, low, high, device)


def _checked(mask: Tensor, shape: Sequence[int], window: int | None) -> Tensor:
    """The mask, less what is outside the window: two axes, or as many as the scores have."""
    n_query, n_key = shape[-2:]
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must have dtype torch.bool (True where a cell counts), got {mask.dtype}; "
            "convert an additive or 0/1 mask yourself, its meaning cannot be read from its values"
        )
    if mask.ndim < 2 or tuple(mask.shape[-2:]) != (n_query, n_key):
        raise ValueError(f"mask must have shape (..., {n_query}, {n_key}) as the scores, got {tuple(mask.shape)}")
    leading, batch = tuple(mask.shape[:-2]), tuple(shape[:-2])
    aligned = (1,) * (len(batch) - len(leading)) + leading
    if len(aligned) > len(batch) or any(m not in (1, n) for m, n in zip(aligned, batch, strict=True)):
        raise ValueError(f"mask must broadcast to the scores' shape {tuple(shape)}, got {tuple(mask.shape)}")
    if window is not None:
        mask = mask & (cell_distances(n_query, n_key, mask.device).abs() < window)
    filled = mask.flatten(-2).any(-1)
    if not bool(filled.all()):
        raise ValueError(
            f"mask must leave at least one cell, got one of shape {tuple(mask.shape)} that leaves nothing"
            + (f" at leading index {tuple((~filled).nonzero()[0].tolist())}" if leading else "")
        )
    shared = all(n == 1 for n in leading)
    return mask.reshape((n_query, n_key) if shared else (*aligned, n_query, n_key))
