"""The number of parameters of a fit is the rank of its dense design, wherever the cells are."""

from __future__ import annotations

import pytest
import torch
from support.dense import Dense
from support.masks import CASES, Case


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_parameters_are_the_rank_of_the_design(case: Case) -> None:
    fit = case.fitted[1]
    ranks = [Dense(mask[None]).rank() for mask in case.mask.reshape(-1, *case.shape[-2:])]
    expected = torch.tensor(ranks).reshape(case.mask.shape[:-2]).expand(case.shape[:-2])
    assert torch.equal(fit.n_parameters, expected)
    assert torch.equal(fit.n_cells, case.mask.sum((-2, -1)).expand(case.shape[:-2]))
