"""Fits are dense least squares, and those of attention Poisson regression, whatever the mask, pooled or not.

The oracles are tables of ones (`support/dense.py`) and scipy's minimiser.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support import zoo
from support.attention_patterns import divergence, marginals, mixed, pattern_of
from support.dense import Dense, allowed, dense_fitted
from support.masks import CASES, Case, cells_of, distances, documents, padding, random_mask
from support.tolerance import TIMES
from torch import Tensor

from tl_posdisent import additivity, capture, fit_additive, fit_attention
from tl_posdisent.additive.attention.newton import MARGINAL_ERROR
from tl_posdisent.additive.cells import cell_distances

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def close(found: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)


# --- least squares ----------------------------------------------------------------------------------------------


@every_case
def test_scores_and_their_correlation(case: Case) -> None:
    """Fitted scores, the number of parameters, r and r², adjusted and not."""
    scores, fit = case.fitted
    close(fit.fitted(), dense_fitted(scores, case.mask), 1e-8)
    ranks = [Dense(mask[None]).rank() for mask in case.mask.reshape(-1, *case.shape[-2:])]
    assert torch.equal(fit.n_parameters, torch.tensor(ranks).view(case.mask.shape[:-2]).expand(case.shape[:-2]))
    assert torch.equal(fit.n_cells, case.mask.sum((-2, -1)).expand(case.shape[:-2]))
    n, p = fit.n_cells.double(), fit.n_parameters.double()
    close(fit.r2_adjusted, torch.where(n > p, 1 - (1 - fit.r2) * (n - 1) / (n - p), torch.nan), 1e-12)
    pairs = zip(cells_of(scores, case), cells_of(fit.fitted(), case), strict=True)
    for r, r2, left, (x, y) in zip(fit.r.flatten(), fit.r2.flatten(), (n - p).flatten(), pairs, strict=True):
        if left == 0:  # it fits anything
            close(x, y, 1e-9)
            assert r.isnan()
            assert r2.isnan()
        else:
            assert r.item() == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-10)
            assert r2.item() == pytest.approx(r.item() ** 2, abs=1e-12)


@every_case
def test_shares_are_those_of_each_axis_alone(case: Case) -> None:
    scores, fit = case.fitted
    n_query, n_key = case.shape[-2:]
    axes = {
        "distance": distances(case) - distances(case).min(),
        "query": torch.arange(n_query)[:, None].expand(n_query, n_key),
        "key": torch.arange(n_key).expand(n_query, n_key),
    }
    masks = case.mask.expand(case.shape).reshape(-1, n_query, n_key)
    for name, axis in axes.items():
        for share, x, mask in zip(getattr(fit, f"share_{name}").flatten(), cells_of(scores, case), masks, strict=True):
            group = torch.nn.functional.one_hot(axis[mask]).double()
            means = group.T @ x / group.sum(0).clamp_min(1)
            close(share, (group @ means - x.mean()).square().sum() / (x - x.mean()).square().sum(), 1e-10)


@every_case
def test_intercept_and_components_add_up(case: Case) -> None:
    scores, fit = case.fitted
    total = fit.intercept[..., None, None] + sum(fit.component(name) for name in ("distance", "query", "key"))
    inside = case.mask.expand(case.shape)
    close(fit.fitted(), torch.where(inside, total, 0.0), 1e-12)
    close(fit.residual(scores), torch.where(inside, scores - total, 0.0), 1e-12)
    assert torch.equal(fit.mask.expand(case.shape), inside)
    filled = fit.fitted(fill=-torch.inf)
    assert torch.equal(filled.isinf(), ~inside)
    close(filled[inside], total[inside], 1e-12)


N_TEXT, N_HEAD, LENGTH = 3, 2, 11
POOLS = {
    "causal": ({}, allowed(LENGTH, LENGTH)),
    "full": ({"mask": "full"}, allowed(LENGTH, LENGTH, mask="full")),
    "window": ({"window": 2}, allowed(LENGTH, LENGTH, window=2)),
    "documents": ({"mask": documents(4, 1, 6)}, documents(4, 1, 6)),
    "dilated": ({"mask": (d := cell_distances(LENGTH, LENGTH) % 3 == 0)}, d),
    "padding": ({"mask": (m := padding(LENGTH, (0, 4, 2), (5, 0, 1)))}, m),
    "random": ({"mask": (m := random_mask(N_TEXT, 1, LENGTH, LENGTH, density=0.3))}, m),
    "sparse": ({"mask": (m := random_mask(N_TEXT, 1, LENGTH, LENGTH, density=0.05))}, m),
    "per-head": ({"mask": (m := random_mask(N_HEAD, LENGTH, LENGTH, density=0.4))}, m),
    "per-matrix": ({"mask": (m := random_mask(N_TEXT, N_HEAD, LENGTH, LENGTH, density=0.4))}, m),
}
every_pool = pytest.mark.parametrize(("options", "mask"), POOLS.values(), ids=POOLS.keys())


def scores_and_masks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Texts of different levels and slopes, and their masks in full."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(N_TEXT, N_HEAD, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    scores = scores + torch.tensor([5.0, -2.0, 0.0])[:, None, None, None] + 0.3 * cell_distances(LENGTH, LENGTH)
    return scores, mask.expand(scores.shape)


@every_pool
def test_pooled_fit_is_dense_pooled_least_squares(options: dict, mask: Tensor) -> None:
    scores, masks = scores_and_masks(mask)
    fit = fit_additive(scores, pool=True, **options)
    for head in range(N_HEAD):
        dense = Dense(masks[:, head])
        expected = dense.fitted(scores[:, head])
        close(fit.fitted()[:, head], expected, 1e-9)
        x, y = scores[:, head][masks[:, head]], expected[masks[:, head]]
        assert fit.n_cells[head].item() == len(x)
        assert fit.n_parameters[head].item() == dense.rank()
        spare = len(x) - dense.rank()
        r2 = 1 - (x - y).square().sum() / (x - x.mean()).square().sum()
        r2 = r2 if spare else torch.full_like(r2, torch.nan)
        close(fit.r2[head], r2, 1e-10)
        close(fit.r[head], r2.clamp_min(0).sqrt(), 1e-10)
        adjusted = 1 - (1 - r2) * (len(x) - 1) / spare if spare else torch.tensor(torch.nan).double()
        close(fit.r2_adjusted[head], adjusted, 1e-9)


@every_pool
def test_pooled_components_obey_the_gauge(options: dict, mask: Tensor) -> None:
    scores, masks = scores_and_masks(mask)
    fit = fit_additive(scores, pool=True, **options)
    a, b, c = (fit.component(name) for name in ("distance", "query", "key"))
    close(a.sum((0, -2, -1)), torch.zeros(N_HEAD).double(), 1e-9)
    close(b.sum((-2, -1)), torch.zeros(N_TEXT, N_HEAD).double(), 1e-9)
    close(c.sum((-2, -1)), torch.zeros(N_TEXT, N_HEAD).double(), 1e-9)
    # The trend of the key, about each text's own mean position, over all texts together.
    j = torch.arange(LENGTH).double().expand(masks.shape)
    j = j - (j * masks).sum((-2, -1), keepdim=True) / masks.sum((-2, -1), keepdim=True)
    close((c * j * masks).sum((0, -2, -1)), torch.zeros(N_HEAD).double(), 1e-9)
    assert fit.distance.shape == (N_HEAD, len(fit.distances))


NAMED: list[dict[str, Any]] = [
    {"mask": "causal"},
    {"mask": "full"},
    {"mask": "causal", "window": 5},
    {"mask": "full", "window": 4},
]


def with_a_sink(n_query: int = 11, n_key: int = 11, batch: tuple[int, ...] = (2, 3)) -> Tensor:
    x = torch.randn(*batch, n_query, n_key, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[..., 0] += 40  # a sink
    return x


@pytest.mark.parametrize("options", NAMED, ids=str)
@pytest.mark.parametrize("n_query", [11, 7, 2])
@pytest.mark.parametrize("sinks", [0, 1, 3, 6])
def test_without_the_first_keys(options: dict[str, Any], n_query: int, sinks: int) -> None:
    x = with_a_sink(n_query)
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


def test_without_the_first_keys_of_a_boolean_mask_and_of_pooled_texts() -> None:
    x, mask = with_a_sink(), torch.rand(11, 11, generator=torch.Generator().manual_seed(2)).lt(0.8).tril()
    cells = mask & (torch.arange(11) >= 2)
    torch.testing.assert_close(fit_additive(x, mask=mask, sinks=2).fitted(), dense_fitted(x, cells), rtol=0, atol=1e-8)
    pooled = fit_additive(x[:, 0], sinks=2, pool=True)
    tril = allowed(11, 11) & (torch.arange(11) >= 2)
    wanted = Dense(tril.expand(2, -1, -1)).fitted(x[:, 0])
    torch.testing.assert_close(pooled.fitted(), wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2", "gemma4", "deepseek_v3"))
def test_rows_of_additivity(kind: str, name: str, shared_model: Any) -> None:
    """Of a model's scores, in each layer's mask."""
    model, tokens = shared_model(kind, name), zoo.random_tokens()
    table = additivity(model, tokens, progress=False).sort_values(["layer", "batch", "head"])
    for layer in capture(model, tokens):
        mask = layer.spec.mask(tokens.shape[1])
        y = layer.scores.double().flatten(0, 1)[:, mask]
        fitted = dense_fitted(torch.where(mask, layer.scores.double(), 0.0), mask).flatten(0, 1)[:, mask]
        r2 = 1 - (y - fitted).square().sum(-1) / (y - y.mean(-1, keepdim=True)).square().sum(-1)
        rows = table[table["layer"] == layer.layer]
        close(torch.tensor(rows["r2"].to_numpy()), r2, 1e-5)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_fit_without_residual_degrees_of_freedom_has_no_correlation(mask: Any) -> None:
    """Two tokens: three or four cells, and as many parameters. Pooled texts share the distances, and leave some."""
    scores = torch.randn(3, 2, 2, 2, dtype=torch.float64)
    for x in (scores, scores.bfloat16()):
        fit = fit_additive(x, mask=mask)
        assert torch.equal(fit.n_cells, fit.n_parameters)
        for name in ("r", "r2", "r2_adjusted"):
            assert bool(getattr(fit, name).isnan().all())
        torch.testing.assert_close(fit.fitted(), x.double() * fit.mask, rtol=0, atol=1e-9)
        assert "r undefined" in repr(fit)
    pooled = fit_additive(scores, mask=mask, pool=True)
    spare = pooled.n_cells > pooled.n_parameters
    assert torch.equal(pooled.r.isnan(), ~spare)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float64, x) for x in (0.1, -3.7, 12345.678, 1e-300)]
    + [(x, 0.1) for x in (torch.float16, torch.bfloat16, torch.float32)],
    ids=str,
)
def test_constant_scores_have_no_correlation(dtype: torch.dtype, value: float) -> None:
    for n in (7, 29):
        constant = torch.full((2, n, n), value, dtype=dtype)
        for mask in ("causal", "full"):
            fit = fit_additive(constant, mask=mask)
            assert bool(fit.r.isnan().all())
            torch.testing.assert_close(fit.intercept, constant[:, 0, 0].double(), rtol=1e-12, atol=0)
    # But for the last bit of float64, which is what sums round to.
    nearly = constant.double() * (1 + 2**-52 * torch.randint(0, 3, constant.shape))
    fit = fit_additive(nearly)
    assert bool(fit.r.isnan().all())
    assert bool(fit.share_distance.isnan().all())


@pytest.mark.parametrize("level", [1e4, -1e4, 1e6])
def test_a_mean_large_against_the_spread_costs_no_digits(level: float) -> None:
    scores = torch.randn(2, 30, 30, dtype=torch.float64)
    shifted = level + scores
    expected = fit_additive(shifted - level)  # the same numbers, after the rounding of the sum
    fit = fit_additive(shifted)
    torch.testing.assert_close(fit.r, expected.r, rtol=0, atol=1e-9 if level < 1e5 else 1e-8)
    torch.testing.assert_close(fit.distance, expected.distance, rtol=0, atol=1e-8)


# --- attention ---------------------------------------------------------------------------------------------------

CLOSE = TIMES * MARGINAL_ERROR


@pytest.mark.parametrize("name", CASES)
def test_every_distance_and_key_gets_the_attention_of_the_data(name: str) -> None:
    case = CASES[name]
    scores = case.scores()
    fit = fit_attention(scores, **case.options)
    mask = case.mask.expand(scores.shape)
    data = mixed(pattern_of(scores, mask), mask, 1e-3)
    fitted = fit.pattern()
    torch.testing.assert_close(fitted.sum(-1), mask.any(-1).double())
    low, high = int(fit.distances[0]), int(fit.distances[-1])
    for found, expected in zip(marginals(fitted, low, high), marginals(data, low, high), strict=True):
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(fit.kl, divergence(pattern_of(scores, mask), fitted), rtol=0, atol=1e-9)


def convex_optimum(data: Tensor, mask: Tensor) -> Tensor:
    """The same problem for scipy: minimise the divergence over distances and keys, one coefficient each."""
    n_query, n_key = data.shape
    d = cell_distances(n_query, n_key)
    distance = d - d.min()
    key = (int(distance.max()) + 1 + torch.arange(n_key)).expand_as(d)
    x = torch.zeros(int(key.max()) + 1, dtype=torch.float64)

    def objective(values: object) -> tuple[float, object]:
        x = torch.as_tensor(values).requires_grad_()
        logits = (x[distance] + x[key]).masked_fill(~mask, -torch.inf)
        loss = (logits.logsumexp(-1) - (data * logits.masked_fill(~mask, 0.0)).sum(-1))[mask.any(-1)].sum()
        return loss.item(), torch.autograd.grad(loss, x)[0].numpy()

    found = minimize(objective, x.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000})
    x = torch.as_tensor(found.x)
    return pattern_of(x[distance] + x[key], mask)


@pytest.mark.parametrize("name", ["causal-9", "full-17", "window-3", "fewer-queries", "documents", "random-50"])
def test_equals_a_generic_convex_solver(name: str) -> None:
    case = CASES[name]
    scores = 1.5 * case.scores(seed=3)[0]
    data = mixed(pattern_of(scores, case.mask), case.mask, 1e-2)
    fit = fit_attention(scores, pseudo_count=1e-2, **case.options)
    torch.testing.assert_close(fit.pattern(), convex_optimum(data, case.mask), rtol=0, atol=1e-6)
