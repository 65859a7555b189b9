"""Torch's default dtype and device, for libraries that make tensors without naming either."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """Set torch's default dtype to float32 and its default device to the CPU within the block."""
    dtype = torch.get_default_dtype()
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
