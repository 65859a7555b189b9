"""Lists may be iterators, generators, arrays and tensors: layers and heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tl_posdisent as tp
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
LISTS = {"layers": [[0], [0, 1]], "heads": [[0, 3], [(1, 3), (0, 0)]]}


@pytest.mark.parametrize("parameter", LISTS)
def test_choices_in_every_form(parameter: str, shared_reading: Any) -> None:
    reading = shared_reading("bridge", "llama-gqa")
    for chosen in LISTS[parameter]:
        right = tp.ablate_heads(reading, **{"heads": [0], parameter: chosen}).to_frame()
        for make in WAYS.values():
            assert tp.ablate_heads(reading, **{"heads": [0], parameter: make(chosen)}).to_frame().equals(right)


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
