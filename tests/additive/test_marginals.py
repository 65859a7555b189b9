"""Marginal sums are the sums over the cells, read in one pass, in blocks, or row by row."""

from __future__ import annotations

import pytest
import torch
from support.masks import CASES, Case, distances
from torch import Tensor

from tl_posdisent import fit_additive
from tl_posdisent.additive import marginals as module
from tl_posdisent.additive.cells import Cells, make_cells
from tl_posdisent.additive.marginals import Marginals, read_marginals

KINDS = [name for name in CASES if name not in ("narrow-window",)]


def cells_of(case: Case) -> Cells:
    return make_cells(case.shape, case.options.get("mask", "causal"), case.options.get("window"))


def assert_sums(read: Marginals, scores: Tensor, case: Case, cells: Cells) -> None:
    """About the pivot, by definition."""
    x = torch.where(case.mask, scores.double() - read.pivot[..., None, None], 0.0)
    by_axis = cells.split(read.sums)
    torch.testing.assert_close(by_axis.query, x.sum(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(by_axis.key, x.sum(-2), rtol=0, atol=1e-10)
    for n, d in enumerate(cells.distances.tolist()):
        here = (x * (distances(case) == d)).sum((-2, -1))
        torch.testing.assert_close(by_axis.distance[..., n], here, rtol=0, atol=1e-10)
    torch.testing.assert_close(read.squares, x.square().sum((-2, -1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("blocks", [(64, 2**18), (3, 1), (3, 2**18)], ids=str)
def test_sums_are_those_over_the_cells(blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("_MAX_ROWS", "_MAX_CELLS"), blocks, strict=True):
        monkeypatch.setattr(module, name, value)
    for name in KINDS:
        case = CASES[name]
        scores, cells = 40 + case.scores(), cells_of(case)
        for dtype in (torch.float64, torch.float16):
            assert_sums(read_marginals(scores.to(dtype), cells), scores.to(dtype), case, cells)


@pytest.mark.parametrize("first", [0, 1])
def test_an_offset_costs_no_digits_where_some_rows_have_no_cells(first: int) -> None:
    """Every eighth row empty, and all others: the level that is taken off before squares are summed is found anyhow."""
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[first::8] = False
    scores = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = fit_additive(scores, mask=mask)
    lifted = fit_additive(scores + 1e7, mask=mask)
    torch.testing.assert_close(lifted.r, centred.r, atol=1e-7, rtol=0)
