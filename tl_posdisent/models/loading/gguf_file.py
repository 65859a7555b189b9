"""Read GGUF files with the package gguf: metadata and tensors, which stay on disk until they are dequantised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType, ReaderTensor

from tl_posdisent.utils.validation import shown

_ARRAY = GGUFValueType.ARRAY  # looked up once: Python 3.11 takes a microsecond, and a file has 10⁵ strings


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file: metadata by key, and tensors by name; their data are views of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]


class _Reader(gguf.GGUFReader):
    """The package's reader, which refuses lengths beyond the end of the file, and reads arrays of numbers at once.

    The package's own ``_get`` returns fewer numbers than asked at the end of the file, so that an array whose length
    is damaged is read until the memory is full.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if self.byte_order != "I":
            raise ValueError("its byte order is not this machine's")
        try:
            return np.frombuffer(self.data, dtype, int(count), offset)
        except (ValueError, OverflowError) as error:
            raise ValueError("it ends before its contents do, or states a wrong length") from error

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type == _ARRAY:
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            dtype = self.gguf_scalar_to_np.get(kind[0])
            if dtype is not None:
                numbers = self._get(orig_offs + 12, dtype, count[0])
                return 12 + numbers.nbytes, [kind, count, numbers], [2], [_ARRAY, GGUFValueType(kind[0])]
        return super()._get_field_parts(orig_offs, raw_type)


def read_gguf_file(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file and the places of its tensors.

    Raises:
        ValueError: not a whole GGUF file of version 2 or 3, in this machine's byte order.
    """
    try:
        with np.errstate(over="ignore"):  # a damaged offset; refused below
            reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # damaged numbers make the package fail in many ways
        raise ValueError(str(error) or type(error).__name__) from error
    end = reader.data_offset
    for tensor in sorted(reader.tensors, key=lambda x: x.data_offset):
        if tensor.data_offset < end:  # the package takes the offsets as they are
            raise ValueError(f"the tensor {shown(tensor.name)} overlaps what is before it")
        end = tensor.data_offset + tensor.n_bytes
    return GgufFile(metadata, {tensor.name: tensor for tensor in reader.tensors})


def shape_of(tensor: ReaderTensor) -> tuple[int, ...]:
    """Return a tensor's shape as in torch; files state the contiguous dimension first."""
    return tuple(tensor.shape.tolist()[::-1])


def numbers(tensor: ReaderTensor) -> np.ndarray:
    """Dequantise a tensor's numbers to float32; those of float32 tensors are a view of the file.

    Raises:
        ValueError: a type that the package does not dequantise.
    """
    try:
        found: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(
            f"the tensor {shown(tensor.name)} has the type {kind}, which gguf does not dequantise"
        ) from error
    return found.reshape(shape_of(tensor))
