"""Threads of a command's process.

torch's threads spin while they wait for each other after each operation. On a shared machine a spinning thread takes
the processor from the thread for which it waits, and operations of a small model are so short that it mostly waits:
beside one other process on two cores, a pass of 96 tokens of SmolLM2 takes 1.1 s of one thread and 10 s of two.
"""

from __future__ import annotations

import os
from typing import Any

_SPINS = "1000"  # libgomp's default is 300 000: milliseconds, in which another program could run
_PER_THREAD = 10_000_000  # parameters


def spin_briefly() -> None:
    """Let torch's threads sleep soon when they wait. Call it before torch is imported, when libgomp reads this."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def limit_threads(model: Any) -> None:
    """Use one thread for each ten million parameters, up to torch's default, unless the user has set their number."""
    import torch

    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        most = sum(x.numel() for x in model.parameters()) // _PER_THREAD
        torch.set_num_threads(max(1, min(most, torch.get_num_threads())))
