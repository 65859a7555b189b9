"""Errors about an argument keep what they say on their way through a process pool."""

from __future__ import annotations

import copy
import pickle

from tl_posdisent.utils.errors import ArgumentError


def test_copies_say_the_same() -> None:
    error = ArgumentError("layers", "must be integers, got 'x'")
    for again in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is ArgumentError
        assert isinstance(again, ValueError)
        assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error) == f"{error.argument} {error.problem}"
