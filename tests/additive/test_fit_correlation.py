"""The correlation of two score tensors is numpy's, over the cells of the mask alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.masks import CASES, Case

from tl_posdisent import fit_additive
from tl_posdisent.additive import score_correlation
from tl_posdisent.rope import toeplitz_share


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_is_the_correlation_over_the_cells(case: Case) -> None:
    a = 3 + case.scores(1)
    b = a + 2 * case.scores(2)
    found = score_correlation(a, b, **case.options)
    assert found.shape == case.shape[:-2]
    masks = case.mask.expand(case.shape).reshape(-1, *case.shape[-2:])
    for r, x, y, mask in zip(found.flatten(), a.reshape(masks.shape), b.reshape(masks.shape), masks, strict=True):
        if mask.sum() == 1:
            assert r.isnan()
        else:
            assert r.item() == pytest.approx(np.corrcoef(x[mask], y[mask])[0, 1], abs=1e-12)


def test_with_the_fitted_scores_it_is_the_r_of_the_fit() -> None:
    scores = torch.randn(3, 20, 20)
    fit = fit_additive(scores)
    torch.testing.assert_close(score_correlation(scores, fit.fitted()), fit.r, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, x) for x in (0.1, -3.7, 12345.678, 1e-300)]
    + [(x, 0.1) for x in (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_of_a_constant_with_itself_it_is_undefined(dtype: torch.dtype, value: float) -> None:
    for n in (7, 29):
        constant = torch.full((2, n, n), value, dtype=dtype)
        for mask in ("causal", "full"):
            assert bool(score_correlation(constant, constant, mask=mask).isnan().all())
            assert bool(fit_additive(constant, mask=mask).r.isnan().all())
    # But for the last bit of float64, which is what sums round to.
    nearly = constant.double() * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
    assert bool(score_correlation(nearly, nearly).isnan().all())
    assert bool(fit_additive(nearly).r.isnan().all())
    assert bool(toeplitz_share(nearly).isnan().all())


def test_what_varies_a_little_is_correlated() -> None:
    noise = torch.randn(2, 9, 9, dtype=torch.float64)
    small = 1 + 1e-9 * noise
    torch.testing.assert_close(score_correlation(small, noise), torch.ones(2).double(), rtol=0, atol=1e-6)
