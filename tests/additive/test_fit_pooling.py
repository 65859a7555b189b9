"""Pooled texts share the distance profile: dense least squares, and the gauge."""

from __future__ import annotations

import pytest
import torch
from support.dense import Dense, allowed
from support.masks import documents, padding, random_mask
from torch import Tensor

from tl_posdisent import fit_additive
from tl_posdisent.additive.cells import cell_distances

N_TEXT, N_HEAD, LENGTH = 3, 2, 11
POOLS = {
    "causal": ({}, allowed(LENGTH, LENGTH)),
    "full": ({"mask": "full"}, allowed(LENGTH, LENGTH, mask="full")),
    "window": ({"window": 2}, allowed(LENGTH, LENGTH, window=2)),
    "documents": ({"mask": documents(4, 1, 6)}, documents(4, 1, 6)),
    "dilated": ({"mask": (d := cell_distances(LENGTH, LENGTH) % 3 == 0)}, d),
    "padding": ({"mask": (m := padding(LENGTH, (0, 4, 2), (5, 0, 1)))}, m),
    "random": ({"mask": (m := random_mask(N_TEXT, 1, LENGTH, LENGTH, density=0.3))}, m),
    "sparse": ({"mask": (m := random_mask(N_TEXT, 1, LENGTH, LENGTH, density=0.05))}, m),
    "per-head": ({"mask": (m := random_mask(N_HEAD, LENGTH, LENGTH, density=0.4))}, m),
    "per-matrix": ({"mask": (m := random_mask(N_TEXT, N_HEAD, LENGTH, LENGTH, density=0.4))}, m),
}
every_pool = pytest.mark.parametrize(("options", "mask"), POOLS.values(), ids=POOLS.keys())


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def scores_and_masks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Texts of different levels and slopes, and their masks in full."""
    scores = noise(N_TEXT, N_HEAD, LENGTH, LENGTH)
    scores = scores + torch.tensor([5.0, -2.0, 0.0])[:, None, None, None] + 0.3 * cell_distances(LENGTH, LENGTH)
    return scores, mask.expand(scores.shape)


def close(found: Tensor, expected: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)


@every_pool
def test_pooled_fit_is_dense_pooled_least_squares(options: dict, mask: Tensor) -> None:
    scores, masks = scores_and_masks(mask)
    fit = fit_additive(scores, pool=True, **options)
    for head in range(N_HEAD):
        dense = Dense(masks[:, head])
        expected = dense.fitted(scores[:, head])
        close(fit.fitted()[:, head], expected)
        x, y = scores[:, head][masks[:, head]], expected[masks[:, head]]
        assert fit.n_cells[head].item() == len(x)
        assert fit.n_parameters[head].item() == dense.rank()
        spare = len(x) - dense.rank()
        r2 = 1 - (x - y).square().sum() / (x - x.mean()).square().sum()
        r2 = r2 if spare else torch.full_like(r2, torch.nan)
        close(fit.r2[head], r2, 1e-10)
        close(fit.r[head], r2.clamp_min(0).sqrt(), 1e-10)
        adjusted = 1 - (1 - r2) * (len(x) - 1) / spare if spare else torch.tensor(torch.nan).double()
        close(fit.r2_adjusted[head], adjusted, 1e-9)


@every_pool
def test_pooled_components_obey_the_gauge(options: dict, mask: Tensor) -> None:
    scores, masks = scores_and_masks(mask)
    fit = fit_additive(scores, pool=True, **options)
    a, b, c = (fit.component(name) for name in ("distance", "query", "key"))
    close(a.sum((0, -2, -1)), torch.zeros(N_HEAD).double())
    close(b.sum((-2, -1)), torch.zeros(N_TEXT, N_HEAD).double())
    close(c.sum((-2, -1)), torch.zeros(N_TEXT, N_HEAD).double())
    # The trend of the key, about each text's own mean position, over all texts together.
    j = torch.arange(LENGTH).double().expand(masks.shape)
    j = j - (j * masks).sum((-2, -1), keepdim=True) / masks.sum((-2, -1), keepdim=True)
    close((c * j * masks).sum((0, -2, -1)), torch.zeros(N_HEAD).double())
    assert fit.distance.shape == (N_HEAD, len(fit.distances))
    residual = fit.residual(scores)
    close(residual.sum(-1), torch.zeros(N_TEXT, N_HEAD, LENGTH).double())
    close(residual.sum(-2), torch.zeros(N_TEXT, N_HEAD, LENGTH).double())
