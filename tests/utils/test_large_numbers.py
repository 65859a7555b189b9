"""Integers that no tensor and no float can hold are refused by the argument's name, whatever their size."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from tl_posdisent import (
    ablate_heads,
    dummy_distance,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
    swap_positions,
)
from tl_posdisent.hooks import phase_noise, substitute_attention
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, check_number, real_tensor, shown

pytestmark = pytest.mark.usefixtures("unchecked")
LARGE = {"2**63": 2**63, "10**400": 10**400, "10**5000": 10**5000}  # Python does not print the last
INTEGERS: dict[str, Callable[[Any, int], Any]] = {
    "sinks": lambda m, n: lambda_mask(m, n, 4, 4),
    "window": lambda m, n: lambda_mask(m, 1, n, 4),
    "distance_ceiling": lambda m, n: lambda_mask(m, 1, 4, n),
    "bands": lambda m, n: substitute_attention(m, "banded", bands=[1, n]),
    "rank": lambda m, n: substitute_attention(m, "low-rank", rank=n),
    "heads": lambda m, n: ablate_heads(m, n),
    "layers": lambda m, n: read_model(m, n),
    "positions": lambda m, n: swap_positions(m, [0, n]),
}
NUMBERS: dict[str, Callable[[Any, int], Any]] = {
    "distance": dummy_distance,
    "factor": position_interpolation,
    "high": lambda m, n: limit_frequencies(m, high=n),
    "noise": phase_noise,
}


@pytest.mark.parametrize("n", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, n: int, shared_model: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        INTEGERS[name](shared_model("bridge", "llama-gqa"), n)
    assert caught.value.argument == name


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, shared_model: Any) -> None:
    """A float holds 2**63, but no integer from about 2**1024 on."""
    model = shared_model("bridge", "llama-gqa")
    assert isinstance(NUMBERS[name](model, 2**63), list)
    for n in (10**400, 10**5000, Fraction(10**400, 3)):
        with pytest.raises(ArgumentError) as caught:
            NUMBERS[name](model, n)
        assert caught.value.argument == name


def test_pairs_of_layer_and_head(shared_model: Any) -> None:
    for n in LARGE.values():
        with pytest.raises(ValueError, match="heads must be L0H0 to L1H7"):
            ablate_heads(shared_model("bridge", "llama-gqa"), [(n, 0)])


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
