"""Tables into files: ``--out`` something.csv, .parquet, .json or .html."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape

from tl_posdisent.utils.files import whole_file

from .errors import note
from .html_table import table_page

FORMATS = (".csv", ".parquet", ".json", ".html")


def check_out(out: Path | None, formats: Sequence[str] = FORMATS) -> None:
    """Before the work, not after it: is this a file that can be written?

    Raises:
        ValueError: another suffix, a directory, a place that is no folder or not ours, no library for the format.
    """
    if out is None:
        return
    if out.suffix.lower() not in formats:
        raise ValueError(f"--out must end in {', '.join(formats)}, got {out.name!r}")
    if out.suffix.lower() == ".parquet" and not any(map(find_spec, ("pyarrow", "fastparquet"))):
        raise ValueError("--out ends in .parquet, which needs pyarrow or fastparquet: python -m pip install pyarrow")
    if out.is_dir():
        raise ValueError(f"--out must be a file, but {out} is a directory")
    folder = next(path for path in out.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--out cannot be written: {folder} is no directory that takes new files")


def save(table: Any, out: Path | None, title: str) -> None:
    """Write a table whole or not at all, and say so; without ``out`` nothing."""
    if out is None:
        return

    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as file:
        if out.suffix.lower() == ".csv":
            table.to_csv(file, index=False)
        elif out.suffix.lower() == ".parquet":
            table.to_parquet(file, index=False)
        elif out.suffix.lower() == ".json":
            file.write(as_json(table).encode("utf-8"))
        else:
            file.write(table_page(table, title).encode("utf-8"))
    note(f"table: {escape(str(out))} ({len(table)} rows)")


def as_json(table: Any) -> str:
    """A list of records, one a line, numbers in full; what is no finite number is null.

    >>> import pandas as pd
    >>> print(as_json(pd.DataFrame({"head": [0, 1], "r": [0.1, float("nan")]})), end="")
    [
    {"head": 0, "r": 0.1},
    {"head": 1, "r": null}
    ]
    """
    rows = [{name: _plain(x) for name, x in row.items()} for row in table.to_dict("records")]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]\n"


def _plain(value: Any) -> Any:
    """A cell as Python knows it: NumPy's numbers as numbers, <NA>, NaN and infinity as None."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None
