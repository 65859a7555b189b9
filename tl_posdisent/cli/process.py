"""Threads and garbage collection of the command line's process, so that it is fast, also beside other programs.

torch's threads spin while they wait for each other after each operation. On a shared machine a spinning thread takes
the processor from the thread for which it waits, and operations of a small model are so short that it mostly waits.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

_SPINS = "1000"  # libgomp's default is 300 000: milliseconds, in which another program could run
_PER_THREAD = 10_000_000  # parameters


def spin_briefly() -> None:
    """Let torch's threads sleep soon when they wait. Call it before torch is imported, when libgomp reads this."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def limit_threads(most: int) -> None:
    """Use at most so many threads, and at least one, unless the user has set their number."""
    import torch

    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(max(1, min(most, torch.get_num_threads())))


@contextlib.contextmanager
def collecting_late() -> Iterator[None]:
    """Turn off garbage collection until ``settle``: imports create hundreds of thousands of objects that stay.

    Measured for ``fit --length 32``: 4.0 instead of 6.0 s of processor time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle(model: Any = None) -> None:
    """Collect garbage among objects created from now on only, and use as many threads as the model needs.

    Call it after importing and loading. Threads are one for each ten million parameters, up to torch's default.
    """
    gc.freeze()
    gc.enable()
    if model is not None:
        limit_threads(sum(x.numel() for x in model.parameters()) // _PER_THREAD)
