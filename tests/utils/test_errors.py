"""Errors about an argument keep what they say on their way through a process pool, and suggest the nearest choice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_subset


def test_copies_say_the_same() -> None:
    error = ArgumentError("layers", "must be integers, got 'x'")
    for again in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is ArgumentError
        assert isinstance(again, ValueError)
        assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(error) == f"{error.argument} {error.problem}"


@pytest.mark.parametrize("check", [check_choice, check_subset])
def test_the_nearest_choice_comes_before_the_list(check: Any) -> None:
    """For each choice with a letter too many; nothing is suggested for a word that is near none."""
    choices = ("distance", "uniform", "first_token", "static")
    for choice in choices:
        with pytest.raises(ArgumentError) as error:
            check("by", choice + "s", choices)
        said = str(error.value)
        assert said.startswith(f"by cannot be '{choice}s': did you mean '{choice}'? It must be ")
        assert all(said.index("did you mean") < said.rindex(other) for other in choices)
    with pytest.raises(ArgumentError, match=r"^by must be .*distance.*static.*, got 'words'$"):
        check("by", "words", choices)
