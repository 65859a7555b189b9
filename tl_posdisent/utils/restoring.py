"""Blocks that put something back at their end, wherever Ctrl-C comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def restoring(restore: Callable[[], object]) -> Iterator[None]:
    """Call ``restore`` at the end of the block, and again if Ctrl-C comes while it runs: it must bear repetition.

    What the block changes is changed in it, and noted before or at once, so that nothing that has begun is missed.
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
def without_gradients() -> Iterator[None]:
    """As ``torch.no_grad()``, which leaves gradients off for good if Ctrl-C comes while it is entered or left."""
    before = torch.is_grad_enabled()
    with restoring(lambda: torch.set_grad_enabled(before)):
        torch.set_grad_enabled(False)
        yield
