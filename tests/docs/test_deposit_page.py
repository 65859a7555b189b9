"""The page on the deposit says what its measurements say, and its statistics are what they are called."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from support.pages import ROOT

from tl_posdisent import limit_frequencies

pytestmark = pytest.mark.tl4

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PAGE, README = (
    " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("docs/deposit.md", "README.md")
)


def loaded(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "figures"))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def heads() -> ModuleType:
    return loaded("deposit_96_heads")


@pytest.fixture(scope="module")
def lengths() -> ModuleType:
    return loaded("deposit_and_length")


@pytest.fixture(scope="module")
def small() -> ModuleType:
    return loaded("deposit_small")


@pytest.fixture(scope="module")
def positions() -> ModuleType:
    return loaded("deposit_positions")


def on_page(table: str) -> bool:
    return " ".join(table.split()) in PAGE


def test_the_tables_are_of_the_measurements(
    heads: ModuleType, lengths: ModuleType, small: ModuleType, positions: ModuleType
) -> None:
    assert on_page(heads.markdown(positions.summary(positions.finished())))
    assert on_page(heads.markdown(heads.on_the_page(heads.finished())))
    assert on_page(heads.markdown(heads.by_distances(heads.finished())))
    assert on_page(heads.markdown(small.summary(small.finished())))
    assert on_page(heads.markdown(lengths.by_encoding(lengths.finished())))


def test_correlations_with_accuracy_on_longer_texts(heads: ModuleType, lengths: ModuleType) -> None:
    table = lengths.correlations(lengths.finished())
    assert on_page(heads.markdown(lengths.on_the_page(table)))
    within = table["and same kind"].str.extract(r"\((.*), (.*)\)").astype(float)
    assert ((within[0] < 0) & (within[1] > 0)).all()
    assert f"correlations down to −{-within[0].min():.2f}" in PAGE
    small = (table["permuted within kinds: p"].astype(float) < 0.05).sum()
    assert f"{NUMBERS[small].title()} of {NUMBERS[len(table)]} p are below 0.05" in PAGE


def test_the_model_that_counts_at_the_papers_size(heads: ModuleType) -> None:
    row = heads.counting()
    assert f"accuracy is {row['accuracy']:.2f} where the paper has 0.69" in PAGE
    drops = f"the largest drops are {row['zero_accuracy_drop']:.2f} zeroed and {row['mean_accuracy_drop']:.2f} by mean"
    assert drops in PAGE
    effective = (
        f"{row['zero_accuracy_effective_heads']:.0f} and {row['mean_accuracy_effective_heads']:.0f} effective heads"
    )
    assert effective in PAGE
    same = f"as good ({row['rotation_none']:.2f}, and {row['zero_accuracy_baseline']:.2f} with all of it"
    assert same in PAGE
    assert row["steps"] == 900


def test_models_with_one_necessary_head(heads: ModuleType) -> None:
    """The sentences that count them, in words up to ten, by both ablations and both measures."""
    table: pd.DataFrame = heads.finished()
    table = table[table["rotary_heads"] == heads.HEADS]
    every, eight = len(table), table["task"] == "gap8"
    pairs = itertools.product(("accuracy", "loss"), ("zero", "mean"))
    found = {(measure, mode): heads.one_necessary(table, mode, measure) for measure, mode in pairs}
    counts = {key: (int(one.sum()), int(one[eight].sum()), int(one[~eight].sum())) for key, one in found.items()}
    (zero, few, others), (mean, mean_few, mean_others) = counts["accuracy", "zero"], counts["accuracy", "mean"]
    eights, rest = int(eight.sum()), int((~eight).sum())
    of_eight = f"{NUMBERS[few]} of the {NUMBERS[eights]} that learn eight distances"
    stated = f"Of {every} rotary models with 96 heads, {NUMBERS[zero]} have one head that matters if heads are zeroed"
    assert f"{stated}: {of_eight}, and {NUMBERS[others]} of the other {rest}." in README
    assert f"{NUMBERS[mean].title()} have one if each is replaced by its mean." in README
    assert f"{zero} of {every} models with all heads rotary have one necessary head ({interval(zero, every)})" in PAGE
    assert f"by mean ablation {mean} ({interval(mean, every, '')})" in PAGE
    by_loss = [counts["loss", mode][0] for mode in ("zero", "mean")]
    first, second = (f"{n} ({interval(n, every, '')})" for n in by_loss)
    assert f"By loss it is {first} and {second}" in PAGE
    assert f"{few} of {eights} models ({interval(few, eights, '')})" in PAGE
    assert f"against {others} of {rest} ({interval(others, rest, '')})" in PAGE
    p = [exact(*counts[measure, "zero"][1:], eights, rest) for measure in ("accuracy", "loss")]
    assert f"Fisher's exact p is {p[0]:.2f} by accuracy and {p[1]:.2f} by loss" in PAGE
    loss_few, loss_others = counts["loss", "mean"][1:]
    means = f"({mean_few} of {eights} and {mean_others} of {rest}; by loss {loss_few} and {loss_others})"
    assert f"Mean ablation does not show it {means}" in PAGE
    assert f"{min(mean, zero)} to {max(by_loss)} have such a head" in PAGE
    often = sum(one.astype(int) for one in found.values())
    assert (int((often > 0).sum()), int((often == 4).sum())) == (12, 4)
    assert "Twelve models have one by any of the four, four by all" in PAGE


def interval(count: int, of: int, name: str = "95 % interval ") -> str:
    low, high = stats.binomtest(count, of).proportion_ci()
    return f"{name}{low:.2f} to {high:.2f}"


def exact(few: int, others: int, eights: int, rest: int) -> float:
    return float(stats.fisher_exact([[few, eights - few], [others, rest - others]]).pvalue)


def test_one_necessary_head_by_other_thresholds(heads: ModuleType) -> None:
    table: pd.DataFrame = heads.finished()
    table = table[table["rotary_heads"] == heads.HEADS]
    eight, drops = table["task"] == "gap8", {"accuracy": (0.05, 0.1, 0.2, 0.3), "loss": (0.05, 0.1, 0.2, 0.3, 0.5, 1)}
    counts, chances = {}, []
    for measure, mode in itertools.product(drops, ("zero", "mean")):
        largest, second = (table[f"{mode}_{measure}_{name}"] for name in ("drop", "second"))
        by_threshold = [(largest >= x) & (largest >= n * second) for x in drops[measure] for n in (2, 4, 8)]
        counts[measure, mode] = min(map(sum, by_threshold)), max(map(sum, by_threshold))
        if mode == "zero":
            chances += [exact(sum(x[eight]), sum(x[~eight]), sum(eight), sum(~eight)) for x in by_threshold]
    ranges = {key: f"{low} to {high}" for key, (low, high) in counts.items()}
    assert f"it is {ranges['accuracy', 'zero']} zeroed and {ranges['accuracy', 'mean']} by mean ablation" in PAGE
    assert f"By loss (0.05 to 1 nat) it is {ranges['loss', 'zero']} and {ranges['loss', 'mean']}" in PAGE
    assert f"It is {min(chances):.2f} to {max(chances):.2f} with other thresholds" in PAGE


def test_one_necessary_head_is_one(heads: ModuleType) -> None:
    """Large, and alone."""
    table = pd.DataFrame({"mean_accuracy_drop": [0.2, 0.2, 0.08, 0.0], "mean_accuracy_second": [0.05, 0.06, 0.0, 0.0]})
    assert heads.one_necessary(table, "mean").tolist() == [True, False, False, False]


def test_partial_rank_correlation_by_its_formula(lengths: ModuleType) -> None:
    """With one control, (r_xy - r_xz r_yz) / √((1 - r_xz²)(1 - r_yz²)) of Spearman's correlations; with none, r_xy."""
    x, y, z = np.random.default_rng(0).normal(size=(3, 40))
    y = y + x + z
    (xy, _), (xz, _), (yz, _) = stats.spearmanr(x, y), stats.spearmanr(x, z), stats.spearmanr(y, z)
    assert lengths.partial_rank(x, y, np.empty((40, 0))) == pytest.approx(xy)
    expected = (xy - xz * yz) / ((1 - xz**2) * (1 - yz**2)) ** 0.5
    assert lengths.partial_rank(x, y, stats.rankdata(z)[:, None]) == pytest.approx(expected)


@pytest.mark.parametrize("caused", [True, False])
def test_a_common_cause_is_controlled_for(lengths: ModuleType, caused: bool) -> None:
    """Concentration lowers accuracy on longer texts, or both come from the kind of model: only the first is found."""
    chosen = np.random.default_rng(1)
    kind = np.repeat([1, 2, 3, 4], 15)
    share = kind + chosen.normal(size=60)
    table = pd.DataFrame({"encoding": "rope", "rotary_heads": kind, "accuracy_1": 1.0, "loss_1": chosen.random(60)})
    table["zero_accuracy_share"] = share
    table["accuracy_2"] = -(share if caused else 3 * kind) + chosen.normal(size=60)
    every, _, high = lengths.interval(table, "zero_accuracy_share", "accuracy_2", "all models", 200)
    assert every < high < 0
    within, _, high = lengths.interval(table, "zero_accuracy_share", "accuracy_2", "and same kind", 200)
    assert (within < high < 0) == caused


def test_longer_texts_ask_for_the_same_distances(lengths: ModuleType) -> None:
    for more in lengths.MORE.values():
        tokens, labels = lengths.longer(more).batch(500, seed=1)
        places = [(row == 1).nonzero()[:, 0].tolist() for row in tokens]
        assert [second - first - 2 for first, second in places] == labels.tolist()
        assert int(labels.max()) == lengths.TASK.max_gap - 1
        sides = [first for first, _ in places]
        assert (min(sides), max(sides)) == (1 + more, 4 + more)


def test_the_page_states_the_guesses(small: ModuleType) -> None:
    guesses = small.guesses()
    words = {task: f"{guess['chance']:.2f} and {guess['rule']:.2f}" for task, guess in guesses.items()}
    for task, numbers in words.items():
        assert f"{numbers} ({task}: " in PAGE


def test_guesses_without_a_model(small: ModuleType) -> None:
    """The most frequent token of a text, by counting; the area under brackets, by the best threshold."""
    tokens, labels = small.SMALL.tasks["reversal"].batch(200, seed=1)
    right = []
    for text, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        counts = {token: text.count(token) for token in text if token > 1}
        best = [token for token, n in counts.items() if n == max(counts.values())]
        right.append((label + 2 in best) / len(best))
    assert small.most_frequent(tokens, labels) == pytest.approx(np.mean(right))
    tokens, labels = small.SMALL.tasks["balanced"].batch(200, seed=1)
    areas = [sum(text[:n].count(1) - text[:n].count(2) for n in range(len(text))) for text in tokens.tolist()]
    best = max(
        np.mean([(area >= bound) == bool(label) for area, label in zip(areas, labels.tolist(), strict=True)])
        for bound in {*areas, max(areas) + 1}
    )
    assert small.area(tokens, labels) == pytest.approx(best)


@pytest.mark.parametrize("name", ["deposit_and_length", "deposit_positions", "deposit_small"])
def test_a_model_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The studies run: one short training gives a row with the table's columns."""
    study = loaded(name)
    preset = "STUDY" if name == "deposit_and_length" else "SMALL"
    brief = getattr(study, preset)
    monkeypatch.setattr(study, preset, replace(brief, training=replace(brief.training, n_train=256, n_test=100)))
    row = study.row_of(study.models()[0], tmp_path)
    assert list(row) == list(study.finished().columns)


def test_a_drop_is_that_of_one_head_without_rotation(positions: ModuleType) -> None:
    """Labels are what the model itself answers."""
    model = positions.SMALL.model("rope", "distance", 0)
    tokens, _ = positions.SMALL.tasks["distance"].batch(20, seed=1)
    with torch.no_grad():
        before = model(tokens).argmax(-1)
    hooks = limit_frequencies(model, high=0, mode="freeze", heads=[(1, 2)])
    with torch.no_grad():
        after = model.run_with_hooks(tokens, fwd_hooks=hooks).argmax(-1)
    table = positions.drops(
        model, tokens, before, lambda heads: limit_frequencies(model, high=0, mode="freeze", heads=heads)
    )
    assert len(table) == 12
    row = table[(table["layer"] == 1) & (table["head"] == 2)].iloc[0]
    assert row["baseline"] == 1
    assert row["effect"] == pytest.approx(float((after == before).double().mean()) - 1)


def test_permutations_stay_within_kinds(lengths: ModuleType) -> None:
    """A relation within kinds is found; one between kinds alone is as in permuted tables."""
    chosen = np.random.default_rng(2)
    kind = np.tile([1, 2, 3, 4], 10)
    table = pd.DataFrame({"encoding": "rope", "rotary_heads": kind, "accuracy_1": 1.0, "loss_1": chosen.random(40)})
    table["x"] = kind + chosen.normal(size=40)
    table["within"], table["between"] = -table["x"] + 0.5 * chosen.normal(size=40), kind + chosen.normal(size=40)
    assert lengths.permuted(table, "x", "within") < 0.01
    assert lengths.permuted(table, "x", "between") > 0.05
