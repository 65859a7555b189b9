"""Context managers that restore state at their end, even if Ctrl-C arrives at any time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def restoring(restore: Callable[[], object]) -> Iterator[None]:
    """Call ``restore`` at the end of the block, and again if Ctrl-C interrupts it: it must be safe to repeat.

    Make changes inside the block, and record each one before or immediately after it, so that ``restore`` covers all.
    """
    try:
        yield
    finally:
        try:
            restore()
        except KeyboardInterrupt:
            restore()
            raise


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """Set torch's default dtype to float32 and its default device to the CPU within the block.

    For libraries that make tensors without naming either.
    """
    dtype = torch.get_default_dtype()
    with restoring(lambda: torch.set_default_dtype(dtype)), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        yield


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    """Disable gradients, and restore them even if Ctrl-C arrives on entry or exit, unlike ``torch.no_grad()``."""
    before = torch.is_grad_enabled()
    with restoring(lambda: torch.set_grad_enabled(before)):
        torch.set_grad_enabled(False)
        yield
