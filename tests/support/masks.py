"""Masks of every kind: the options of ``fit_additive``, and the cells that they select."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent import AdditiveFit, fit_additive

from .dense import allowed


@dataclass
class Case:
    """Scores of shape ``shape`` and options of ``fit_additive``, which mean the cells of ``mask``."""

    shape: tuple[int, ...]
    mask: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def scores(self, seed: int = 0) -> Tensor:
        """Random scores; of fewer queries than keys, with zeros after each query, as causal scores need them."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        fewer = self.shape[-2] < self.shape[-1] and isinstance(self.options.get("mask", "causal"), str)
        return x * allowed(*self.shape[-2:], mask=self.options.get("mask", "causal")) if fewer else x

    @functools.cached_property
    def fitted(self) -> tuple[Tensor, AdditiveFit]:
        """Scores with a mean and a trend, and their fit: made once, and looked at by many tests."""
        scores = 5 + 3 * self.scores(1) + 0.5 * distances(self)
        return scores, fit_additive(scores, **self.options, check=False)


def named(n_query: int, n_key: int, batch: tuple[int, ...] = (2,), **options: Any) -> Case:
    return Case((*batch, n_query, n_key), allowed(n_query, n_key, **options), options)


def boolean(mask: Tensor, batch: tuple[int, ...] = (2,), window: int | None = None) -> Case:
    options = {"mask": mask} if window is None else {"mask": mask, "window": window}
    if window is not None:
        mask = mask & allowed(*mask.shape[-2:], mask="full", window=window)
    return Case((*batch, *mask.shape[-2:]), mask, options)


def cells_of(x: Tensor, case: Case) -> list[Tensor]:
    """The cells of every score matrix, flattened."""
    masks = case.mask.expand(case.shape).reshape(-1, *case.shape[-2:])
    return [one[mask] for one, mask in zip(x.reshape(masks.shape), masks, strict=True)]


def distances(case: Case) -> Tensor:
    """Query position minus key position of every cell."""
    n_query, n_key = case.shape[-2:]
    return torch.arange(n_query)[:, None] + (n_key - n_query) - torch.arange(n_key)


def padding(length: int, left: tuple[int, ...], right: tuple[int, ...]) -> Tensor:
    """One causal mask per text ``[text, 1, query, key]``, with so much padding at its two ends."""
    token = torch.arange(length)
    real = torch.stack([(token >= a) & (token < length - b) for a, b in zip(left, right, strict=True)])
    return (real[:, :, None] & real[:, None, :] & allowed(length, length))[:, None]


def documents(*lengths: int) -> Tensor:
    """Causal attention inside each of several packed documents."""
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool() & allowed(sum(lengths), sum(lengths))


def sinks(length: int, n_sink: int, window: int) -> Tensor:
    """A sliding window, and the first few keys for everyone."""
    return allowed(length, length, window=window) | (allowed(length, length) & (torch.arange(length) < n_sink))


def random_mask(*shape: int, density: float, seed: int = 0) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    mask[..., 0, 0] = True  # at least one cell
    return mask


BURNT_IN = allowed(20, 20) & (torch.arange(20)[:, None] >= 6)  # no queries with less than so many keys

CASES = {
    **{f"causal-{n}": named(n, n) for n in (2, 3, 4, 9, 40)},
    **{f"full-{n}": named(n, n, mask="full") for n in (2, 3, 17)},
    **{f"window-{w}": named(24, 24, window=w) for w in (1, 2, 3, 8, 23, 24, 99)},
    **{f"full-window-{w}": named(21, 21, mask="full", window=w) for w in (1, 2, 7)},
    "narrow-window": named(130, 130, window=3),
    "one-query": named(1, 12),
    "two-queries": named(2, 12),
    "fewer-queries": named(5, 16),
    "fewer-queries-full": named(5, 16, mask="full"),
    "fewer-queries-window": named(7, 16, window=4),
    "no-batch": named(10, 10, batch=()),
    "many-axes": named(6, 6, batch=(2, 1, 3)),
    "boolean-causal": boolean(allowed(15, 15)),
    "boolean-window": boolean(allowed(15, 15), window=4),
    "not-to-itself": boolean(allowed(12, 12) & ~torch.eye(12, dtype=torch.bool)),
    "far-band": boolean(allowed(16, 16) & ~allowed(16, 16, window=11)),
    "burn-in": boolean(BURNT_IN),
    "without-first-key": boolean(allowed(14, 14) & (torch.arange(14) > 0)),
    "one-cell": boolean(torch.eye(5, dtype=torch.bool) & (torch.arange(5) == 2)),
    "one-row": boolean(allowed(9, 9) & (torch.arange(9)[:, None] == 7)),
    "one-column": boolean(allowed(9, 9) & (torch.arange(9) == 3)),
    "two-distances": boolean((torch.arange(11)[:, None] - torch.arange(11)).abs() == 4),
    "more-queries-than-keys": boolean(random_mask(9, 5, density=0.7)),
    "queries-before-the-keys": boolean(torch.cat([torch.zeros(7, 6, dtype=torch.bool), allowed(6, 6)])),
    "documents": boolean(documents(5, 8, 3, 1)),
    "packed-pairs": boolean(documents(2, 2, 2, 2)),
    "sinks": boolean(sinks(18, 2, 4)),
    "dilated": boolean(allowed(16, 16) & ((torch.arange(16)[:, None] - torch.arange(16)) % 3 == 0)),
    **{f"random-{int(100 * p)}": boolean(random_mask(11, 11, density=p)) for p in (0.05, 0.2, 0.5, 0.9)},
    "padding": boolean(padding(12, (0, 3, 0, 5), (0, 0, 4, 2)), batch=(4, 2)),
    "padding-window": boolean(padding(14, (0, 4), (3, 0)), batch=(2, 2), window=3),
    "mask-per-head": boolean(random_mask(3, 8, 8, density=0.6), batch=(2, 3)),
    "mask-per-matrix": boolean(random_mask(2, 3, 7, 7, density=0.5), batch=(2, 3)),
}


# Fields and options of ``fit_additive`` for the tests of its input and of its results.
FIELDS = (
    *("intercept", "distance", "query", "key", "distances", "r", "r2", "r2_adjusted"),
    *("share_distance", "share_query", "share_key", "n_cells", "n_parameters"),
)

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 3},
    "narrow": {"window": 1},
    "documents": {"mask": documents(4, 3, 2)},
    "padding": {"mask": padding(9, (2, 0), (0, 3))},
}

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
