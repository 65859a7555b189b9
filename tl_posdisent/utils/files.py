"""Paths, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tl_posdisent.utils.errors import ArgumentError, brief

UNFINISHED = ".unfinished"
KEPT = 40  # characters of a file's name in that of its unfinished file, of at most 255 bytes also in UTF-8


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


def decode_text(content: bytes) -> str:
    """Decode a text file in UTF-8, with line ends ``\\n`` and without a byte order mark.

    >>> decode_text("\\ufeffone\\r\\ntwo\\r".encode())
    'one\\ntwo\\n'
    """
    return io.StringIO(content.decode("utf-8-sig"), newline=None).read()


def as_path(name: str, path: Any, kind: Literal["file", "folder"] = "file") -> Path:
    """Return the path that was given as text or as a path, or raise. ``name`` is the argument.

    >>> as_path("checkpoint", 5)
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: checkpoint must be the path of a file, got int
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ArgumentError(name, f"must be the path of a {kind}, got {type(path).__name__}")
    return Path(path)


def check_writable(name: str, path: Any, kind: Literal["file", "folder"] = "file") -> Path:
    """Return the path, or raise if no file can be written there: before the work whose result it will hold.

    ``name`` is the argument. Folders that are missing will be created, so the last one that exists is tried.

    >>> check_writable("path", __file__ + "/page.html")
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: path must be a file that can be written, got '...': ... is not a folder
    """
    needed = f"must be a {kind} that can be written, got"
    target = as_path(name, path, kind)
    needed += f" {brief(target)}"
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte
        raise ArgumentError(name, f"{needed}: {getattr(error, 'strerror', None) or error}") from error
    if mode is not None and not (stat.S_ISREG(mode) if kind == "file" else stat.S_ISDIR(mode)):
        what = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a device or a pipe"
        raise ArgumentError(name, f"{needed}, which is {what}")
    place = next(x for x in [*[target] * (kind == "folder"), *target.absolute().parents] if os.path.exists(x))
    if not place.is_dir():
        raise ArgumentError(name, f"{needed}: {brief(place)} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=place):  # permissions alone do not tell: the file system may be read-only
            pass
    except OSError as error:
        raise ArgumentError(name, f"{needed}: no file can be created in {brief(place)} ({error.strerror})") from error
    return target


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when it is complete on disk.

    It is written as ``.NAME.RANDOM.unfinished`` in the same folder, created exclusively: several processes may write
    the same path at once, and a symbolic link at ``path`` is replaced, not followed. After an exception ``path`` is
    unchanged and the new file is deleted; a process that is killed leaves the unfinished file.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name[:KEPT]}.{uuid.uuid4().hex}{UNFINISHED}")
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
