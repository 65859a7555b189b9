"""Shares of a head's contribution against plain numpy, their errors against the jackknife, rates of wrong verdicts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from support.tolerance import rounding
from tl_posdisent.experiments.where_what.shares import shares, verdicts
from torch import Tensor

CONSTANTS = (1, 5, 32)
HEADS = 800
LENGTHS = {"equal": lambda n: torch.full((n,), 95.0), "unequal": lambda n: torch.linspace(20, 180, n).round()}


def factors(generator: torch.Generator, shape: tuple[int, ...], spread: float) -> Tensor:
    """Lognormal numbers with mean 1 and this standard deviation of the logarithm."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (spread * normal - spread**2 / 2).exp()


def drawn(
    where: float,
    what: float,
    n_texts: int,
    lengths: str = "equal",
    spread: float = 0.3,
    seed: int = 0,
    uniform: float = 0.98,
) -> pd.DataFrame:
    """Return shares of heads whose divergences have expectations with these shares, the three constants the same.

    A text's factor is common to all of its divergences. Those of two constants have correlated factors of their own, as
    in language models.
    """
    generator, lengths_of = torch.Generator().manual_seed(seed), LENGTHS[lengths](n_texts).double()
    text = 0.01 * factors(generator, (n_texts, HEADS), 0.6)
    contribution, distance, even = (text * factors(generator, (n_texts, HEADS), spread) for _ in range(3))
    common = text * factors(generator, (n_texts, HEADS), spread * 0.5**0.5)
    content = common * factors(generator, (len(CONSTANTS), n_texts, HEADS), spread * 0.5**0.5)
    distance, even, content = (1 - where) * distance, (1 - uniform) * even, (1 - what) * content
    table = shares(contribution, distance, even, content, lengths_of, CONSTANTS)
    return table.assign(verdict=verdicts(table, lengths_of, 0.0005))


def rate(table: pd.DataFrame, verdict: str) -> float:
    return float((table["verdict"] == verdict).mean())


def most(expected: float) -> float:
    """The rate that HEADS heads with this probability exceed once in ten thousand times."""
    return float(stats.binom.ppf(0.9999, HEADS, expected)) / HEADS


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("n_texts", [4, 8, 16])
@pytest.mark.parametrize("spread", [0.15, 0.4, 1.0])
def test_a_share_of_a_half_is_seldom_decided(n_texts: int, lengths: str, spread: float) -> None:
    """In 7 % of the heads to either side; for the best of three equal constants in 10 %."""
    where = drawn(0.5, 0.98, n_texts, lengths, spread)
    assert rate(where, "neither") <= most(0.07)
    assert rate(where, "what") <= most(0.07)
    what = drawn(0.98, 0.5, n_texts, lengths, spread, seed=1)
    assert rate(what, "neither") <= most(0.10)
    assert rate(what, "where") <= most(0.10)
    assert rate(where, "undecided") > 0.8


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("where", "what", "verdict"),
    [(0.95, 0.95, "neither"), (0.95, 0.0, "where"), (0.05, 0.95, "what"), (0.05, 0.0, "both")],
)
def test_corners_have_their_verdicts(where: float, what: float, verdict: str, lengths: str) -> None:
    """Most of them; the others stay undecided, since eight texts with this spread say little about large losses."""
    table = drawn(where, what, 8, lengths)
    assert rate(table, verdict) > 0.7
    assert rate(table, verdict) + rate(table, "undecided") > 1 - 0.001


def test_uniform_attention_tells_either_from_neither() -> None:
    for uniform, verdict in ((0.95, "neither"), (0.0, "either")):
        table = drawn(0.95, 0.95, 8, uniform=uniform)
        assert rate(table, verdict) > 0.7
        assert rate(table, verdict) + rate(table, "undecided") > 1 - 0.001
    assert rate(drawn(0.98, 0.98, 8, uniform=0.5), "undecided") > 0.8


def test_the_best_of_equal_constants_does_not_look_better_than_it_is() -> None:
    """The mean over heads of ``1 - what``: chosen in the same text, the smallest of three would be 5 to 8 % too low."""
    table = drawn(0.5, 0.5, 12)
    left = 1 - table["what_unclipped"]
    assert left.mean() >= 0.5 - 4 * left.sem()
    assert left.mean() <= 0.5 * 1.05  # a ratio of means of twelve texts is too large by about spread² / 12


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divergences of seven heads in five texts of unequal lengths."""
    generator = torch.Generator().manual_seed(3)
    content = factors(generator, (3, 5, 7), 0.5)
    contribution, distance, even = factors(generator, (3, 5, 7), 0.5)
    return contribution, distance, even, content, torch.tensor([9, 30, 12, 5, 40], dtype=torch.float64)


def plain_shares(
    contribution: NDArray[np.float64],
    distance: NDArray[np.float64],
    content: NDArray[np.float64],
    n: NDArray[np.float64],
) -> tuple[float, float, int]:
    """Compute the shares of one head by loops: where, what and the place of the best constant."""
    texts = range(len(n))
    contributed = sum(n[t] * contribution[t] for t in texts)
    chosen = []
    for text in texts:
        others = [sum(n[t] * row[t] for t in texts if t != text) for row in content]
        chosen.append(content[int(np.argmin(others))][text])
    where = 1 - sum(n[t] * distance[t] for t in texts) / contributed
    what = 1 - sum(n[t] * chosen[t] for t in texts) / contributed
    return where, what, int(np.argmin([sum(n[t] * row[t] for t in texts) for row in content]))


def test_shares_are_those_of_loops() -> None:
    contribution, distance, even, content, n = numbers()
    table = shares(contribution, distance, even, content, n, CONSTANTS)
    for head, row in table.iterrows():
        of_head = [x[..., head].numpy() for x in (contribution, distance, content)]
        where, what, best = plain_shares(*of_head, n.numpy())
        close = rounding(max(abs(where), abs(what), 1.0), len(n), torch.float64)
        assert [row["where_unclipped"], row["what_unclipped"]] == pytest.approx([where, what], abs=close)
        assert [row["where"], row["what"]] == pytest.approx(np.clip([where, what], 0, 1), abs=close)
        assert row["content_distance"] == CONSTANTS[best]
        uniform = 1 - sum(n * even[:, head]) / sum(n * contribution[:, head])
        assert row["uniform_unclipped"] == pytest.approx(float(uniform), abs=close)
        assert row["contribution"] == pytest.approx(np.average(of_head[0], weights=n.numpy()), abs=close)
    assert table["where_unclipped"].lt(0).any()
    assert len(set(table["content_distance"])) > 1


def test_the_error_is_that_of_the_jackknife() -> None:
    """For many texts of equal length, up to terms of the order of 1 / texts."""
    generator, n_texts = torch.Generator().manual_seed(5), 60
    contribution, distance = factors(generator, (2, n_texts, 7), 0.2)
    content = torch.stack([distance, distance + 9, distance + 9])  # one constant is best in every text
    n = torch.full((n_texts,), 95.0, dtype=torch.float64)
    table = shares(contribution, distance, distance, content, n, CONSTANTS)
    without = 1 - (distance.sum(0) - distance) / (contribution.sum(0) - contribution)
    jackknife = ((n_texts - 1) / n_texts * (without - without.mean(0)).square().sum(0)).sqrt()
    for name in ("where", "what"):
        assert (table[f"{name}_se"].to_numpy() / jackknife.numpy()).tolist() == pytest.approx([1] * 7, abs=3 / n_texts)


def test_a_head_that_contributes_nothing_is_not_used() -> None:
    contribution, distance, even, content, n = numbers()
    contribution[:, 0] = 0.0
    contribution[:, 1] *= 1e-6
    contribution[:, 2] = distance[:, 2] = even[:, 2] = 0.0
    content[..., 2] = 0.0
    table = shares(contribution, distance, even, content, n, CONSTANTS)
    found = verdicts(table, n, 0.0005)
    assert found[:3] == ["not used"] * 3
    assert "not used" not in found[3:]


def test_divergences_without_spread_decide() -> None:
    ones = torch.ones(4, 2, dtype=torch.float64)
    n = torch.full((4,), 9.0, dtype=torch.float64)
    table = shares(ones, 0.1 * ones, 0.9 * ones, torch.stack([0.9 * ones] * 3), n, CONSTANTS)
    assert verdicts(table, n, 0.0005) == ["where", "where"]
    assert table["where"].tolist() == pytest.approx([0.9, 0.9])
