"""Normalisers, marginals and Hessian of additive attention, by transforms and cell by cell, are those of autograd."""

from __future__ import annotations

import math

import pytest
import torch
from support.masks import CASES, Case
from torch import Tensor

from tl_posdisent.additive.attention import sums as fourier
from tl_posdisent.additive.attention.newton import solve_keys_alone
from tl_posdisent.additive.attention.sums import AttentionSums, Layout, by_system, to_batch
from tl_posdisent.additive.cells import cell_distances, make_cells


def layout_of(case: Case, edges: tuple[int, ...] = ()) -> Layout:
    mask = case.options.get("mask", "causal")
    cells = make_cells(case.shape, mask, case.options.get("window"))
    return Layout.of(cells, edges, case.shape[:-2], pool=False, named=isinstance(mask, str))


def mask_of(case: Case) -> Tensor:
    return case.mask.expand(case.shape).reshape(-1, 1, *case.shape[-2:])


def by_autograd(layout: Layout, mask: Tensor, stacked: Tensor, x: Tensor) -> list[Tensor]:
    """Normalisers, their gradient, and a product with their Hessian."""
    x0 = stacked.clone().requires_grad_()
    d = cell_distances(layout.n_query, layout.n_key)
    band = torch.bucketize(d, torch.tensor(layout.edges, dtype=torch.long), right=True)
    key = layout.n_distance + band * layout.n_key + torch.arange(layout.n_key)
    logits = x0[..., d.clamp(layout.low, layout.high) - layout.low] + x0[..., key]
    z = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)
    z = torch.where(mask.any(-1), z, 0.0)
    (gradient,) = torch.autograd.grad(z.sum(), x0, create_graph=True)
    (product,) = torch.autograd.grad((gradient * x).sum(), x0)
    return [z.detach(), gradient.detach(), product]


@pytest.mark.parametrize("edges", [(), (-3, 0, 2, 30)], ids=["", "bands"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sums_are_those_of_autograd(case: Case, edges: tuple[int, ...]) -> None:
    layout, mask = layout_of(case, edges), mask_of(case)
    stacked = 2 * torch.randn(math.prod(case.shape[:-2]), 1, layout.counts.shape[-1], dtype=torch.float64)
    x = torch.randn_like(stacked)
    expected = by_autograd(layout, mask, stacked, x)
    for direct in (False, True):
        sums = AttentionSums(layout, stacked, direct=direct)
        for found, value in zip((sums.log_z, sums.marginals, sums.product(x)), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=1e-9)
        unit = torch.zeros_like(stacked)
        unit[..., 0] = 1
        torch.testing.assert_close(sums.diagonal[..., 0], sums.product(unit)[..., 0], rtol=0, atol=1e-5)
    counts = torch.zeros_like(stacked)
    layout.add_sums(counts, mask.double(), slice(0, layout.n_query), slice(0, layout.n_key))
    assert torch.equal(layout.counts.expand_as(counts), counts)


@pytest.mark.parametrize("span", [1, 10, 40, 300])
def test_normalisers_of_any_size_are_right(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding of transforms would reach them, queries are formed cell by cell; also those not kept."""
    monkeypatch.setattr("tl_posdisent.additive.attention.sums._TILE", 4)
    layout, mask = layout_of(CASES["causal-40"]), mask_of(CASES["causal-40"])
    stacked = span * torch.rand(2, 1, layout.counts.shape[-1], dtype=torch.float64)
    x = torch.randn_like(stacked)
    expected = by_autograd(layout, mask, stacked, x)
    for stored in (2**26, 0):
        monkeypatch.setattr("tl_posdisent.additive.attention.sums._STORED", stored)
        sums = AttentionSums(layout, stacked)
        for found, value in zip((sums.log_z, sums.marginals, sums.product(x)), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=1e-8)
        assert (sums.tiles == []) == (span < 40)


@pytest.mark.parametrize("case", CASES)
def test_distances_next_to_the_query(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are summed cell by cell where transforms of all distances would round too much."""
    monkeypatch.setattr(fourier, "_NEAR", 3)
    monkeypatch.setattr("tl_posdisent.additive.attention.sums._TILE", 4)
    layout, mask = layout_of(CASES[case]), mask_of(CASES[case])
    stacked = 4 * torch.rand(math.prod(CASES[case].shape[:-2]), 1, layout.counts.shape[-1], dtype=torch.float64)
    close = torch.arange(layout.low, layout.high + 1).abs() < 2
    layout.split(stacked)[0][..., close] += 25  # nats
    x = torch.randn_like(stacked)
    sums, expected = AttentionSums(layout, stacked), by_autograd(layout, mask, stacked, x)
    for found, value in zip((sums.log_z, sums.marginals, sums.product(x)), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-8)
    exact = AttentionSums(layout, stacked, direct=True)
    torch.testing.assert_close(sums.diagonal, exact.diagonal, rtol=0, atol=1e-4 * float(exact.marginals.max()))


def test_a_steep_profile_needs_no_more_cells_than_those_near_the_query() -> None:
    """Thirty nats down over thirty distances, and a loud first key: transforms of all distances lose the others."""
    layout = layout_of(CASES["causal-40"])
    stacked = torch.zeros(2, 1, layout.counts.shape[-1], dtype=torch.float64)
    layout.split(stacked)[0][..., :31] = torch.arange(30, -1, -1)
    layout.split(stacked)[1][..., 0] = 5
    sums, exact = AttentionSums(layout, stacked), AttentionSums(layout, stacked, direct=True)
    assert sums.tiles == []
    torch.testing.assert_close(sums.log_z, exact.log_z, rtol=0, atol=1e-9)
    torch.testing.assert_close(sums.marginals, exact.marginals, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["causal-40", "fewer-queries"])
@pytest.mark.parametrize("span", [1, 3])
def test_importances_alone_in_closed_form(name: str, span: int) -> None:
    layout = layout_of(CASES[name])
    stacked = torch.zeros(2, 1, layout.counts.shape[-1], dtype=torch.float64)
    key = layout.split(stacked)[1]
    key.copy_(span * torch.linspace(0, 1, layout.n_key) + torch.randn(key.shape, dtype=torch.float64))
    wanted = AttentionSums(layout, stacked, direct=True)
    found, log_z = solve_keys_alone(layout, wanted.marginals)
    level = layout.split(found)[1][..., :1] - key[..., :1]
    torch.testing.assert_close(layout.split(found)[1] - level, key, rtol=0, atol=1e-6)
    torch.testing.assert_close(log_z - level[..., 0], wanted.log_z, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pool", [False, True])
def test_systems_and_batch_axes_are_each_other(pool: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    arranged = by_system(x, 1, pool=pool)
    assert arranged.shape == ((12, 2, 5) if pool else (24, 1, 5))
    assert torch.equal(to_batch(arranged, x.shape[:-1], pool=pool), x)
