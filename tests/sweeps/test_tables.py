"""A table is read back as the job returned it, or the job fails by name and the others run."""

from __future__ import annotations

import datetime
import decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from support.swept import squares

from tl_posdisent.experiments.where_what.head_table import HeadTable
from tl_posdisent.sweeps import read_results, sweep

pytestmark = pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")


def ones(columns: Any) -> pd.DataFrame:
    return pd.DataFrame(np.ones((2, len(columns))), columns=columns)


def column(values: Any, dtype: Any = None) -> pd.DataFrame:
    return pd.DataFrame({"x": pd.Series(values, dtype=dtype), "n": range(len(values))})


LEVELS = pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])
DAYS = pd.date_range("2020", periods=2)
KEPT: dict[str, Any] = {
    "types": pd.DataFrame({"r": [0.1, np.nan], "n": pd.array([1, None], "Int64"), "words": ["a", None]}),
    "small numbers": pd.DataFrame({"a": np.ones(2, np.float16), "b": np.ones(2, np.int8), "c": np.ones(2, bool)}),
    "large numbers": column(np.array([2**64 - 1, 1], np.uint64)),
    "categories": column(pd.Categorical(["x", None, "y"], categories=["z", "y", "x"], ordered=True)),
    "times": column(DAYS.tz_localize("Europe/Berlin")),
    "durations": column(DAYS - DAYS[0]),
    "periods": column(DAYS.to_period("M")),
    "intervals": column(pd.arrays.IntervalArray.from_breaks([0, 1, 2])),
    "bytes": column([b"a", None]),
    "decimals": column([decimal.Decimal("1.10"), None]),
    "days": column([datetime.date(2020, 1, 1), None]),
    "words of any type": column(["a", None], object),
    "truth or nothing": column([True, None], object),
    "nothing": column([None, None], object),
    "arrays": column([np.arange(2), np.arange(3)]),
    "integers as names": ones([0, 1]),
    "numbers as names": ones([0.5, 1.0]),
    "days as names": ones(DAYS),
    "name of the names": ones(pd.Index(["a", "b"], name="head")),
    "no rows": column([1.0]).iloc[:0],
    "no columns": pd.DataFrame(),
    "attributes": column([1.0]),
}
KEPT["attributes"].attrs["notes"] = object()
REFUSED: dict[str, tuple[Any, str]] = {
    "cut": (column(pd.cut([1, 2, 3], 2)), r"got 'x' \(category\): convert these columns, such as by astype\(str\)"),
    "categories that are numbers": (column(pd.Categorical([3, 1])), r"got 'x' \(category\): "),
    "categories without rows": (column(pd.Categorical(["a"])).iloc[:0], r"got 'x' \(category\): "),
    "complex numbers": (column([1j, 2]), r"got 'x' \(complex128\): "),
    "seconds": (column(DAYS, "datetime64[s]"), r"got 'x' \(datetime64\[s\]\): "),
    "sparse numbers": (column(pd.arrays.SparseArray([0, 1])), r"got 'x' \(Sparse"),
    "integers of any type": (column([1, 2], object), r"got 'x' \(object\): "),
    "integers of any size": (column([1, 2**70], object), r"got 'x' \(object\): "),
    "words and numbers": (column(["a", 1], object), r"got 'x' \(object\): "),
    "lists": (column([[1], [2, 3]]), r"got 'x' \(object\): "),
    "tuples": (column([(1,), (2, 3)]), r"got 'x' \(object\): "),
    "dicts": (column([{"a": 1}, {"b": 2}]), r"got 'x' \(object\): "),
    "objects": (column([object(), object()]), r"got 'x' \(object\): "),
    "tables": (column([pd.DataFrame(), pd.DataFrame()], object), r"got 'x' \(object\): "),
    "two columns": (column([1j, 2]).assign(y=[2j, 1]), r"got 'x' \(complex128\), 'y' \(complex128\): "),
    "words and numbers as names": (ones(["a", 1]), r"got columns named \['a', 1\] \(they are read back as \['a', '1'"),
    "truth as names": (ones([True, False]), r"got columns named \[True, False\]"),
    "tuples and words as names": (ones([("a", "b"), "c"]), r"got columns named \[\('a', 'b'\), 'c'\]"),
    "names of two levels": (ones(LEVELS), r"\(they have several levels\): give .* names of one level"),
    "categories as names": (ones(pd.CategoricalIndex(["a", "b"])), r"got columns named \['a', 'b'\]"),
    "one name twice": (ones(["a", "a"]), r"\(Duplicate column names found: \['a', 'a'\]\): give .* none twice"),
    "the same as text": (ones(["1", 1]), r"got columns named \['1', 1\]"),
    "rows alone": (pd.DataFrame(index=range(3)), r"give it at least one column"),
    "the name of the jobs": (pd.DataFrame({"job": [1]}), "a table without a column 'job'"),
    "jobs as index": (pd.DataFrame({"a": [1]}, index=pd.Index(["x"], name="job")), "without a column 'job'"),
    "an index of a column's name": (pd.DataFrame({"a": [1]}, index=pd.Index(["x"], name="a")), "cannot insert a"),
}


def kept(name: str) -> pd.DataFrame:
    return KEPT[name]


def refused(name: str) -> pd.DataFrame:
    return REFUSED[name][0]


def check_equal(read: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Of the same values and types, below the name of the job."""
    assert read.columns[0] == "job"
    assert [*map(repr, read.columns[1:])] == [*map(repr, expected.columns)]
    assert read.columns.name == expected.columns.name
    assert_frame_equal(
        read.iloc[:, 1:].set_axis(range(expected.shape[1]), axis=1),
        expected.set_axis(range(expected.shape[1]), axis=1),
        check_exact=True,
    )


@pytest.mark.parametrize("name", KEPT)
def test_a_table_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    before = kept(name).copy()
    for read in (sweep({"a": partial(kept, name)}, tmp_path, progress=False), read_results(tmp_path)):
        check_equal(read, before)
    assert_frame_equal(kept(name), before)
    assert kept(name).attrs.keys() == before.attrs.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_another_table_is_an_error_of_its_job(name: str, tmp_path: Path) -> None:
    jobs = {"bad": partial(refused, name), "good": partial(squares, 2)}
    with pytest.raises(ExceptionGroup, match=r"1 of 2 jobs failed \('bad'\)") as caught:
        sweep(jobs, tmp_path, progress=False)
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        raise caught.value.exceptions[0]
    assert len(str(caught.value.exceptions[0])) < 400
    check_equal(read_results(tmp_path), squares(2))


NUMBERS = pd.DataFrame({"a": [1, 2]})
INDICES: dict[str, tuple[pd.Index[Any], list[str]]] = {
    "rows": (pd.RangeIndex(2), []),
    "rows as a list": (pd.Index([0, 1]), []),
    "named rows": (pd.RangeIndex(2, name="layer"), ["layer"]),
    "every second row": (pd.RangeIndex(0, 4, 2), ["index"]),
    "later rows": (pd.RangeIndex(1, 3), ["index"]),
    "rows backwards": (pd.RangeIndex(1, -1, -1), ["index"]),
    "numbers": (pd.Index([0.0, 1.0]), ["index"]),
    "truth": (pd.Index([False, True]), ["index"]),
    "words": (pd.Index(["a", "b"], name="word"), ["word"]),
    "two levels": (pd.MultiIndex.from_tuples([(0, "x"), (1, "y")]), ["level_0", "level_1"]),
    "named levels": (pd.MultiIndex.from_tuples([(0, 1), (1, 0)], names=["layer", "head"]), ["layer", "head"]),
}


def indexed(name: str) -> pd.DataFrame:
    return NUMBERS.set_axis(INDICES[name][0])


@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_dropped_only_if_it_counts_rows(name: str, tmp_path: Path) -> None:
    read = sweep({"a": partial(indexed, name)}, tmp_path, progress=False)
    names = INDICES[name][1]
    assert [*read] == ["job", *names, "a"]
    assert read["a"].tolist() == [1, 2]
    assert [*read[names].itertuples(index=False, name=None)] == [
        *(indexed(name).index.to_frame().itertuples(index=False, name=None) if names else [(), ()])
    ]


def verdicts() -> HeadTable:
    table = HeadTable({"layer": [4], "head": [2], "contribution": [0.5], "verdict": ["where"]})
    table.attrs["statement"] = "One head looks at where."
    return table


def test_a_table_that_shows_more_than_its_rows(tmp_path: Path) -> None:
    """As those of where_or_what and compare_heads."""
    read = sweep({"a": verdicts}, tmp_path, progress=False)
    assert type(read) is pd.DataFrame
    check_equal(read, pd.DataFrame(verdicts()))


def one_of(name: str) -> pd.DataFrame:
    return {"rows": KEPT["small numbers"], "none": pd.DataFrame(), "names": pd.DataFrame({"b": [], "z": []})}[name]


@pytest.mark.parametrize("empty", ["none", "names"])
@pytest.mark.parametrize("last", [True, False])
def test_a_table_without_rows_changes_no_types(empty: str, last: bool, tmp_path: Path) -> None:
    names = ["rows", empty] if last else [empty, "rows"]
    table = sweep({name: partial(one_of, name) for name in names}, tmp_path, progress=False)
    assert table["job"].tolist() == ["rows", "rows"]
    assert {*table} == {"job", *one_of("rows"), *one_of(empty)}
    assert_frame_equal(table[["a", "b", "c"]], one_of("rows"))
