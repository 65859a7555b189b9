"""Laws of additive fits, for any shape, mask, dtype and values that hypothesis comes upon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import Drawn, drawn_heads, drawn_scores, examples, normal
from torch import Tensor

from tl_posdisent import AdditiveFit, fit_additive, fit_additive_qk

FIELDS = ("intercept", "distance", "query", "key", "r", "r2", "r2_adjusted", "share_distance", "n_cells")


def distances(n_query: int, n_key: int) -> Tensor:
    return torch.arange(n_query)[:, None] + (n_key - n_query) - torch.arange(n_key)


def least_squares(scores: Tensor, cells: Tensor) -> tuple[Tensor, int]:
    """By NumPy, of matrices ``[text, query, key]`` that share their distances: fitted scores, rank of the design."""
    n_text, n_query, n_key = scores.shape
    text, i, j = cells.nonzero(as_tuple=True)
    design = torch.zeros(len(i), (n_query + n_key) * (n_text + 1), dtype=torch.float64)
    row = torch.arange(len(i))
    own = (n_query + n_key) * (text + 1)
    for column in (distances(n_query, n_key)[i, j] + n_query - 1, own + i, own + n_query + j):
        design[row, column] = 1
    y = scores[cells].double()
    x, _, rank, _ = np.linalg.lstsq(design.numpy(), (y - y.mean()).numpy(), rcond=None)
    fitted = torch.zeros(scores.shape, dtype=torch.float64)
    fitted[cells] = y.mean() + design @ torch.from_numpy(x)
    return fitted, int(rank)


def size(scores: Tensor, cells: Tensor) -> float:
    """What rounding is measured by."""
    return max(float(scores[cells].double().abs().max()), 1e-300)


def assert_near(a: Tensor, b: Tensor, scale: float, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=rtol * scale, equal_nan=True)


def assert_same(a: AdditiveFit, b: AdditiveFit, names: tuple[str, ...] = FIELDS) -> None:
    for name in names:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True, msg=name)


@examples(80)
@given(drawn_scores())
def test_it_is_numpys_least_squares(drawn: Drawn) -> None:
    n_query, n_key = drawn.scores.shape[-2:]
    fit = fit_additive(drawn.scores, **drawn.options, check=False)
    one = torch.broadcast_to(fit.n_parameters, fit.r2.shape).flatten()
    rows = zip(
        drawn.scores.reshape(-1, n_query, n_key),
        drawn.cells.reshape(-1, n_query, n_key),
        fit.fitted().reshape(-1, n_query, n_key),
        fit.r2.flatten(),
        one,
        strict=True,
    )
    for scores, cells, fitted, r2, n_parameters in rows:
        expected, rank = least_squares(scores[None], cells[None])
        assert_near(fitted[cells], expected[0][cells], size(scores, cells))
        assert int(n_parameters) == rank
        y = scores[cells]
        total = float((y - y.mean()).square().sum())
        if rank == int(cells.sum()):
            assert bool(r2.isnan())  # it fits anything
        elif total > 1e-20 * size(scores, cells) ** 2:
            left = float((y - expected[0][cells]).square().sum())
            assert math.isclose(float(r2), 1 - left / total, abs_tol=1e-6)


@examples(60)
@given(drawn_scores(), st.integers(0, 2**31))
def test_what_is_additive_goes_into_the_fit_and_nowhere_else(drawn: Drawn, seed: int) -> None:
    """Also along the gauge: constants, and a straight line that moves from the distance to queries and keys."""
    n_query, n_key = drawn.scores.shape[-2:]
    scale = size(drawn.scores, drawn.cells)
    a, b, c = (scale * normal(seed + n, size) for n, size in enumerate((n_query + n_key, n_query, n_key)))
    more = a[distances(n_query, n_key) + n_query - 1 - (n_key - n_query)] + b[:, None] + c
    before = fit_additive(drawn.scores, **drawn.options, check=False)
    after = fit_additive(drawn.scores + more, **drawn.options, check=False)
    cells = drawn.cells
    assert_near((after.fitted() - before.fitted())[cells], more.expand(cells.shape)[cells], 10 * scale)
    assert_near(after.residual(drawn.scores + more), before.residual(drawn.scores), 10 * scale)


@examples(30)
@given(drawn_scores(("plain", "few", "constant")))
def test_r2_is_a_share(drawn: Drawn) -> None:
    fit = fit_additive(drawn.scores, **drawn.options, check=False)
    assert bool(((fit.r2 >= 0) & (fit.r2 <= 1) | fit.r2.isnan()).all())


@st.composite
def bands(draw: Any) -> dict[str, Any]:
    return {"mask": draw(st.sampled_from(["causal", "full"])), "window": draw(st.none() | st.integers(1, 12))}


@examples(40)
@given(drawn_heads(), bands(), st.integers(0, 3), st.booleans(), st.floats(0.01, 3.0))
def test_linear_time_is_the_same_fit(heads: Any, options: dict[str, Any], left: int, pool: bool, scale: float) -> None:
    """Queries of the last positions only, grouped heads, means far from 0."""
    q, k = heads.q[:, min(left, heads.q.shape[1] - 1) :], heads.k
    scores = scale * torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
    dense = fit_additive(scores, pool=pool, **options, check=False)
    linear = fit_additive_qk(q, k, scale=scale, pool=pool, **options)
    biggest = float(scores.abs().max())
    assert_near(linear.fitted(), dense.fitted(), biggest, 1e-8)
    spread = (scores - scores.mean((-2, -1), keepdim=True)).abs().amax((-2, -1))
    varies = (spread.amin(0) if pool else spread) > 1e-3 * biggest
    # Squares cancel in float64: where means are far from 0, r² keeps fewer digits.
    assert_near(linear.r2[varies], dense.r2[varies], 1.0, 1e-5)
