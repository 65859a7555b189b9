"""Standard errors: unbiased, with the degrees of freedom that they have, and intervals that hold; many tests."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor

from tl_posdisent.utils.statistics import (
    Blocks,
    degrees_of_freedom,
    difference,
    error_over_draws,
    false_discovery_rates,
    jackknife,
    mean,
    ratio,
    significance,
)

DESIGNS = {
    "equal": [30] * 12,
    "one": [300],
    "two": [300, 30],
    "giant": [400, *[13] * 9],
    "giant of many": [900, *[9] * 25],
    "skewed": [1, 2, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144],
}


@pytest.mark.parametrize("sizes", [[4] * 7, [1, 1], [1, 9], [1, 2, 3, 4, 5], [50, 3, 3, 2]])
def test_error_and_degrees_of_freedom_are_those_of_the_quadratic_form(sizes: list[int]) -> None:
    """The squared error of a mean is ``zᵀ A z`` of independent observations z, whose moments are traces."""
    blocks = Blocks(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
    n, member = sum(sizes), torch.nn.functional.one_hot(blocks.numbers).double()
    residual = member.T @ (torch.eye(n, dtype=torch.float64) - 1 / n)
    form = residual.T @ torch.diag(1 / (1 - torch.tensor(sizes) / n)).double() @ residual / n**2
    z = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimate, error = (x.item() for x in mean(blocks.means(z), blocks.sizes))
    assert estimate == pytest.approx(z.mean().item())
    assert error**2 == pytest.approx((z @ form @ z).item())
    assert form.trace().item() == pytest.approx(1 / n)  # the variance of a mean of n
    df = degrees_of_freedom(blocks.sizes)
    assert df == pytest.approx((form.trace() ** 2 / (form @ form).trace()).item())
    assert df <= len(sizes) - 1 + 1e-9
    if len(set(sizes)) == 1:
        sums = z.reshape(len(sizes), -1).mean(1)
        assert error == pytest.approx((sums.std() / len(sums) ** 0.5).item())
        assert df == pytest.approx(len(sizes) - 1)


@pytest.mark.parametrize("name", DESIGNS)
def test_intervals_hold_as_often_as_they_say(name: str) -> None:
    """Of means and ratios of independent tokens with heavy tails, 95 % intervals contain the truth in 95 % of draws."""
    draws, random, blocks = 1000, np.random.default_rng(0), Blocks.of_texts(DESIGNS[name])
    limit = float(stats.t.ppf(0.975, degrees_of_freedom(blocks.sizes)))
    effect, noise = torch.from_numpy(random.standard_t(4, (2, draws, sum(DESIGNS[name]))))
    x, y = (blocks.means(z.T) for z in (effect, noise))
    (means, errors), (ratios, se) = mean(x, blocks.sizes), ratio(0.9 * (1 + x) + y, 1 + x, blocks.sizes)
    for inside in (abs(means) <= limit * errors, abs(ratios - 0.9) <= limit * se):
        assert abs(inside.double().mean() - 0.95) < 3 * (0.95 * 0.05 / draws) ** 0.5


@pytest.mark.parametrize("lengths", [*DESIGNS.values(), [1], [1, 1], [3], [0, 40, 2], [0, 1]])
def test_texts_are_cut_into_tenths_and_no_more(lengths: list[int]) -> None:
    blocks, owner = Blocks.of_texts(lengths), np.repeat(range(len(lengths)), lengths)
    numbers = blocks.numbers.numpy()
    for number in range(len(blocks.sizes)):
        assert len(set(owner[numbers == number])) == 1
    for text, length in enumerate(lengths):
        sizes = np.bincount(numbers[owner == text], minlength=1)
        sizes = sizes[sizes > 0]
        assert sizes.sum() == length
        assert length == 0 or sizes.max() - sizes.min() <= 1
        assert (len(sizes) <= 1) == (10 * length <= sum(lengths) or length == 1)
    if min(sum(lengths), sum(10 * n <= sum(lengths) for n in lengths)) >= 20:
        assert degrees_of_freedom(blocks.sizes) > 9
    assert np.isnan(degrees_of_freedom(blocks.sizes)) == (len(blocks.sizes) == 1)


@pytest.mark.parametrize("sizes", [[4] * 7, [1, 9], [12, 3, 8, 2]])
def test_means_of_blocks_are_those_of_their_tokens(sizes: list[int]) -> None:
    values = torch.randn(len(sizes), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lengths = torch.tensor(sizes)
    blocks = Blocks(torch.arange(len(sizes)).repeat_interleave(lengths))
    a, b = (x.repeat_interleave(lengths, 0) for x in (values.abs() + 1, values.square() + 1))
    torch.testing.assert_close(blocks.means(a), values.abs() + 1)
    found, change = (x(blocks.means(a), blocks.means(b), blocks.sizes) for x in (ratio, difference))
    torch.testing.assert_close(found.value, a.sum(0) / b.sum(0))
    torch.testing.assert_close(change.value, (a - b).mean(0))
    for row in range(3):  # several estimates are each alone
        alone = ratio(blocks.means(a[:, row]), blocks.means(b[:, row]), blocks.sizes)
        assert [x.item() for x in alone] == pytest.approx([x[row].item() for x in found])


def test_a_single_block_has_no_error() -> None:
    one = torch.ones(1)
    assert np.isnan([degrees_of_freedom(one), mean(one, one).error.item(), ratio(one, one, one).error.item()]).all()


@pytest.mark.parametrize("t", [0.0, 0.5, 2.0, 12.0, 1e6])
def test_significance_where_students_t_has_a_closed_form(t: float) -> None:
    assert significance(0.3 * t, 0.3, 1) == pytest.approx(2 / np.pi * np.arctan(t))
    assert significance(0.3 * t, 0.3, 2) == pytest.approx(t / (2 + t**2) ** 0.5)
    assert significance(0.3 * t, 0.3, 1e9) == pytest.approx(erf(t / 2**0.5), abs=1e-8)


def test_significance_without_an_error() -> None:
    assert significance(1.0, float("nan"), 9) == significance(1.0, 0.1, float("nan")) == significance(1.0, 0.1, 0) == 0
    assert significance(1.0, 0.0, 9) == 1
    assert significance(0.0, 0.0, 9) == 0


def test_errors_over_crossed_draws_are_those_of_drawing_anew() -> None:
    """The mean of texts and seeds, each with an effect of its own: its deviation over many tables."""
    random, means, errors = np.random.default_rng(0), [], []
    batch, seed = np.indices((12, 8)).reshape(2, -1)
    for _ in range(400):
        r = random.normal(0, 1, 12)[batch] + random.normal(0, 2, 8)[seed]
        table = pd.DataFrame({"batch": batch, "seed": seed, "r": r})
        means.append(r.mean())
        errors.append(error_over_draws(table, "r", ["batch", "seed"]))
    assert np.mean(np.square(errors)) == pytest.approx(1 / 12 + 4 / 8, rel=0.1)
    assert np.var(means) == pytest.approx(1 / 12 + 4 / 8, rel=0.2)


def test_a_single_draw_has_no_error_of_its_kind() -> None:
    table = pd.DataFrame({"batch": [0, 0, 0], "seed": [0, 1, 2], "r": [1.0, 2.0, 6.0]})
    assert error_over_draws(table, "r", ["batch", "seed"]) == pytest.approx(stats.sem([1.0, 2.0, 6.0]))
    assert error_over_draws(table[:1], "r", ["batch", "seed"]) == error_over_draws(table, "r", []) == 0


def jackknifed(values: Tensor, weights: Tensor, function: Callable[[Tensor], Tensor]) -> float:
    """Jackknife a function of the weighted mean of blocks ``[block, ...]``."""
    left = torch.cat([torch.ones(1, len(values)), 1 - torch.eye(len(values))]).double() * weights
    means = [(w[:, None] * values).sum(0) / w.sum() for w in left]
    return jackknife(torch.stack([function(x) for x in means]), weights).error.item()


def test_jackknife_is_the_known_error_of_a_mean_and_of_a_ratio() -> None:
    """Of a mean exactly; of a ratio of means nearly that of drawing the observations with replacement."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64).abs() + 1
    for n in (0, 1):
        expected = stats.sem(x[:, n].numpy())
        assert jackknifed(x, torch.ones(30), lambda means, n=n: means[n]) == pytest.approx(expected)
    drawn = np.random.default_rng(0).integers(0, 30, (4000, 30))
    ratios = x[:, 0].numpy()[drawn].mean(1) / x[:, 1].numpy()[drawn].mean(1)
    found = jackknifed(x, torch.ones(30), lambda means: means[0] / means[1])
    assert found == pytest.approx(ratios.std() * (30 / 29) ** 0.5, rel=0.05)


def test_jackknife_of_blocks_of_unequal_size() -> None:
    """Of a mean and a ratio of means, over draws of blocks whose means vary less the larger they are."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor([8.0, 3.0, 5.0, 1.0, 2.0, 6.0, 4.0, 7.0], dtype=torch.float64)
    draws = torch.randn(4000, 8, 2, generator=generator, dtype=torch.float64) / weights.sqrt()[:, None] / 4
    draws = draws + torch.tensor([1.0, 2.0], dtype=torch.float64)
    for function in (lambda means: means[0], lambda means: means[0] / means[1]):
        variances = [jackknifed(x, weights, function) ** 2 for x in draws[:400]]
        over_draws = torch.stack([function((weights[:, None] * x).sum(0) / weights.sum()) for x in draws])
        assert np.mean(variances) == pytest.approx(over_draws.var().item(), rel=0.15)


def test_false_discovery_rates_are_those_of_the_step_up_procedure() -> None:
    """At each level, the hypotheses rejected are those up to the largest p(k) below level · k / n."""
    p = torch.rand(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64) ** 3
    p[[3, 17]] = torch.nan
    rates, known = false_discovery_rates(p), ~p.isnan()
    ordered = p[known].sort().values
    for level in (0.01, 0.05, 0.2):
        below = (ordered <= level * torch.arange(1, 39) / 38).nonzero()
        rejected = p <= ordered[below.max()] if len(below) else torch.zeros(40, dtype=torch.bool)
        assert ((rates <= level) == rejected).all()
    assert rates.isnan().equal(p.isnan())
    assert false_discovery_rates(p[[3]]).isnan().all()
