"""Atomic file writing, and a lock for folders that one process at a time may write to."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

UNFINISHED = ".unfinished"
LOCK = ".tl_posdisent.lock"


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` once all of it is on the disk.

    It is written as ``.NAME.RANDOM.unfinished`` in the same folder. That name is unpredictable and created exclusively,
    so several processes may write the same path at once, and no symbolic link is followed: a link at ``path`` is
    replaced, and the file it points to stays as it is. After an exception nothing new is left and ``path`` is
    unchanged; a process that is killed leaves the unfinished file.

    Raises:
        OSError: the file cannot be written.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.suppress(KeyboardInterrupt), whole_file(f"{folder}/a.txt") as file:
        ...         written = file.write(b"half a sen")
        ...         raise KeyboardInterrupt
        ...     os.listdir(folder)
        []
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}{UNFINISHED}")  # within 255 bytes, as UTF-8 too
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
    """Delete what killed processes left of files whose name matches ``names``. Call it while holding the lock."""
    for path in Path(folder).glob(f".{names}{UNFINISHED}"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], name: str, work: str) -> Iterator[None]:
    """Hold a folder's lock, or raise if another process or thread holds it; the folder is made if it is missing.

    The operating system releases the lock when its process ends, however it ends; the file ``LOCK`` may stay behind.

    Args:
        folder: what is locked.
        name: the argument that an error names.
        work: what is done in the folder, a noun: ``"training"``.

    Raises:
        ValueError: the lock is held.
        OSError: the folder cannot be written to, or its lock file is a symbolic link.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out, locked(out, "out", "sweep"), locked(out, "out", "sweep"):
        ...     pass
        Traceback (most recent call last):
        ValueError: out must be a folder that no other process writes to, got ...: another sweep is running there ...
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(Path(folder, LOCK), timeout=0, thread_local=False).acquire()
    except Timeout:
        raise ValueError(
            f"{name} must be a folder that no other process writes to, got {os.fspath(folder)}: another {work} is "
            "running there (its lock is held); wait until it ends, or choose another folder"
        ) from None
    with lock:
        yield
