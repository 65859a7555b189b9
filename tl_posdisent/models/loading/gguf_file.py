"""Read GGUF files: metadata and tensors, with every length and offset checked against the file's size.

Numbers in a file are not trusted: none may cause an allocation or a loop larger than the rest of the file could hold.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tl_posdisent.utils.validation import shown

_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")  # by the type number in a file
_TYPES = dict(enumerate(_NUMBERS)) | {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of the shortest entries of metadata and tensors
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as stored in the file.

    ``shape`` is as in torch, with the last dimension contiguous; ``kind`` is a ``gguf.GGMLQuantizationType``; ``data``
    holds its bytes, a view of the file of shape ``(*shape[:-1], bytes per row)``, not yet read.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    data: np.ndarray

    def numbers(self) -> np.ndarray:
        """Dequantise the tensor's numbers to float32 with the package gguf.

        Raises:
            ValueError: a type that the package does not dequantise.
        """
        import gguf

        try:
            numbers: np.ndarray = gguf.dequantize(self.data, self.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"the tensor {shown(self.name)} has the type {self.kind.name}, which gguf does not dequantise"
            ) from error
        return numbers.reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """Contents of a file: ``metadata`` by key (with numpy arrays), and ``tensors`` by name, in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """A position in the bytes of a file that never moves beyond their end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, length: int, what: str) -> np.ndarray:
        if length > self.left:
            raise ValueError(f"{what} ends beyond the end of the file")
        self.at += length
        return self.data[self.at - length : self.at]

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def integer(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what).tobytes(), "little")

    def string(self, what: str) -> str:
        try:
            return self.take(self.integer(8, what), what).tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Read ``count`` strings, in a third of the time that ``string`` takes for a vocabulary."""
        whole, at, found = memoryview(self.data), self.at, []  # type: ignore[arg-type]
        try:
            for _ in range(count):
                length = struct.unpack_from("<Q", whole, at)[0]
                at += 8 + length
                if at > len(whole):
                    raise ValueError(f"a string of {what} ends beyond the end of the file")
                found.append(str(whole[at - length : at], "utf-8"))
        except struct.error as error:
            raise ValueError(f"a string of {what} begins beyond the end of the file") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"a string of {what} is not UTF-8") from error
        self.at = at
        return found

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(f"a string, {what},")
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _TYPES:
            raise ValueError(f"{what} has the type {kind}, which GGUF does not have")
        kind_of = np.dtype(_TYPES[kind])
        return self.take(kind_of.itemsize, what).copy().view(kind_of)[0].item()

    def array(self, what: str) -> Any:
        kind, count = self.integer(4, what), self.integer(8, what)
        least = 8 if kind == _STRING else np.dtype(_TYPES.get(kind, "u1")).itemsize
        if count * least > self.left:
            raise ValueError(f"an array, {what}, has {count} elements, more than the rest of the file holds")
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _TYPES:
            raise ValueError(f"an array, {what}, has elements of type {kind}, which are not read")
        return self.take(count * least, what).copy().view(_TYPES[kind])


def read_gguf_file(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file and the places of its tensors, whose numbers stay on disk.

    Raises:
        ValueError: not a GGUF file of version 2 or 3; a truncated file; a number that contradicts the file's size.
        OSError: a file that cannot be opened.
    """
    if not path.stat().st_size:
        raise ValueError("it is empty")
    cursor = _Cursor(np.asarray(np.memmap(path, mode="r")))
    if cursor.take(4, "the file").tobytes() != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.integer(4, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in (2, 3)
        why = "its bytes are in big-endian order" if swapped else f"its version is {version}"
        raise ValueError(f"{why}; versions 2 and 3 in little-endian order are read")
    n_tensors, n_entries = cursor.integer(8, "the number of tensors"), cursor.integer(8, "the number of entries")
    if n_tensors * _LEAST_TENSOR + n_entries * _LEAST_ENTRY > cursor.left:
        raise ValueError(f"a header of {n_entries} entries and {n_tensors} tensors is longer than the file")
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        key = cursor.string("a string, the key of an entry,")
        if key in metadata:
            raise ValueError(f"the key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.integer(4, shown(key)), shown(key))
    return GgufFile(metadata, _tensors(cursor, n_tensors, metadata.get("general.alignment", 32)))


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, StoredTensor]:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, and is {shown(alignment)}")
    stated = [_tensor(cursor) for _ in range(count)]
    begin = -(-cursor.at // alignment) * alignment
    extents, found = [], {}
    for name, shape, kind, row, offset in stated:
        start, size = begin + offset, math.prod(shape[:-1]) * row
        if start + size > len(cursor.data):
            raise ValueError(f"the tensor {shown(name)} of shape {shape} ends beyond the end of the file")
        if name in found:
            raise ValueError(f"the tensor {shown(name)} occurs twice")
        extents.append((start, start + size))
        found[name] = StoredTensor(name, shape, kind, cursor.data[start : start + size].reshape(*shape[:-1], row))
    if any(end > start for (_, end), (start, _) in pairwise(sorted(extents))):
        raise ValueError("its tensors overlap")
    return found


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], Any, int, int]:
    """Read name, shape, type, bytes per row and offset of the next tensor in the header."""
    import gguf

    name = cursor.string("a string, the name of a tensor,")
    what = f"the tensor {shown(name)}"
    n = cursor.integer(4, what)
    if not 1 <= n <= _MOST_DIMENSIONS:
        raise ValueError(f"{what} has {n} dimensions, and must have 1 to {_MOST_DIMENSIONS}")
    shape = tuple(cursor.integer(8, what) for _ in range(n))[::-1]
    number, offset = cursor.integer(4, what), cursor.integer(8, what)
    if 0 in shape:
        raise ValueError(f"{what} of shape {shape} has no numbers")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError as error:
        raise ValueError(f"{what} has the type {number}, which the installed gguf does not know") from error
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % elements:
        raise ValueError(f"{what} has rows of {shape[-1]} numbers, and {kind.name} has blocks of {elements}")
    return name, shape, kind, shape[-1] // elements * size, offset
