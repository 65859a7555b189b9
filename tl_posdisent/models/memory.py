"""Free memory of devices, and the bytes of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from tl_posdisent.models.reading.forward import modules


def free_memory(devices: Iterable[torch.device | str] = ("cpu",)) -> int | None:
    """Bytes that are free on the fullest of these devices; None for devices other than CPUs and CUDA's.

    On the host the smaller of what the system calls available and what the control group of the process leaves; on a
    GPU what CUDA has free and what torch has reserved and not used.
    """
    found = [_of_device(torch.device(device)) for device in devices]
    return min((free for free in found if free is not None), default=None)


def model_devices(model: Any) -> list[torch.device]:
    """Where a model's tensors are, each device once."""
    return list(dict.fromkeys(x.device for x in _tensors(model)))


def model_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, each storage once."""
    sizes = {}
    for x in _tensors(model):
        storage = x.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def require_room(model: Any, n_matrices: int, length: int, block: int | None) -> None:
    """Refuse a text of which the score matrices of one layer alone are more than there is.

    The forward pass holds them at least twice, as scores and as pattern: what is refused would not have run.

    Raises:
        MemoryError: says what would.
    """
    size = min((x.element_size() for x in model.parameters() if x.is_floating_point()), default=4)
    scores, free = n_matrices * (length if block is None else min(block, length)) * length * size, None
    if scores > 2**20:
        free = free_memory(model_devices(model))
    if free is not None and scores > free:
        smaller = max(1, free // (8 * n_matrices * length * size))
        raise MemoryError(
            f"scores of one layer take {gigabytes(scores)}, several times over, and {gigabytes(free)} are free: use "
            f"block={smaller} or less (estimate(model, {length}, block={smaller}) says what it takes), or fewer texts"
        )


def gigabytes(n: int | float) -> str:
    """Bytes in GB of 10⁹, for people."""
    return f"{n / 1e9:.3g} GB" if n < 1e12 else f"{n / 1e9:,.0f} GB"


def _tensors(model: Any) -> list[Tensor]:
    return [
        x for part in modules(model) for x in (*part._parameters.values(), *part._buffers.values()) if x is not None
    ]


def _of_device(device: torch.device) -> int | None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type not in ("cpu", "meta"):
        return None
    return int(max(0, min(psutil.virtual_memory().available, _left_by_group())))


_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)


def _left_by_group() -> float:
    """Bytes that the control group of a container leaves, of version 2 or 1; file cache can be given back."""
    for folder, limit, used, cache in _GROUPS:
        try:
            left = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            stat = Path(folder, "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return left + sum(int(line.split()[1]) for line in stat if line.startswith(cache))
    return math.inf
