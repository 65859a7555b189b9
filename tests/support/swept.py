"""Jobs of sweeps in tests, and the files that they write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.processes import wait_until

LAST = ("additivity", {"layers": [4]})
SLOW = ("trained_vs_random", {"layers": [4], "seeds": [0]})  # long enough to be caught in the middle


def inodes(out: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and time of each part, which change if a job is repeated."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (out / "parts").glob("*.parquet")}


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
