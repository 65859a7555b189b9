"""The search for the largest divergences, on numbers alone: whatever the ranks, none of the largest is overlooked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_posdisent.experiments.causal.head_search import HeadSearch, Target

LAYERS, HEADS = 4, 5
SIZES = st.lists(st.floats(1e-6, 1.0), min_size=LAYERS * HEADS, max_size=LAYERS * HEADS)


def places() -> list[tuple[int, int | None]]:
    return [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


def searched(sizes: list[float], ranks: list[float], largest: int, most: int, together: Any = sum) -> HeadSearch:
    """Search, where the heads of a layer that are changed together diverge by ``together`` of their divergences."""
    truth = dict(zip(places(), sizes, strict=True))
    search = HeadSearch(dict(zip(places(), ranks, strict=True)), lambda layer, heads: 1.0, largest, most, bounded=True)
    runs: dict[Target, float] = {}
    while new := search.next_runs():
        assert not [run for run in new if isinstance(run[1], int) and run in runs]  # no head twice
        runs = {
            (layer, x): together([truth[layer, h] for h in (x if isinstance(x, tuple) else [x])]) for layer, x in new
        }
        search.note(runs)
    assert search.alone == {head: truth[head] for head in search.alone}
    return search


@pytest.mark.parametrize("together", [sum, max])
@given(sizes=SIZES, ranks=SIZES, largest=st.integers(1, 6))
def test_the_largest_are_found_whatever_the_ranks(
    sizes: list[float], ranks: list[float], largest: int, together: Any
) -> None:
    search = searched(sizes, ranks, largest, 20, together)
    found, every = sorted(search.alone.values(), reverse=True), sorted(sizes, reverse=True)
    assert found[:largest] == every[:largest]
    others = [size for head, size in zip(places(), sizes, strict=True) if head not in search.alone]
    assert max(others, default=0.0) <= search.bound
    assert search.bound <= found[largest - 1]


@given(sizes=SIZES, ranks=SIZES, most=st.integers(0, 12))
def test_a_limit_is_kept_and_the_bound_stays_true(sizes: list[float], ranks: list[float], most: int) -> None:
    search = searched(sizes, ranks, 4, most)
    assert len(search.alone) <= most + LAYERS  # besides one run for each layer
    others = [size for head, size in zip(places(), sizes, strict=True) if head not in search.alone]
    assert max(others, default=0.0) <= search.bound


def test_a_search_of_everything_runs_everything_and_of_nothing_nothing() -> None:
    sizes = [x / 100 for x in range(20)]
    assert len(searched(sizes, sizes, 20, 20).alone) == 20
    assert searched(sizes, sizes, 20, 20).bound == 0
    assert searched(sizes, sizes, 0, 20).next_runs() == []


def test_good_ranks_take_few_runs() -> None:
    sizes = [1.0, *[0.01] * 4, 0.9, *[0.01] * 14]
    assert len(searched(sizes, sizes, 1, 20).alone) == 4
