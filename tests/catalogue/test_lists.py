"""Lists may be iterators, generators, arrays and tensors: layers and heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.on_devices import Place, after_a_run
from support.public_calls import call, functions, model_for
from support.results import assert_same

from tl_posdisent.cli.inputs import read_text
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_heads, check_indices

pytestmark = pytest.mark.usefixtures("unchecked")
WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "iterator": iter,
    "generator": lambda x: (y for y in x),
    "array": np.array,
    "tensor": torch.tensor,
    "list of arrays": lambda x: [np.array(y) for y in x],
    "list of tensors": lambda x: [torch.tensor(y) for y in x],
}
CASES = [
    pytest.param(f, parameter, chosen, id=f"{f.__name__}-{parameter}-{n}")
    for parameter, lists in {"layers": [[0], [0, 1]], "heads": [[0, 3], [(1, 3), (0, 0)]]}.items()
    for f in functions(parameter)
    if f.__name__ in ("additivity", "dummy_distance", "ablate_heads")
    for n, chosen in enumerate(lists)
]


@pytest.mark.parametrize(("function", "parameter", "chosen"), CASES)
def test_choices_in_every_form(function: Any, parameter: str, chosen: list[Any], shared_reading: Any) -> None:
    reading = shared_reading("bridge", "llama-gqa")

    def result(given: Any) -> Any:
        found = call(function, model_for(function, reading), **{parameter: given})
        return after_a_run(found, Place(), reading.model)

    right = result(chosen)
    for make in WAYS.values():
        assert_same(result(make(chosen)), right, rtol=0, atol=0)


def test_choices_as_tables_hold_them() -> None:
    """Also a tuple of arrays, and single numbers; what are no integers is refused in words."""
    pairs = torch.tensor([[1, 3], [0, 0]])
    for given in (pairs, pairs.numpy(), tuple(pairs), pairs.to(torch.int32), map(tuple, pairs.tolist())):
        assert check_heads(None, given, 2, 8) == {0: [0], 1: [3]}
    assert check_heads(torch.tensor(1), np.int64(2), 2, 8) == {1: [2]}
    assert check_indices("layers", np.array(1), 2) == [1]
    for wrong in (pairs.float(), pairs.bool(), pairs[None], torch.tensor([[1, 3, 0]]), [pairs, 3]):
        with pytest.raises(ArgumentError, match="heads must "):
            check_heads(None, wrong, 2, 8)
    with pytest.raises(ArgumentError, match="heads must not be a tuple of two integers"):
        check_heads(None, (1, 3), 2, 8)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfone\r\ntwo\r", b"one\ntwo\n"])
def test_one_reader_of_text_files(content: bytes, tmp_path: Path) -> None:
    """A byte order mark is no text, and lines end in one way."""
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert read_text(path) == "one\ntwo\n"
