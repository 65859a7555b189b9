"""Every row of the catalogue of bad inputs, and that the catalogue leaves out no public function."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

import pytest
from catalogue import given, rows
from catalogue.row import Row
from support.public import public_names
from support.public_calls import functions
from support.untouched import state

ROWS = rows()
# What the package makes and gives back; who makes one by hand knows what belongs in it.
RESULTS = {
    *(
        "AdditiveFit",
        "AttentionFit",
        "AttentionSpec",
        "Captured",
        "ContentPosition",
        "DepositReport",
        "DepositStudy",
        "DistanceSources",
        "Estimate",
        "LogitDifference",
        "ModelReading",
        "PreferenceFlips",
    ),
    *("InteractionBound", "Perturbed", "Plane", "PositionalSubspace", "RopeCapacity", "RopeHadamard", "Split"),
    *("SubspacePatterns", "SubspaceShares", "TrainRun", "TrainingInterrupted", "VarianceShares"),
}
TAKE_NOTHING = {"EFFECTS", "Task", "demo_hf_model", "demo_text", "demo_tokenizer"}

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, tmp_path: Path) -> None:
    """Its error and no other, or its result; and the models that the rows share are as they were."""
    shared = [make() for make in (given.model, given.demo) if make.cache_info().currsize]
    before = [state(model) for model in shared]
    if row.words:
        with pytest.raises(row.error) as caught:
            row.call(tmp_path)
        assert type(caught.value) is row.error
        missing = [word for word in row.words if word not in str(caught.value)]
        assert not missing, str(caught.value)
    else:
        assert row.call(tmp_path) is True
    assert [state(model) for model in shared] == before


def test_the_table_is_long_and_says_nothing_twice() -> None:
    assert len(ROWS) >= 150
    twice = [name for name, n in Counter(str(row) for row in ROWS).items() if n > 1]
    assert not twice
    assert sum(not row.words for row in ROWS) >= 20, "bad input is not only what is refused"


def test_every_public_name_has_a_row() -> None:
    """Or is refused its model, tokens, layers by ``test_bad_input``, which finds functions by their arguments."""
    found = {function.__name__ for function in functions()}
    left = {*public_names()} - {row.of for row in ROWS} - found - RESULTS - TAKE_NOTHING
    assert not left, f"no bad input for {sorted(left)}"


def test_rows_are_about_public_names() -> None:
    """And about a row's own function: the table says what it tests."""
    public = public_names()
    for row in ROWS:
        assert row.of in public, row
        names = row.call.__code__.co_names
        source = inspect.getsource(inspect.getmodule(row.call))
        assert row.of in source, f"{row}: {names}"
