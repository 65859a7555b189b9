"""Files that are whole or not there: neither a full disk nor a killed process leaves half of one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, apart: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` once all of it is on the disk.

    It is written beside its place. After an exception nothing of it is left, and what was at ``path`` still is; a
    process that is killed leaves ``path.unfinished``, which the next one overwrites. With ``apart`` several processes
    may write the same path at once: each has an unfinished file of its own, ``.STEM.RANDOM.unfinished``.

    Raises:
        OSError: it cannot be written.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.suppress(KeyboardInterrupt), whole_file(f"{folder}/a.txt") as file:
        ...         written = file.write(b"half a sen")
        ...         raise KeyboardInterrupt
        ...     os.listdir(folder)
        []
    """
    path = Path(path)
    unfinished = path.with_name((f".{path.stem}.{uuid.uuid4().hex}" if apart else path.name) + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
