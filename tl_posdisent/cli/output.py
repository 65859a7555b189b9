"""Tables into files: ``--out`` something.csv, .parquet or .json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tl_posdisent.utils.files import whole_file

from .errors import note

FORMATS = (".csv", ".parquet", ".json")


def check_out(out: Path | None, formats: Sequence[str] = FORMATS, option: str = "out") -> None:
    """Raise ValueError, before the work, unless the file can be written."""
    if out is None:
        return
    if out.suffix.lower() not in formats:
        raise ValueError(f"--{option} must end in {', '.join(formats)}, got {out.name!r}")
    if out.is_dir():
        raise ValueError(f"--{option} must be a file, but {out} is a directory")
    folder = next(path for path in out.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--{option} cannot be written: {folder} is not a directory that takes new files")


def save(table: Any, out: Path | None) -> None:
    """Write a table completely or not at all, and say so; without ``out`` nothing."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as file:
        if out.suffix.lower() == ".csv":
            table.to_csv(file, index=False)
        elif out.suffix.lower() == ".parquet":
            table.to_parquet(file, index=False)
        else:
            file.write(as_json(table).encode("utf-8"))
    note(f"table: {out} ({len(table)} rows)")


def as_json(table: Any) -> str:
    """A list of records, numbers in full; NaN, infinity and missing values are null.

    >>> import pandas as pd
    >>> as_json(pd.DataFrame({"head": [0, 1], "r": [0.1, float("-inf")]}))
    '[{"head": 0, "r": 0.1}, {"head": 1, "r": null}]\\n'
    """
    cells = table.astype(object).replace([math.inf, -math.inf], None)
    rows = cells.where(cells.notna(), None).to_dict("records")
    return json.dumps(rows, ensure_ascii=False, allow_nan=False, default=lambda x: x.item()) + "\n"
