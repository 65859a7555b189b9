"""The refusal of texts whose scores exceed the free memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from tl_posdisent.models.running.model_parts import modules


def free_memory(devices: Iterable[torch.device | str]) -> int | None:
    """Return the free bytes on the fullest of these devices; None for devices other than CPU and CUDA.

    On the host, at most what its control group leaves; on a GPU, including what torch has reserved but does not use.
    """
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            found.append(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        elif device.type in ("cpu", "meta"):  # weights that accelerate offloads are on meta
            found.append(max(0, min(psutil.virtual_memory().available, *_left_by_group())))
    return min(found, default=None)


def _left_by_group(folder: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the bytes that a container's control group (version 2) leaves; inactive file cache counts as free."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat["inactive_file"])]
    except (OSError, ValueError, KeyError):  # no such group, or "max"
        return [2**63]


def model_devices(model: Any) -> list[torch.device]:
    """List the devices of a model's tensors, each once."""
    held = [x for part in modules(model) for x in (*part._parameters.values(), *part._buffers.values())]
    return list(dict.fromkeys(x.device for x in held if x is not None))


def require_room(
    model: Any,
    n_matrices: int,
    length: int,
    *,
    of: str = "one layer",
    instead: str = "use fewer or shorter texts",
) -> None:
    """Raise MemoryError for a text whose score matrices, by default of one layer, exceed free memory.

    The forward pass holds the matrices of a layer at least twice, as scores and as pattern: a text that is refused
    would not have run.
    """
    size = min((x.element_size() for x in model.parameters() if x.is_floating_point()), default=4)
    scores = n_matrices * length**2 * size
    free = free_memory(model_devices(model)) if scores > 2**20 else None
    if free is not None and scores > free:
        raise MemoryError(f"scores of {of} take {gigabytes(scores)}, and {gigabytes(free)} are free: {instead}")


def gigabytes(n: int | float) -> str:
    """Format bytes in GB (10⁹ bytes)."""
    return f"{n / 1e9:.3g} GB" if n < 1e12 else f"{n / 1e9:,.0f} GB"
