"""Cell sets: which cells count, in whatever block, and sums of the model over them without a matrix."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense import Dense
from support.masks import CASES, Case, random_mask
from torch import Tensor

from tl_posdisent.additive.cells import Cells, ConvexCells, by_distance, cell_distances, diagonal_sums, make_cells

quick = settings(max_examples=40, derandomize=True, deadline=None)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def cells_of(case: Case) -> Cells:
    return make_cells(case.shape, case.options.get("mask", "causal"), case.options.get("window"))


def normal_matrices(case: Case, cells: Cells) -> Tensor:
    """AᵀA of every mask, from its dense design, in the order of a stacked vector."""
    n_query, n_key = case.shape[-2:]
    first = cells.low + n_query - 1  # the dense design has a column for every diagonal
    keep = list(range(first, first + cells.n_distance)) + list(range(n_query + n_key - 1, 2 * (n_query + n_key) - 1))
    tables = [Dense(mask[None]).table()[:, keep] for mask in case.mask.reshape(-1, n_query, n_key)]
    return torch.stack([x.T @ x for x in tables]).reshape(*case.mask.shape[:-2], len(keep), len(keep))


@every_case
def test_product_is_that_with_the_normal_matrix(case: Case) -> None:
    cells = cells_of(case)
    matrix = normal_matrices(case, cells)
    x = torch.randn(*case.shape[:-2], matrix.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(cells.product(x), (matrix @ x[..., None])[..., 0], rtol=0, atol=1e-11)
    torch.testing.assert_close(cells.counts.squeeze(), matrix.diagonal(dim1=-2, dim2=-1).squeeze(), rtol=0, atol=0)
    assert torch.equal(cells.n_cells.squeeze(), case.mask.sum((-2, -1)).double().squeeze())


@every_case
def test_blocks_of_the_mask(case: Case) -> None:
    cells = cells_of(case)
    assert torch.equal(cells.to_mask().squeeze(), case.mask.squeeze())
    later, every_other = slice(case.shape[-2] // 2, case.shape[-2]), slice(0, case.shape[-2], 2)
    columns = slice(1, case.shape[-1] - 1)
    for rows in (later, every_other):
        assert torch.equal(cells.inside(rows, columns).squeeze(), case.mask[..., rows, columns].squeeze())
    flat = case.mask.reshape(-1, *case.shape[-2:])
    which = torch.tensor([len(flat) - 1, 0, 0])
    assert torch.equal(cells.inside(later, columns, which), flat[which][:, later, columns])


@quick
@given(st.integers(1, 9), st.integers(0, 5), st.integers(-9, 9), st.integers(0, 9))
def test_a_band_from_numbers_is_the_band_from_its_mask(n_query: int, more: int, low: int, width: int) -> None:
    n_key = n_query + more
    distance = cell_distances(n_query, n_key)
    low = max(low, int(distance.min()))
    high = min(low + width, int(distance.max()))
    if low <= high:
        band = ConvexCells.band(n_query, n_key, low, high, "cpu")
        found = ConvexCells.from_mask((distance >= low) & (distance <= high))
        assert found is not None
        assert (found.low, found.high) == (low, high)
        assert torch.equal(found.counts, band.counts)
        assert torch.equal(found.to_mask(), band.to_mask())
        x = torch.randn(3, band.counts.shape[-1], dtype=torch.float64)
        torch.testing.assert_close(found.product(x), band.product(x), rtol=0, atol=1e-12)


def test_sums_over_short_runs_are_exact_however_large_the_sums_before_them() -> None:
    """A difference of two cumulative sums of 10^8 would leave only 8 digits of it."""
    cells = ConvexCells.band(20_000, 20_000, 0, 1, "cpu")
    x = torch.randn(1, cells.counts.shape[-1], dtype=torch.float64).cumsum(-1).cumsum(-1)
    found = cells.split(cells.product(x)).query[0]
    a, b, c = (part[0] for part in cells.split(x))
    for i in (1, 500, 19_999):
        exact = sum(Fraction(float(v)) for v in (a[0], a[1], b[i], b[i], c[i], c[i - 1]))
        assert abs(Fraction(float(found[i])) - exact) <= abs(exact) * Fraction(2, 10**15)


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_diagonal_sums(rows: int, columns: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(1 - columns, rows - 1))
    high = data.draw(st.integers(low, rows - 1))
    distance = torch.arange(rows)[:, None] - torch.arange(columns)
    x = torch.randn(2, rows, columns, dtype=torch.float64) * ((distance >= low) & (distance <= high))
    before = x.clone()
    expected = torch.stack([x.diagonal(-d, -2, -1).sum(-1) for d in range(low, high + 1)], -1)
    torch.testing.assert_close(diagonal_sums(x, low, high), expected, rtol=0, atol=1e-12)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("n_query", "n_key"), [(5, 5), (3, 7), (7, 3)])
def test_distances_are_of_positions(n_query: int, n_key: int) -> None:
    distance = cell_distances(n_query, n_key)
    mask = random_mask(2, n_query, n_key, density=0.5)
    seen = by_distance(mask, -4, 6)
    for i in range(n_query):
        for j in range(n_key):
            assert distance[i, j] == (i + n_key - n_query) - j  # the last query stands at the last key
    for i in range(n_query):
        for d in range(-4, 7):
            j = i + n_key - n_query - d
            expected = mask[:, i, j] if 0 <= j < n_key else torch.zeros(2, dtype=torch.bool)
            assert torch.equal(seen[:, i, d + 4], expected)
