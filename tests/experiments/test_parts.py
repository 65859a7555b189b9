"""Parts of a contribution against loops and the definition of Shapley values, and rates of wrong verdicts."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from support.lanes import slow
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent.experiments.where_what.measurement import HeadsToRun
from tl_posdisent.experiments.where_what.parts import PARTS
from tl_posdisent.experiments.where_what.replacements import (
    CONSTANTS,
    DISTANCE,
    GATE,
    MEAN,
    UNIFORM,
    content_alone,
)
from tl_posdisent.experiments.where_what.rows import COLUMNS, SHARES, from_estimates, from_runs, table_of
from tl_posdisent.experiments.where_what.verdicts import NEGLIGIBLE
from tl_posdisent.utils.statistics import jackknife

HEADS = 400
Numbers = NDArray[np.float64]
CONTENTS = [content_alone(constant) for constant in CONSTANTS]


def factors(generator: torch.Generator, shape: tuple[int, ...], spread: float, *, heavy: bool = False) -> Tensor:
    """Lognormal numbers with mean 1 and this standard deviation of the logarithm; or logarithms by t with four degrees
    of freedom, times this spread, cut at 50 times the middle."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not heavy:
        return (spread * normal - spread**2 / 2).exp()
    squares = torch.randn((4, *shape), generator=generator, dtype=torch.float64).square().mean(0)
    return (spread * normal / squares.sqrt()).exp().clamp(max=50.0)


def numbers(n_texts: int = 5, n_heads: int = 7, seed: int = 3) -> tuple[dict[str, Tensor], Tensor]:
    """Divergences of some heads in texts of unequal lengths, and the numbers of predictions."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {MEAN: 1.0, DISTANCE: 0.6, UNIFORM: 0.8, GATE: 0.7} | dict.fromkeys(CONTENTS, 0.7)
    found = {name: size * factors(generator, (n_texts, n_heads), 0.5) for name, size in sizes.items()}
    return found, torch.tensor([9, 30, 12, 5, 40, 22, 17][:n_texts], dtype=torch.float64)


# --- shares and parts


def plain_shares(divergences: dict[str, Numbers], n: Numbers) -> dict[str, float]:
    """Compute the shares of one head by loops."""
    texts = range(len(n))
    chosen = []
    for text in texts:
        others = [sum(n[t] * divergences[name][t] for t in texts if t != text) for name in CONTENTS]
        chosen.append(divergences[CONTENTS[int(np.argmin(others))]][text])
    contributed = sum(n[t] * divergences[MEAN][t] for t in texts)
    kept = {
        name: 1 - sum(n[t] * divergences[replacement][t] for t in texts) / contributed
        for name, replacement in (("kept_distance", DISTANCE), ("kept_uniform", UNIFORM), ("gate", GATE))
    }
    kept["kept_content"] = 1 - sum(n[t] * chosen[t] for t in texts) / contributed
    return kept | {"contribution": contributed / n.sum()}


def plain_parts(kept: dict[str, float]) -> dict[str, float]:
    """Divide by the definition: what each of the two adds, averaged over the orders in which they are added."""
    uniform = min(max(kept["kept_uniform"], 0), 1)
    worth = {frozenset(): uniform, frozenset(["where", "what"]): 1.0}
    worth[frozenset(["where"])] = max(uniform, kept["kept_distance"])
    worth[frozenset(["what"])] = max(uniform, kept["kept_content"])
    added: dict[str, list[float]] = {"where": [], "what": []}
    for order in permutations(added):
        for n, name in enumerate(order):
            added[name].append(worth[frozenset(order[: n + 1])] - worth[frozenset(order[:n])])
    parts = {f"{name}_part": sum(values) / 2 for name, values in added.items()}
    joint = 1 - worth[frozenset(["where"])] - worth[frozenset(["what"])] + uniform
    difference = parts["where_part"] - parts["what_part"]
    return parts | {"neither_part": uniform, "joint": joint, "difference": difference}


def plain(divergences: dict[str, Tensor], n: Tensor, head: int) -> dict[str, float]:
    kept = plain_shares({name: x[:, head].numpy() for name, x in divergences.items()}, n.numpy())
    return kept | plain_parts(kept)


def test_rows_are_those_of_loops_and_of_the_definition() -> None:
    divergences, n = numbers()
    table = table_of(pd.DataFrame({"head": range(7)}), from_runs(divergences, n), NEGLIGIBLE)
    for head, row in table.iterrows():
        expected = plain(divergences, n, int(str(head)))
        close = rounding(max(map(abs, expected.values())), 4 * len(n), torch.float64)
        assert {name: row[name] for name in COLUMNS} == pytest.approx(expected, abs=close)
        totals = [n.numpy() @ divergences[name][:, int(str(head))].numpy() for name in CONTENTS]
        assert row["content_distance"] == CONSTANTS[int(np.argmin(totals))]
    assert table[[*PARTS]].sum(axis=1).tolist() == pytest.approx([1] * 7)
    assert table[[*PARTS]].min(axis=None) >= 0
    assert table["kept_distance"].lt(0).any()
    assert len(set(table["content_distance"])) > 1


def test_without_a_text_is_as_if_it_had_not_been_there() -> None:
    """But for the constants, which are chosen once, in all others; shares are divided before they are clipped."""
    divergences, n = numbers(7)
    content = 0.6 * torch.linspace(0.8, 1.2, 7, dtype=torch.float64)[:, None] * divergences[MEAN]
    divergences |= {name: (1 + place) * content for place, name in enumerate(CONTENTS)}  # the first is best in all
    values = from_runs(divergences, n).values
    for text in range(7):
        rest = torch.arange(7) != text
        alone = from_runs({name: x[rest] for name, x in divergences.items()}, n[rest]).values
        for name in ("contribution", "kept_distance", "kept_content", "kept_uniform", "gate"):
            torch.testing.assert_close(values[name][1 + text], alone[name][0])
        kept = [x[name][0] for x in (values, alone) for name in ("kept_distance", "kept_content", "kept_uniform")]
        inside = torch.stack(kept).amin(0) > 0  # others are clipped
        assert inside.any()
        for name in (*PARTS, "joint", "difference"):
            torch.testing.assert_close(values[name][1 + text][inside], alone[name][0][inside])


@pytest.mark.parametrize("below", [0.02, 0.3, 2.0])
def test_a_share_below_0_has_the_error_of_its_interval_above_0(below: float) -> None:
    """Half of that interval of two standard errors to either side, which is nothing for a share that is surely none."""
    generator, n = torch.Generator().manual_seed(6), torch.full((12,), 95.0, dtype=torch.float64)
    sizes = {MEAN: 1.0, DISTANCE: 0.5, UNIFORM: 1 + below, GATE: 0.9} | dict.fromkeys(CONTENTS, 0.5)
    found = from_runs({name: x * factors(generator, (12, 50), 0.5) for name, x in sizes.items()}, n)
    value, error = found.estimate("kept_uniform")
    some = value < 0
    assert some.sum() > 10
    expected = (value + 2 * error).clamp(0, 1) / 2
    torch.testing.assert_close(found.estimate("neither_part").error[some], expected[some])
    torch.testing.assert_close(found.estimate("neither_part").error[~some], error[~some])
    assert below < 1 or (expected == 0).any()


def test_parts_of_the_sum_are_those_of_the_heads() -> None:
    divergences, n = numbers()
    found = from_runs(divergences, n)
    rows = [plain(divergences, n, head) for head in range(7)]
    total = sum(row["contribution"] for row in rows)
    for name in PARTS:
        expected = sum(row["contribution"] * row[name] for row in rows) / total
        assert found.part_of_sum(name).value.item() == pytest.approx(expected)
    assert sum(found.part_of_sum(name).value.item() for name in PARTS) == pytest.approx(1)


def test_errors_of_parts_are_their_spread_over_draws_of_texts() -> None:
    """Each head is a draw."""
    table = drawn(0.75, 0.65, 0.5, spread=0.3)
    for name in (*PARTS, "difference", "contribution"):
        assert (table[f"{name}_se"] ** 2).mean() ** 0.5 == pytest.approx(table[name].std(), rel=0.2)


def test_errors_of_parts_of_the_sum_are_their_spread_over_draws_of_texts() -> None:
    generator, n = torch.Generator().manual_seed(5), torch.full((12,), 95.0, dtype=torch.float64)
    sizes = {MEAN: 1.0, DISTANCE: 0.3, UNIFORM: 0.6, GATE: 0.9} | dict.fromkeys(CONTENTS, 0.4)
    size_of_head = torch.tensor([1.0, 0.5, 0.1])
    found = []
    for _ in range(300):
        texts = {name: x * size_of_head * factors(generator, (12, 3), 0.4) for name, x in sizes.items()}
        found.append(from_runs(texts, n))
    for name in PARTS:
        sums = [x.part_of_sum(name) for x in found]
        spread = torch.stack([x.value for x in sums]).std().item()
        error = torch.stack([x.error for x in sums]).square().mean().sqrt().item()
        assert error == pytest.approx(spread, rel=0.2)


# --- estimates corrected by runs


def test_estimates_are_corrected_by_runs_those_near_in_depth_more() -> None:
    """Of twelve layers, two are a band; a band counts a quarter of the one before it."""
    divergences, n = numbers(5, 6)
    pairs = [(0, 0), (0, 1), (1, 2), (4, 0), (4, 1), (11, 0)]
    estimated = {name: x * torch.tensor([0.5, 0.4, 0.5, 0.9, 0.8, 1.0]).double() for name, x in divergences.items()}
    places = [0, 1, 3]
    found = from_estimates(pairs, 12, estimated, {name: x[:, places] for name, x in divergences.items()}, places, n)
    logs = np.log([1 / 0.5, 1 / 0.4, 1 / 0.9])
    means = [(logs[0] + logs[1]) / 2, logs[2]]  # of the bands 0 and 2
    weights = {2: [1, 1 / 16], 4: [1 / 16, 1], 5: [4.0**-5, 4.0**-3]}
    factors = {head: np.exp(np.average(means, weights=of_head)) for head, of_head in weights.items()}
    alone, estimates = from_runs(divergences, n), from_runs(estimated, n)
    for head in range(6):
        true = estimates if head in factors else alone
        expected = true.values["contribution"][:, head] * factors.get(head, 1.0)
        torch.testing.assert_close(found.values["contribution"][:, head], expected)
    for name in COLUMNS[1:]:  # a factor of the contribution changes no share
        torch.testing.assert_close(found.values[name], alone.values[name])
    assert found.run.tolist() == [True, True, False, True, False, False]
    np.testing.assert_allclose(found.ratios.log()[places], logs, rtol=1e-6)
    assert found.ratios[[2, 4, 5]].isnan().all()


def test_errors_of_estimates_are_how_far_others_were_off() -> None:
    """Root mean squares; of contributions, of heads that are each corrected by all others."""
    divergences, n = numbers(5, 6)
    generator = torch.Generator().manual_seed(8)
    pairs = [(layer, head) for layer in range(2) for head in range(3)]
    estimated = {name: x * factors(generator, (1, 6), 0.3) for name, x in divergences.items()}
    places = [0, 1, 3, 4]
    found = from_estimates(pairs, 2, estimated, {name: x[:, places] for name, x in divergences.items()}, places, n)
    of_estimates, of_runs = from_runs(estimated, n), from_runs(divergences, n)

    def averaged(values: dict[int, float], head: int) -> float:
        layers = [np.mean([x for other, x in values.items() if other // 3 == layer]) for layer in range(2)]
        return float(np.average(layers, weights=[1, 0.25] if head < 3 else [0.25, 1]))

    def combined(over_texts: Tensor, off: float) -> float:
        return float((over_texts.item() ** 2 + off**2) ** 0.5)

    for name in COLUMNS[1:]:
        both = [x.values[name][0] for x in (of_estimates, of_runs)]
        if name in SHARES:  # how far estimates of harm are off does not count
            both = [x.clamp(0, 1) for x in both]
        off = (both[0] - both[1]).square()
        error = found.estimate(name).error
        for head in (2, 5):
            expected = averaged({x: off[x].item() for x in places}, head) ** 0.5
            assert error[head].item() == pytest.approx(combined(of_estimates.estimate(name).error[head], expected))
        torch.testing.assert_close(error[places], of_runs.estimate(name).error[places])
    ratios = of_runs.values["contribution"][0] / of_estimates.values["contribution"][0]
    logs = {x: ratios.log()[x].item() for x in places}
    off_by = {x: (logs[x] - averaged({y: z for y, z in logs.items() if y != x}, x)) ** 2 for x in places}
    value, error = found.estimate("contribution")
    over_texts = jackknife(found.values["contribution"], n).error
    for head in (2, 5):
        expected = averaged(off_by, head) ** 0.5 * value[head].item()
        assert error[head].item() == pytest.approx(combined(over_texts[head], expected))


def test_nothing_is_corrected_by_nothing() -> None:
    divergences, n = numbers(5, 3)
    runs = {name: x[:, []] for name, x in divergences.items()}
    found = from_estimates([(0, 0), (0, 1), (1, 0)], 2, divergences, runs, [], n)
    alone = from_runs(divergences, n)
    for name in COLUMNS:
        torch.testing.assert_close(found.estimate(name), alone.estimate(name))
    assert not found.run.any()


def test_heads_that_are_run() -> None:
    """As many as have half of the sum, and one in each band; never more than asked for."""
    sizes, band = torch.tensor([1.0, 6.0, 5.0, 0.5, 3.0, 0.1, 0.2]).double(), torch.tensor([0, 0, 0, 1, 2, 3, 3])
    assert HeadsToRun(7, half=True).choose(sizes, band) == [1, 2, 3, 4, 6]
    assert HeadsToRun(5, half=True).choose(sizes, band) == [1, 3, 4, 6]
    assert HeadsToRun(2).choose(sizes, band) == [1, 2]
    assert HeadsToRun(0).choose(sizes, band) == []
    assert HeadsToRun(7).choose(sizes, band) == [*range(7)]
    assert HeadsToRun(2, [3, 0]).choose(sizes, band) == [3, 0]


# --- verdicts


def drawn(
    distance: float,
    content: float,
    uniform: float,
    n_texts: int = 12,
    spread: float = 0.4,
    *,
    heavy: bool = False,
    size: float = 0.01,
    unequal: bool = False,
) -> pd.DataFrame:
    """Return rows of heads whose divergences have expectations with these shares, the three constants the same.

    A text's factor is common to all of its divergences. Those of two constants have correlated factors of their own, as
    in language models.
    """
    generator = torch.Generator().manual_seed(0)

    def own(width: float) -> Tensor:
        return factors(generator, (n_texts, HEADS), width, heavy=heavy)

    text, half = size * own(0.6), spread * 0.5**0.5
    common = text * own(half)
    divergences = {MEAN: text * own(spread), GATE: text * own(spread)}
    divergences |= {DISTANCE: (1 - distance) * text * own(spread), UNIFORM: (1 - uniform) * text * own(spread)}
    divergences |= {name: (1 - content) * common * own(half) for name in CONTENTS}
    n = torch.linspace(20, 180, n_texts).round() if unequal else torch.full((n_texts,), 95.0)
    return table_of(pd.DataFrame({"head": range(HEADS)}), from_runs(divergences, n.double()), NEGLIGIBLE)


def rate(table: pd.DataFrame, *verdicts: str) -> float:
    return float(table["verdict"].isin(verdicts).mean())


def most(expected: float) -> float:
    """The rate that HEADS heads with this probability exceed once in ten thousand times."""
    return float(stats.binom.ppf(0.9999, HEADS, expected)) / HEADS


TAILS: list[dict[str, Any]] = [{"spread": 0.15}, {"spread": 0.4}, {"spread": 1.0}, {"spread": 0.6, "heavy": True}]


@pytest.mark.parametrize(("n_texts", "unequal"), [(8, True), *slow([(4, False), (16, True), (48, True)])])
@pytest.mark.parametrize("tails", [TAILS[3], *slow(TAILS[:3])], ids=str)
def test_rates_of_wrong_verdicts(n_texts: int, tails: dict[str, Any], unequal: bool) -> None:
    """At the boundary of each verdict: at most .05 for either sign of the difference, .08 for others, and .12 for a
    contribution that is negligible in half of the draws."""
    options: dict[str, Any] = {"n_texts": n_texts, "unequal": unequal} | tails
    equal = drawn(0.5, 0.5, 0.1, **options)
    assert rate(equal, "where") <= most(0.05)
    assert rate(equal, "what") <= most(0.05)
    assert rate(drawn(0.6, 0.4, 0.1, **options), "mixed") <= most(0.08)
    assert rate(drawn(0.4, 0.6, 0.1, **options), "mixed") <= most(0.08)
    assert rate(drawn(0.55, 0.9, 0.5, **options), "neither") <= most(0.08)
    if not options.get("heavy"):  # whose expectation is not 1
        assert rate(drawn(0.5, 0.0, 0.0, **options, size=NEGLIGIBLE), "not used") <= most(0.12)


@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        ((0.95, 0.05, 0.03), "where"),
        ((0.05, 0.95, 0.03), "what"),
        ((0.05, 0.02, 0.0), "mixed"),  # both are needed together
        ((0.9, 0.9, 0.1), "mixed"),  # either serves
        ((0.95, 0.95, 0.9), "neither"),
    ],
)
def test_corners_have_their_verdicts(kept: tuple[float, float, float], verdict: str) -> None:
    table = drawn(*kept, spread=0.1)
    assert rate(table, verdict) > 0.9
    assert rate(table, verdict, "undecided") > 1 - most(0.005)


def test_what_is_open() -> None:
    """Near a half under uniform attention, or a difference whose error is too large."""
    near_half = drawn(0.6, 0.95, 0.52, n_texts=48, spread=0.2)
    undecided = near_half[near_half["verdict"] == "undecided"]
    assert len(undecided) > HEADS / 5
    assert (undecided["open"] == "neither or what").mean() > 0.5
    wide = drawn(0.55, 0.4, 0.1, n_texts=4, spread=0.6)
    undecided = wide[wide["verdict"] == "undecided"]
    assert (undecided["open"] == "more texts").mean() > 0.9
    assert rate(wide, "undecided") > 0.5
    assert (wide.loc[wide["verdict"] != "undecided", "open"] == "").all()
    assert rate(drawn(0.55, 0.15, 0.1, n_texts=16, spread=0.2), "undecided") < 0.1


def test_a_run_may_decide_what_only_the_estimate_leaves_open() -> None:
    """Estimates are far off in some heads, so none is sure; with the errors over texts alone, most would be."""
    clear, n = (
        {MEAN: 1.0, DISTANCE: 0.2, UNIFORM: 0.95, GATE: 0.9} | dict.fromkeys(CONTENTS, 0.9),
        torch.full((9,), 95.0),
    )
    generator = torch.Generator().manual_seed(4)
    estimated = {name: x * factors(generator, (9, 6), 0.1) for name, x in clear.items()}
    run = {name: x[:, :2].clone() for name, x in estimated.items()}
    run[DISTANCE] *= 4
    pairs = [(0, head) for head in range(6)]
    found = from_estimates(pairs, 1, estimated, run, [0, 1], n.double())
    table = table_of(pd.DataFrame(pairs), found, NEGLIGIBLE)
    assert table["verdict"][2:].tolist() == ["undecided"] * 4
    assert table["open"][2:].tolist() == ["a run"] * 4
    alone = table_of(pd.DataFrame(pairs), from_runs(estimated, n.double()), NEGLIGIBLE)
    assert alone["verdict"][2:].tolist() == ["where"] * 4


def test_many_heads_without_a_difference_have_few_discoveries() -> None:
    """The false discovery rate of the difference over the rows: some row of a table is found in few tables."""
    found = drawn(0.5, 0.5, 0.1, spread=0.4)["q"].to_numpy()
    assert found.min() > 0.05
    signal = drawn(0.8, 0.2, 0.1, spread=0.3)["q"]
    assert signal.lt(0.05).mean() > 0.9


def test_a_head_that_contributes_nothing_is_not_used() -> None:
    divergences, n = numbers()
    divergences[MEAN][:, 0] = 0.0
    divergences[MEAN][:, 1] *= 1e-6
    for x in divergences.values():
        x[:, 2] = 0.0
    found = from_runs(divergences, n)
    table = table_of(pd.DataFrame({"head": range(7)}), found, NEGLIGIBLE)
    assert table["verdict"][:3].tolist() == ["not used"] * 3
    assert "not used" not in table["verdict"][3:].tolist()
    rest = from_runs({name: x[:, 3:] for name, x in divergences.items()}, n)
    for name in PARTS:
        assert found.part_of_sum(name).value.item() == pytest.approx(rest.part_of_sum(name).value.item(), abs=1e-5)


def test_divergences_without_spread_decide() -> None:
    ones, n = torch.ones(4, 2, dtype=torch.float64), torch.full((4,), 9.0, dtype=torch.float64)
    divergences = {MEAN: ones, DISTANCE: 0.1 * ones, UNIFORM: 0.9 * ones, GATE: ones} | dict.fromkeys(
        CONTENTS, 0.9 * ones
    )
    table = table_of(pd.DataFrame({"head": [0, 1]}), from_runs(divergences, n), NEGLIGIBLE)
    assert table["verdict"].tolist() == ["where", "where"]
    assert table["where_part"].tolist() == pytest.approx([0.85, 0.85])
