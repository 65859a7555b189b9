"""Normalisers, marginals and Hessian of additive attention are those of autograd."""

from __future__ import annotations

import math

import pytest
import torch
from support.masks import CASES, Case
from torch import Tensor

from tl_posdisent.additive.attention.sums import AttentionSums
from tl_posdisent.additive.attention.systems import Systems, by_system, to_batch
from tl_posdisent.additive.cells import cell_distances, make_cells


def systems_of(case: Case) -> Systems:
    cells = make_cells(case.shape, case.options.get("mask", "causal"), case.options.get("window"))
    return Systems.of(cells, case.shape[:-2], pool=False)


def mask_of(case: Case) -> Tensor:
    return case.mask.expand(case.shape).reshape(-1, 1, *case.shape[-2:])


def drawn(case: Case, systems: Systems, span: float) -> tuple[Tensor, Tensor]:
    """Coefficients of distances and keys, and a vector to multiply; those of queries are 0."""
    shape = (math.prod(case.shape[:-2]), 1, systems.counts.shape[-1])
    stacked, x = span * torch.rand(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    for vector in (stacked, x):
        systems.cells.split(vector).query.zero_()
    return stacked, x


def by_autograd(systems: Systems, mask: Tensor, stacked: Tensor, x: Tensor) -> list[Tensor]:
    """Normalisers, their gradient, and a product with their Hessian, for distances and keys."""
    x0, cells = stacked.clone().requires_grad_(), systems.cells
    d = cell_distances(cells.n_query, cells.n_key)
    by_distance, _, by_key = cells.split(x0)
    logits = by_distance[..., d.clamp(cells.low, cells.high) - cells.low] + by_key[..., None, :]
    z = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
    z = torch.where(mask.any(-1), z, 0.0)
    (gradient,) = torch.autograd.grad(z.sum(), x0, create_graph=True)
    (product,) = torch.autograd.grad((gradient * x).sum(), x0)
    return [z.detach(), gradient.detach(), product]


@pytest.mark.parametrize("span", [1, 40, 300])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sums_are_those_of_autograd(case: Case, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles that are kept, or computed again; each query has attention 1, and its part of a product is 0."""
    monkeypatch.setattr("tl_posdisent.additive.attention.sums._TILE_QUERIES", 4)
    systems, mask = systems_of(case), mask_of(case)
    stacked, x = drawn(case, systems, span)
    log_z, gradient, product = by_autograd(systems, mask, stacked, x)
    split = systems.cells.split
    split(gradient).query.copy_(mask.any(-1))
    for stored in (2**26, 0):
        monkeypatch.setattr("tl_posdisent.additive.attention.sums._MAX_STORED_CELLS", stored)
        sums = AttentionSums(systems, stacked)
        found = (sums.log_z, sums.marginals, sums.product(x))
        for value, expected in zip(found, (log_z, gradient, product), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
        unit = torch.zeros_like(stacked)
        unit[..., 0] = 1
        torch.testing.assert_close(sums.diagonal[..., 0], sums.product(unit)[..., 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_cells_of_each_matrix(case: Case) -> None:
    systems, mask = systems_of(case), mask_of(case)
    rows, columns = slice(0, case.shape[-2]), slice(0, case.shape[-1])
    assert torch.equal(systems.inside(rows, columns).expand_as(mask), mask)
    counts = torch.zeros(*mask.shape[:2], systems.counts.shape[-1], dtype=torch.float64)
    systems.cells.add_sums(counts, mask.double(), rows, columns)
    assert torch.equal(systems.counts.expand_as(counts), counts)
    last = systems.select(torch.tensor([len(mask) - 1]))
    assert torch.equal(last.inside(rows, columns).expand_as(mask[-1:]), mask[-1:])


@pytest.mark.parametrize("pool", [False, True])
def test_systems_and_batch_axes_are_each_other(pool: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    arranged = by_system(x, 1, pool=pool)
    assert arranged.shape == ((12, 2, 5) if pool else (24, 1, 5))
    assert torch.equal(to_batch(arranged, x.shape[:-1], pool=pool), x)
