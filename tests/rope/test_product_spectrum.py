"""Spectra of products are those of the products, and known spectra have known condition numbers and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_posdisent.rope.product_spectrum import condition_number, effective_rank, product_spectrum


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n_query", "n_key", "d"), [(7, 9, 4), (3, 9, 5), (9, 2, 6)])
def test_spectrum_of_a_product(n_query: int, n_key: int, d: int) -> None:
    q, k = normal(2, n_query, d), normal(2, n_key, d, seed=1)
    got, dense = product_spectrum(q, k), torch.linalg.svdvals(q @ k.mT)
    rank = min(n_query, n_key, d)
    torch.testing.assert_close(got[..., :rank], dense[..., :rank], rtol=1e-12, atol=1e-12)
    assert got.shape[-1] == rank


def test_condition_and_rank_of_known_spectra() -> None:
    spectra = torch.tensor([[2.0, 2, 2], [8, 4, 2], [1, 0, 0]], dtype=torch.float64)
    assert condition_number(spectra).tolist() == [1, 4, math.inf]
    entropy = -sum(p * math.log(p) for p in (8 / 14, 4 / 14, 2 / 14))
    assert effective_rank(spectra).tolist() == pytest.approx([3, math.exp(entropy), 1], abs=1e-12)
