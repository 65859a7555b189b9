"""Integers that no tensor and no float can hold are refused; Python's numbers keep their digits."""

from __future__ import annotations

from typing import Any

import pytest

from tl_posdisent.utils.tensor_checks import real_tensor
from tl_posdisent.utils.validation import check_integer, check_number, shown


def test_the_bounds() -> None:
    assert check_integer("n", 2**63 - 1, 0) == 2**63 - 1
    assert check_integer("n", 2**63, 0, 2**64) == 2**63  # where the caller says so
    assert check_number("x", 10**308) == 1e308
    with pytest.raises(
        ValueError, match=r"n must be an integer of at least 0 and below 2\*\*63, got 9223372036854775808"
    ):
        check_integer("n", 2**63, 0)
    assert shown(10**5000) == "int of too many digits to print"


@pytest.mark.parametrize("values", [[0.1, 2**24 + 1], [[1e-9], [2.0**25 + 1]], (0.3, 1 / 3)])
def test_python_numbers_keep_their_digits(values: Any) -> None:
    """torch makes a list of Python's floats float32 by itself."""
    assert real_tensor("positions", values).tolist() == [list(x) if isinstance(x, list) else x for x in values]
