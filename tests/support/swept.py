"""Jobs of sweeps in tests, and the files that they write."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.accelerator import imitated, register
from support.processes import wait_until
from tl_posdisent.sweeps import runner
from tl_posdisent.sweeps.devices import own_device

LAST = ("additivity", {"layers": [4]})
SLOW = ("head_labels", {"layers": [4], "seeds": [0, 1, 2]})  # long enough to be caught in the middle


def inodes(out: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and time of each part, which change if a job is repeated."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "parts").glob("*.parquet")}


def claimed(out: Path) -> str:
    """Return the device that a process claims where there are two imitated ones."""
    register()
    return own_device(out)


def claim_and_wait(out: Path) -> None:
    (out / f"{os.getpid()}.txt").write_text(claimed(out), encoding="utf-8")
    time.sleep(600)


def imitate(out: Path) -> None:
    """Provide two imitated devices until the process ends, and write down the devices on which it loads models."""
    _imitation.append(imitated())
    _imitation[0].__enter__()
    load = runner.load

    def noted(*given: Any, device: str, **options: Any) -> Any:
        with (out / f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{device}\n")
        return load(*given, device=device, **options)

    runner.load = noted


_imitation: list[Any] = []


def wait_for_parts(out: Path, count: int, running: BaseProcess | None = None) -> None:
    wait_until(lambda: len(list((out / "parts").glob("*.parquet"))) >= count, running)


@contextlib.contextmanager
def when_parts(out: Path, count: int, act: Callable[[], Any]) -> Iterator[None]:
    """Call ``act`` from another thread as soon as so many jobs are done."""
    thread = threading.Thread(target=lambda: (wait_for_parts(out, count), act()))
    thread.start()
    try:
        yield
    finally:
        thread.join()
