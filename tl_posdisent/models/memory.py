"""How much memory there is, and how much a model takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .forward import modules

_NO_LIMIT = 1 << 60  # control groups say "none" as a huge number


def free_memory(devices: Iterable[torch.device | str] = ("cpu",)) -> int | None:
    """Bytes that are free on the fullest of these devices; None where the system does not say.

    On the host the smaller of what Linux calls available and what the control group of the process leaves; on a GPU
    what CUDA has free and what torch has reserved and not used.
    """
    found = [_of_device(torch.device(device)) for device in devices]
    known = [free for free in found if free is not None]
    return min(known) if known else None


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
    known = [x for x in (_available(), _left_by_group()) if x is not None]
    return min(known) if known else None


def _available() -> int | None:
    """Of the whole machine."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_by_group() -> int | None:
    """What the control groups that this process sees leave, of version 2 or 1; file cache can be given back."""
    left = math.inf
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            text = Path(folder, limit).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= _NO_LIMIT:
                continue
            stat = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
            spare = next((int(line.split()[1]) for line in stat if line.startswith(cache)), 0)
            left = min(left, int(text) - int(Path(folder, used).read_text(encoding="ascii")) + spare)
        except (OSError, ValueError):
            continue
    return None if left == math.inf else max(0, int(left))
