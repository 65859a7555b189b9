"""Synthetic tasks: labels as somebody reading the text would give them, distributions as stated, and splits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tl_posdisent.synthetic import Brackets, Reversal, Task, TriggerCount, TriggerDistance

SMALL: dict[str, Task] = {
    "distance": TriggerDistance(d_vocab=6, min_gap=0, max_gap=5, min_side=0, max_side=3, n_ctx=15),
    "distance-one": TriggerDistance(d_vocab=4, min_gap=2, max_gap=3, min_side=1, max_side=1, n_ctx=7),
    "count": TriggerCount(d_vocab=7, n_triggers=3, min_count=0, max_count=5, min_length=5, max_length=9, n_ctx=12),
    "count-full": TriggerCount(d_vocab=4, n_triggers=2, min_count=2, max_count=4, min_length=4, max_length=4, n_ctx=4),
    "reversal": Reversal(d_vocab=5, min_length=5, max_length=8, n_ctx=9),
    "balanced": Brackets(min_pairs=3, max_pairs=6, n_ctx=13),
    "depth": Brackets(min_pairs=1, max_pairs=4, n_ctx=8, question="depth"),
}
PAPER: dict[str, Task] = {
    "distance": TriggerDistance(),
    "count": TriggerCount(),
    "reversal": Reversal(),
    "balanced": Brackets(),
    "depth": Brackets(question="depth"),
}
EVERY = [*SMALL.items(), *((f"default-{name}", task) for name, task in PAPER.items())]
every_task = pytest.mark.parametrize("task", [t for _, t in EVERY], ids=[name for name, _ in EVERY])


def unpadded(row: list[int], task: Task) -> list[int]:
    """The text; padding stands behind it and nowhere else."""
    text = list(itertools.takewhile(lambda t: t != 0, row))
    assert len(row) == task.n_ctx
    assert set(row[len(text) :]) <= {0}
    assert all(1 <= t < task.d_vocab for t in text)
    return text


def read(text: list[int], task: Any) -> int:
    """The label, by reading the text from left to right; everything else about it is checked on the way."""
    if isinstance(task, TriggerDistance):
        assert text.count(1) == 2
        first = text.index(1)
        gap = text[first + 1 :].index(1)
        after = len(text) - first - gap - 2
        assert task.min_side <= first <= task.max_side
        assert task.min_side <= after <= task.max_side
        return gap - task.min_gap
    if isinstance(task, Reversal):
        assert task.min_length <= len(text) <= task.max_length
        assert text.count(1) == 1
        return text[::-1][text.index(1)] - 2
    if isinstance(task, Brackets):
        assert task.min_pairs <= text.count(1) == text.count(2) <= task.max_pairs
        balanced, depth = brackets(text)
        if task.question == "depth":
            assert balanced
            return depth - 1
        assert (text[0], text[-1]) == (1, 2)
        return int(balanced)
    assert isinstance(task, TriggerCount)
    assert task.min_length <= len(text) <= task.max_length
    return sum(1 for t in text if t <= task.n_triggers) - task.min_count


def brackets(text: Iterable[int]) -> tuple[bool, int]:
    """Whether the brackets are balanced, and the greatest number of open ones, by a stack."""
    stack: list[int] = []
    depth = 0
    for bracket in text:
        if bracket == 1:
            stack.append(bracket)
            depth = max(depth, len(stack))
        elif stack:
            stack.pop()
        else:
            return False, depth
    return not stack, depth


@every_task
def test_labels_are_what_a_reader_finds(task: Task) -> None:
    tokens, labels = task.batch(500, seed=3)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.shape == (500, task.n_ctx)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert read(unpadded(row, task), task) == label
        assert 0 <= label < task.n_out


# --- settings of the published experiment ------------------------------------------------------------------------

WHOLE: dict[str, Any] = {"d_vocab": 60, "min_gap": 2, "max_gap": 20, "min_side": 1, "max_side": 9, "n_ctx": 40}


def test_two_triggers_stand_for_first_and_second() -> None:
    task = TriggerDistance(**WHOLE, two_triggers=True)
    tokens, labels = task.batch(500, seed=1)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert row.count(1) == row.count(2) == 1
        assert row.index(2) - row.index(1) - 1 - task.min_gap == label


def test_stray_triggers_occur_as_often_as_other_fillers() -> None:
    """The label is told by no text alone, but by how it was drawn: the same draws without strays have other fillers."""
    task = TriggerDistance(**WHOLE, two_triggers=True, stray_triggers=True)
    tokens, _ = task.batch(4000, seed=1)
    counts = torch.bincount(tokens.flatten(), minlength=60)
    fillers = int((tokens != 0).sum()) - 2 * 4000
    for trigger in (1, 2):
        strays = int(counts[trigger]) - 4000
        assert abs(strays - fillers / 59) < 5 * (fillers / 59) ** 0.5
    assert abs(int(counts[30]) - fillers / 59) < 5 * (fillers / 59) ** 0.5


@pytest.mark.parametrize("repeats", [True, False])
def test_no_filler_twice_in_a_segment(repeats: bool) -> None:
    """Before, between and after the triggers, each alone: across segments they repeat."""
    tokens, labels = TriggerDistance(**WHOLE, repeats=repeats).batch(300, seed=2)
    within = across = 0
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        text = [t for t in row if t != 0]
        first = text.index(1)
        segments = [text[:first], text[first + 1 : first + 3 + label], text[first + 4 + label :]]
        assert text[first + 3 + label] == 1
        within += sum(len(segment) != len(set(segment)) for segment in segments)
        across += bool(set(segments[0]) & set(segments[1]))
    assert (within > 0) == repeats
    assert across > 0
    assert torch.bincount(tokens.flatten(), minlength=60)[2:].min() > 0  # every filler occurs


def test_long_texts_are_cut_behind_the_second_trigger() -> None:
    """The same draws, cut."""
    whole, cut = (TriggerDistance(**WHOLE | {"n_ctx": n}, max_length=m) for n, m in ((40, None), (33, 33)))
    tokens, labels = whole.batch(2000, seed=3)
    shorter, same = cut.batch(2000, seed=3)
    assert torch.equal(labels, same)
    assert shorter.shape == (2000, 33)
    assert ((tokens != 0).sum(1) > 33).any()
    assert torch.equal(shorter, tokens[:, :33])
    assert ((shorter == 1).sum(1) == 2).all()


def test_labels_and_logits_of_ones_own_choice() -> None:
    plain, moved = TriggerDistance(**WHOLE), TriggerDistance(**WHOLE, first_label=3, n_logits=60)
    assert torch.equal(plain.batch(50)[1] + 3, moved.batch(50)[1])
    assert (plain.n_out, moved.n_out, moved.chance) == (19, 60, plain.chance)
    assert TriggerDistance(**WHOLE, first_label=3).n_out == 22
    assert TriggerCount(n_logits=574).n_out == 574


def test_texts_without_a_trigger_do_not_count() -> None:
    shape: Any = {"d_vocab": 7, "n_triggers": 2, "max_count": 3, "min_length": 5, "max_length": 5, "n_ctx": 6}
    plain, ignoring = TriggerCount(**shape), TriggerCount(**shape, ignore_zero=True)
    (tokens, labels), (same, ignored) = plain.batch(400, seed=1), ignoring.batch(400, seed=1)
    assert torch.equal(tokens, same)
    assert torch.equal(ignored, labels.masked_fill(labels == 0, -100))
    assert (plain.chance, ignoring.chance, plain.n_out, ignoring.n_out) == (1 / 4, 1 / 3, 4, 4)


@pytest.mark.parametrize("changed", [{}, {"max_length": 26, "n_ctx": 26}, {"max_length": 35}])
def test_length_alone_by_enumeration(changed: dict[str, Any]) -> None:
    """Every text counted: of each length, the most frequent gap."""
    task = TriggerDistance(**WHOLE | {"max_gap": 12} | changed)
    counts: Counter[tuple[int, int]] = Counter()
    for gap, before, after in itertools.product(range(2, 13), range(1, 10), range(1, 10)):
        counts[min(gap + before + after + 2, task.max_length or 99), gap] += 1
    best = {length: max(n for (other, _), n in counts.items() if other == length) for length, _ in counts}
    assert task.from_length == pytest.approx(sum(best.values()) / counts.total())


def assert_uniform(values: list[Any], kinds: int) -> None:
    """All kinds occur, and χ² is within five standard deviations of its mean."""
    counts = Counter(values)
    assert len(counts) == kinds
    expected = len(values) / kinds
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
    assert abs(chi2 - (kinds - 1)) < 5 * (2 * (kinds - 1)) ** 0.5 + 5


@pytest.mark.parametrize("name", [name for name, task in EVERY if getattr(task, "question", None) != "depth"])
def test_labels_are_uniform(name: str) -> None:
    task = dict(EVERY)[name]
    assert_uniform(task.batch(20_000, seed=5)[1].tolist(), task.n_out)


@every_task
def test_lengths_take_their_whole_range(task: Any) -> None:
    lengths = (task.batch(20_000, seed=6)[0] != 0).sum(1)
    least, most = {
        TriggerDistance: lambda: (task.min_gap + 2 * task.min_side + 2, task.max_gap + 2 * task.max_side + 2),
        TriggerCount: lambda: (task.min_length, task.max_length),
        Reversal: lambda: (task.min_length, task.max_length),
        Brackets: lambda: (2 * task.min_pairs, 2 * task.max_pairs),
    }[type(task)]()
    assert least <= lengths.min() <= least + 4  # the paper's very shortest text is one in 40 000
    assert most - 4 <= lengths.max() <= most
    if isinstance(task, (TriggerCount, Reversal)):
        assert_uniform(lengths.tolist(), most - least + 1)
    if isinstance(task, Brackets):
        assert_uniform(lengths.tolist(), (most - least) // 2 + 1)


def test_distance_places_are_uniform_and_independent() -> None:
    task = TriggerDistance(d_vocab=6, min_gap=1, max_gap=3, min_side=1, max_side=3, n_ctx=11)
    tokens, labels = task.batch(20_000, seed=1)
    first = (tokens == 1).int().argmax(1)
    after = (tokens != 0).sum(1) - first - labels
    assert_uniform(list(zip(first.tolist(), labels.tolist(), after.tolist(), strict=True)), 27)


def test_count_places_and_kinds_are_uniform_whatever_the_count() -> None:
    task = TriggerCount(d_vocab=6, n_triggers=2, max_count=3, min_length=4, max_length=4, n_ctx=5)
    tokens, labels = task.batch(40_000, seed=2)
    for count, places in ((1, 4), (2, 6), (3, 4)):
        texts = tokens[labels == count][:, :4]
        is_trigger = (texts >= 1) & (texts <= 2)
        assert_uniform([tuple(row) for row in is_trigger.tolist()], places)
        assert_uniform(texts[is_trigger].tolist(), 2)
        assert_uniform(texts[~is_trigger].tolist(), 3)


def test_count_does_not_show_in_the_length() -> None:
    task = SMALL["count"]
    tokens, labels = task.batch(20_000, seed=2)
    assert_uniform(list(zip((tokens != 0).sum(1).tolist(), labels.tolist(), strict=True)), 5 * 6)


def test_reversal_places_are_uniform_except_the_middle() -> None:
    task = Reversal(d_vocab=5, min_length=4, max_length=5, n_ctx=5)
    tokens, labels = task.batch(20_000, seed=1)
    length, place = (tokens != 0).sum(1), (tokens == 1).int().argmax(1)
    assert_uniform(list(zip(*(x.tolist() for x in (length, place, labels)), strict=True)), 2 * 4 * 3)
    assert not (place[length == 5] == 2).any()
    assert_uniform(tokens[tokens > 1].tolist(), 3)


def words(pairs: int) -> list[tuple[int, ...]]:
    """All orders of so many opening brackets (1) and closing ones (2)."""
    return [word for word in itertools.product((1, 2), repeat=2 * pairs) if word.count(1) == pairs]


@pytest.mark.parametrize("pairs", [3, 4])
def test_brackets_are_uniform_among_all_orders(pairs: int) -> None:
    """Every balanced order equally often, and every other one that begins with ( and ends with )."""
    tokens, labels = Brackets(pairs, pairs, 2 * pairs).batch(20_000, seed=pairs)
    for label in (0, 1):
        wanted = {word for word in words(pairs) if (word[0], word[-1], brackets(word)[0]) == (1, 2, bool(label))}
        drawn = [tuple(text) for text in tokens[labels == label].tolist()]
        assert set(drawn) == wanted
        assert_uniform(drawn, len(wanted))


def test_depths_are_those_of_all_balanced_orders() -> None:
    """Constant guess and guess from the length, by enumeration; texts of every length are uniform."""
    task = Brackets(2, 6, 12, "depth")
    of_length = [Counter(brackets(word)[1] for word in words(n) if brackets(word)[0]) for n in range(2, 7)]
    shares = [{depth: n / counts.total() for depth, n in counts.items()} for counts in of_length]
    every = {depth: sum(share.get(depth, 0) for share in shares) / len(shares) for depth in range(1, 7)}
    assert task.chance == pytest.approx(max(every.values()))
    assert task.from_length == pytest.approx(sum(max(share.values()) for share in shares) / len(shares))
    tokens, labels = task.batch(30_000, seed=1)
    for n, counts in zip(range(2, 7), of_length, strict=True):
        found = torch.bincount(labels[(tokens != 0).sum(1) == 2 * n], minlength=6)
        for depth, number in counts.items():
            share = number / counts.total()
            spread = (share * (1 - share) / int(found.sum())) ** 0.5
            assert abs(int(found[depth - 1]) / int(found.sum()) - share) <= 5 * spread


def test_the_two_labels_of_brackets_have_the_same_lengths() -> None:
    tokens, labels = Brackets(5, 9, 20).batch(20_000, seed=3)
    assert_uniform(list(zip((tokens != 0).sum(1).tolist(), labels.tolist(), strict=True)), 5 * 2)


def test_depth_of_the_longest_texts_is_finite() -> None:
    """Shares of depths in texts of hundreds of brackets, where the numbers of texts exceed float64."""
    task = Brackets(590, 600, 1200, "depth")
    _, labels = task.batch(2000, seed=1)
    found = torch.bincount(labels).max().item() / 2000
    assert found == pytest.approx(task.chance, abs=0.02)


@every_task
def test_same_seed_same_samples(task: Task) -> None:
    state = torch.get_rng_state()
    first, again, other = task.batch(50, seed=1), task.batch(50, seed=1), task.batch(50, seed=2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(task.batch(50, generator)[0], first[0])
    assert not torch.equal(task.batch(50, generator)[0], first[0])  # it has moved on
    assert torch.equal(torch.get_rng_state(), state)  # and nobody else's numbers have


@pytest.mark.parametrize("name", ["distance", "count", "default-distance", "reversal", "default-depth"])
def test_no_sample_twice(name: str) -> None:
    task = dict(EVERY)[name]
    split = task.split(600, 300, seed=1)
    train, test = ([tuple(row) for row in t.tolist()] for t in (split.train_tokens, split.test_tokens))
    assert (len(train), len(test)) == (600, 300)
    assert len({*train, *test}) == 900
    rows, labels = train + test, [*split.train_labels.tolist(), *split.test_labels.tolist()]
    assert all(read(unpadded(list(row), task), task) == label for row, label in zip(rows, labels, strict=True))


def test_splits_are_fixed_by_the_seed() -> None:
    task = SMALL["distance"]
    a, b, c = (task.split(30, 20, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    assert not torch.equal(a.train_tokens, c.train_tokens)


def test_a_split_may_take_all_that_there_is() -> None:
    """One filler, four gaps, three widths of each side: 36 samples, each of which may be asked for."""
    task = TriggerDistance(d_vocab=3, min_gap=1, max_gap=4, min_side=1, max_side=3, n_ctx=12)
    split = task.split(20, 16, seed=0)
    assert len({tuple(row) for row in torch.cat([split.train_tokens, split.test_tokens]).tolist()}) == 36
    with pytest.raises(
        ValueError, match=r"n_train \+ n_test must be at most the number of different samples of the task, got 21 \+ 16"
    ):
        task.split(21, 16, seed=0)
