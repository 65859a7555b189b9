"""The solver reaches the solution wherever the cells are, and raises where there is none."""

from __future__ import annotations

import pytest
import torch
from support.masks import CASES, Case
from torch import Tensor

from tl_posdisent.additive.cells import Cells, ConvexCells, make_cells
from tl_posdisent.additive.least_squares import pooled, solve


def marginals_of_noise(n_system: int, length: int, window: int) -> tuple[Cells, Tensor]:
    """Marginals of unit noise on the cells of a causal window, cell by cell, without a square matrix."""
    cells = make_cells((n_system, length, length), "causal", window)
    d = torch.arange(window)[:, None]
    noise = torch.randn(n_system, window, length, dtype=torch.float64) * (torch.arange(length) >= d)
    by_key = torch.zeros(n_system, length, dtype=torch.float64)
    for distance in range(window):
        by_key[:, : length - distance] += noise[:, distance, distance:]
    return cells, torch.cat([noise.sum(-1), noise.sum(-2), by_key], -1)


@pytest.mark.parametrize(
    ("n_system", "length", "window"),
    [(4, 64, 64), (2, 1024, 2), (2, 1024, 64), (1, 4096, 3), (1, 16384, 64), (1, 16384, 4096)],
)
def test_takes_few_steps_whatever_the_length_and_the_window(
    n_system: int, length: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window == 4096:  # too many cells to draw
        cells = make_cells((n_system, length, length), "causal", window)
        marginals = cells.product(torch.randn(n_system, cells.counts.shape[-1], dtype=torch.float64))
    else:
        cells, marginals = marginals_of_noise(n_system, length, window)
    products, product = [0], ConvexCells.product

    def counted(cells: ConvexCells, x: Tensor) -> Tensor:
        products[0] += 1
        return product(cells, x)

    monkeypatch.setattr(ConvexCells, "product", counted)
    solution = solve(cells, marginals)
    assert products[0] <= 50
    error = cells.product(solution) - marginals
    assert float(error.abs().max()) < 1e-10 * float(marginals.abs().max())


@pytest.mark.parametrize(
    ("n_query", "n_key", "low", "high"),
    [(1024, 1024, 3, 4), (1024, 1024, 500, 503), (1024, 1024, -9, -3), (1024, 1024, 0, 0), (400, 1024, 0, 5)],
)
def test_a_band_anywhere(n_query: int, n_key: int, low: int, high: int) -> None:
    cells = ConvexCells.band(n_query, n_key, low, high, "cpu")
    marginals = cells.product(torch.randn(2, cells.counts.shape[-1], dtype=torch.float64))
    torch.testing.assert_close(cells.product(solve(cells, marginals)), marginals, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("case", "pool"),
    [
        pytest.param(case, pool, id=f"{name}-{pool}")
        for name, case in CASES.items()
        for pool in ((False, True) if len(case.shape) >= 3 else (False,))
    ],
)
def test_the_solution_has_the_marginals(case: Case, pool: bool) -> None:
    cells = make_cells(case.shape, case.options.get("mask", "causal"), case.options.get("window"))
    truth = torch.randn(*case.shape[:-2], cells.counts.shape[-1], dtype=torch.float64)
    if pool:
        truth = torch.cat([truth[:1, ..., : cells.n_distance].expand_as(truth[..., : cells.n_distance]),
                           truth[..., cells.n_distance :]], -1)  # fmt: skip
    marginals = pooled(cells, cells.product(truth)) if pool else cells.product(truth)
    solution = solve(cells, marginals, pool=pool)
    product = pooled(cells, cells.product(solution)) if pool else cells.product(solution)
    torch.testing.assert_close(product, marginals, rtol=0, atol=1e-10)


def test_systems_of_very_different_scale_do_not_disturb_each_other() -> None:
    cells, marginals = marginals_of_noise(5, 200, 200)
    scale = torch.tensor([1.0, 1e12, 1e-12, 0.0, 1e-150], dtype=torch.float64)[:, None]
    together = solve(cells, marginals * scale)
    for n in range(5):
        alone = solve(cells, marginals[n] * scale[n])
        residual = cells.product(together[n]) - marginals[n] * scale[n]
        assert float(residual.abs().max()) <= 1e-10 * float(scale[n]) * float(marginals[n].abs().max())
        torch.testing.assert_close(cells.product(together[n]), cells.product(alone), rtol=1e-8, atol=0)
    assert float(together[3].abs().max()) == 0


@pytest.mark.parametrize("window", [1, 2, 40, 400])
def test_impossible_marginals_are_refused(window: int) -> None:
    """Sums over queries and over keys that do not have the same total belong to no scores."""
    cells = make_cells((400, 400), "causal", window)
    with pytest.raises(RuntimeError, match=r"has not converged: relative residual .* needed"):
        solve(cells, torch.randn(1, cells.counts.shape[-1], dtype=torch.float64))
