"""Devices of workers: each process that works on a folder claims the visible device that has the fewest claims."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from tl_posdisent.utils.errors import ArgumentError

_claims: dict[tuple[int, Path], tuple[str, FileLock]] = {}  # by process, as a copy of it needs a device of its own


def own_device(out: Path) -> str:
    """Return the device that this process has claimed in the folder, such as ``"cuda:3"``; claim one at first.

    A claim is the lock of a file in ``out``, so it ends with its process, and a process that replaces it takes the same
    device. Files are named by machine and by the device's own identity, because processes may number devices
    differently.
    """
    key = os.getpid(), out
    if key not in _claims:
        _claims[key] = _claimed(_visible(), Path(out, "devices"))
    return _claims[key][0]


def release_device(out: Path) -> None:
    """End this process's claim in the folder, if it has one."""
    if claim := _claims.pop((os.getpid(), out), None):
        claim[1].release()


def _claimed(devices: dict[str, str], folder: Path) -> tuple[str, FileLock]:
    folder.mkdir(parents=True, exist_ok=True)
    for already in itertools.count():  # how many have claimed the device before
        for device, name in devices.items():
            lock = FileLock(folder / f"{name}.{already}.lock", timeout=0, thread_local=False)
            with contextlib.suppress(Timeout):
                lock.acquire()
                return device, lock
    raise AssertionError("there is always a next lock")


def _visible() -> dict[str, str]:
    """Return the accelerators that this process sees, with a name of each that is the same in other processes."""
    kind = torch.accelerator.current_accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    if kind is None or not count:
        raise ArgumentError("device", "must be 'cpu' where torch sees no accelerator, got 'worker'")
    about = getattr(torch.get_device_module(kind), "get_device_properties", lambda n: None)
    return {f"{kind.type}:{n}": f"{platform.node()}-{getattr(about(n), 'uuid', n)}" for n in range(count)}
