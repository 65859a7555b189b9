"""Fits that leave the first keys out: those of dense least squares on the cells that remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.dense import Dense, allowed, dense_fitted

from tl_posdisent import additivity, fit_additive

CASES: list[dict[str, Any]] = [
    {"mask": "causal"},
    {"mask": "full"},
    {"mask": "causal", "window": 5},
    {"mask": "full", "window": 4},
]


def scores(n_query: int = 11, n_key: int = 11, batch: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    x = torch.randn(*batch, n_query, n_key, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[..., 0] += 40  # a sink
    return x


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("n_query", [11, 7, 2])
@pytest.mark.parametrize("sinks", [0, 1, 3, 6])
def test_it_is_the_masked_least_squares_fit(options: dict[str, Any], n_query: int, sinks: int) -> None:
    x = scores(n_query)
    cells = allowed(n_query, 11, options["mask"], options.get("window")) & (torch.arange(11) >= sinks)
    if not bool(cells.any()):
        with pytest.raises(ValueError, match="mask must leave"):
            fit_additive(x, sinks=sinks, **options)
        return
    fit = fit_additive(x, sinks=sinks, check=False, **options)
    torch.testing.assert_close(fit.fitted(), dense_fitted(x, cells), rtol=0, atol=1e-8)
    assert torch.equal(fit.mask, cells)
    assert bool((fit.key[..., :sinks] == 0).all())
    assert fit.n_parameters.unique().tolist() == [Dense(cells[None]).rank()]
    other = fit_additive(x, mask=cells, check=False)  # named and boolean masks are made in different ways
    torch.testing.assert_close(fit.r, other.r, rtol=0, atol=1e-10, equal_nan=True)
    torch.testing.assert_close(fit.key, other.key, rtol=0, atol=1e-8)


def test_of_a_boolean_mask_and_of_pooled_texts() -> None:
    x, mask = scores(), torch.rand(11, 11, generator=torch.Generator().manual_seed(2)).lt(0.8).tril()
    cells = mask & (torch.arange(11) >= 2)
    torch.testing.assert_close(fit_additive(x, mask=mask, sinks=2).fitted(), dense_fitted(x, cells), rtol=0, atol=1e-8)
    pooled = fit_additive(x[:, 0], sinks=2, pool=True)
    tril = allowed(11, 11) & (torch.arange(11) >= 2)
    wanted = Dense(tril.expand(2, -1, -1)).fitted(x[:, 0])
    torch.testing.assert_close(pooled.fitted(), wanted, rtol=0, atol=1e-8)


def test_a_sink_hides_an_additive_head() -> None:
    i = torch.arange(12.0)
    x = -0.4 * (i[:, None] - i) + torch.sin(i)
    x[:, 0] = torch.cos(7 * i)  # what the queries think of the first token is not additive
    assert fit_additive(x, sinks=1).r.item() == pytest.approx(1, abs=1e-9)
    assert fit_additive(x).r.item() < 0.999


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "mistral"))
def test_additivity_leaves_the_first_keys_of_every_text_out(kind: str, name: str, shared_model: Any) -> None:
    model, tokens = shared_model(kind, name), zoo.random_tokens(length=12, batch=3)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0  # padded on the left: its first keys are the columns 3 and 4
    table = additivity(model, tokens, attention_mask=mask, sinks=2, progress=False)
    left_out = (torch.arange(12) >= 2).expand(12, 12)
    other = additivity(model, tokens, attention_mask=mask, mask=left_out, progress=False)
    assert table["r"].tolist() == pytest.approx(other["r"].tolist(), abs=1e-9)
    assert (table["r"] - additivity(model, tokens, attention_mask=mask, progress=False)["r"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="sinks must be an integer from 0 to 7, got 8"):
        additivity(model, tokens, attention_mask=mask, sinks=8, progress=False)
