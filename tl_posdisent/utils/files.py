"""Paths, atomic file writing, and a lock for folders to which only one process at a time may write."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from filelock import FileLock, Timeout

from tl_posdisent.utils.errors import ArgumentError

UNFINISHED = ".unfinished"
LOCK = ".tl_posdisent.lock"


def found_at(path: str | os.PathLike[str]) -> Literal["file", "folder"] | None:
    """Return whether a path is a file or a folder; None if it does not exist or cannot be a path (as too long names).

    >>> found_at("."), found_at("word " * 100), found_at("a\\0b")
    ('folder', None, None)
    """
    try:
        mode = os.stat(Path(path)).st_mode
    except (OSError, ValueError):  # nothing there, or an invalid name: too long, or with a zero byte
        return None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else None


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when it is complete on disk.

    It is written as ``.NAME.RANDOM.unfinished`` in the same folder, created exclusively: several processes may write
    the same path at once, and a symbolic link at ``path`` is replaced, not followed. After an exception ``path`` is
    unchanged and the new file is deleted; a process that is killed leaves the unfinished file.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}{UNFINISHED}")  # at most 255 bytes, also in UTF-8
    file = unfinished.open("xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: str | os.PathLike[str], names: str = "*") -> None:
    """Delete unfinished files of killed processes whose names match ``names``. Call it while holding the lock."""
    for path in Path(folder).glob(f".{names}{UNFINISHED}"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], name: str, work: str) -> Iterator[None]:
    """Hold a folder's lock, or raise if another process or thread holds it; create the folder if it is missing.

    The operating system releases the lock when its process ends. Errors name the argument ``name`` and the ``work``,
    a noun such as ``"training"``.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(Path(folder, LOCK), timeout=0, thread_local=False).acquire()
    except Timeout:
        raise ArgumentError(
            name,
            f"must be a folder that no other process writes to, got {os.fspath(folder)}: another {work} is "
            "running there (its lock is held); wait until it ends, or choose another folder",
        ) from None
    with lock:
        yield
