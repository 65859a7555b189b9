"""r is numpy's correlation of scores and fitted scores, over the cells of the mask alone; NaN of a constant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.dense import Dense
from support.masks import CASES, Case

from tl_posdisent import fit_additive


def saturated(mask: torch.Tensor) -> bool:
    """Whether the fit has as many parameters as there are cells."""
    dense = Dense(mask[None])
    n = int(mask.sum())
    return n <= dense.n_columns and dense.rank() == n


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_r_is_the_correlation_over_the_cells(case: Case) -> None:
    scores = 3 + case.scores(1)
    fit = fit_additive(scores, **case.options, check=False)
    masks = case.mask.expand(case.shape).reshape(-1, *case.shape[-2:])
    pairs = (x.reshape(masks.shape) for x in (scores, fit.fitted()))
    for r, x, y, mask in zip(fit.r.flatten(), *pairs, masks, strict=True):
        if saturated(mask):  # the sum fits whatever there is
            assert r.isnan()
        else:
            assert r.item() == pytest.approx(np.corrcoef(x[mask], y[mask])[0, 1], abs=1e-9)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, x) for x in (0.1, -3.7, 12345.678, 1e-300)]
    + [(x, 0.1) for x in (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_of_a_constant_it_is_undefined(dtype: torch.dtype, value: float) -> None:
    for n in (7, 29):
        constant = torch.full((2, n, n), value, dtype=dtype)
        for mask in ("causal", "full"):
            assert bool(fit_additive(constant, mask=mask).r.isnan().all())
    # But for the last bit of float64, which is what sums round to.
    nearly = constant.double() * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
    fit = fit_additive(nearly)
    assert bool(fit.r.isnan().all())
    assert bool(fit.share_distance.isnan().all())
