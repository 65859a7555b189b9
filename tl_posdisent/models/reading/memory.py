"""Bytes that a model takes and bytes that are free."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from tl_posdisent.models.reading.model_parts import modules


def free_memory(devices: Iterable[torch.device | str] = ("cpu",)) -> int | None:
    """Bytes that are free on the fullest of these devices; None for devices other than CPUs and CUDA's.

    On the host no more than its control group leaves; on a GPU with what torch has reserved and not used.
    """
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            found.append(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        elif device.type in ("cpu", "meta"):
            found.append(max(0, min(psutil.virtual_memory().available, *_left_by_group())))
    return min(found, default=None)


def _left_by_group(folder: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that the control group (version 2) of a container leaves; file cache can be given back."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat["inactive_file"])]
    except (OSError, ValueError, KeyError):  # no such group, or "max"
        return [2**63]


def model_devices(model: Any) -> list[torch.device]:
    """Where a model's tensors are, each device once."""
    return list(dict.fromkeys(x.device for x in _tensors(model)))


def model_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, each storage once."""
    storages = [x.untyped_storage() for x in _tensors(model)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(model: Any) -> list[Tensor]:
    held = [x for part in modules(model) for x in (*part._parameters.values(), *part._buffers.values())]
    return [x for x in held if x is not None]


def require_room(
    model: Any,
    n_matrices: int,
    length: int,
    *,
    of: str = "one layer",
    instead: str = "use fewer or shorter texts",
) -> None:
    """Raise MemoryError for a text whose score matrices, by default of one layer, exceed free memory.

    The forward pass holds those of a layer at least twice, as scores and as pattern: what is refused would not have
    run.
    """
    size = min((x.element_size() for x in model.parameters() if x.is_floating_point()), default=4)
    scores = n_matrices * length**2 * size
    free = free_memory(model_devices(model)) if scores > 2**20 else None
    if free is not None and scores > free:
        raise MemoryError(
            f"scores of {of} take {gigabytes(scores)}, and {gigabytes(free)} are free: {instead} "
            f"(estimate(model, {length}) says which fit)"
        )


def gigabytes(n: int | float) -> str:
    """Bytes in GB of 10⁹, for people."""
    return f"{n / 1e9:.3g} GB" if n < 1e12 else f"{n / 1e9:,.0f} GB"
