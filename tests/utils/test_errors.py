"""Errors about an argument keep what they say on their way through a process pool."""

from __future__ import annotations

import copy
import pickle

import pytest

from tl_posdisent.utils.errors import ArgumentError, ContextExceeded


@pytest.mark.parametrize(
    "error",
    [ArgumentError("layers", "must be integers, got 'x'"), ContextExceeded("tokens", "are 9 long", 9, 8)],
    ids=["ArgumentError", "ContextExceeded"],
)
def test_copies_say_the_same(error: ArgumentError) -> None:
    for again in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert isinstance(again, ValueError)
        assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error) == f"{error.argument} {error.problem}"
