"""Tables into files: ``--out`` something.csv, .parquet, .json or .html."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import markup

from tl_posdisent.utils.files import whole_file

from .errors import note

FORMATS = (".csv", ".parquet", ".json", ".html")


def check_out(out: Path | None, formats: Sequence[str] = FORMATS, option: str = "out") -> None:
    """Check before the work that the file can be written.

    Raises:
        ValueError: another suffix, a directory, a folder that cannot be written to, no library for the format.
    """
    if out is None:
        return
    if out.suffix.lower() not in formats:
        raise ValueError(f"--{option} must end in {', '.join(formats)}, got {out.name!r}")
    if out.suffix.lower() == ".parquet" and not any(map(find_spec, ("pyarrow", "fastparquet"))):
        raise ValueError(
            f"--{option} ends in .parquet, which needs pyarrow or fastparquet: python -m pip install pyarrow"
        )
    if out.is_dir():
        raise ValueError(f"--{option} must be a file, but {out} is a directory")
    folder = next(path for path in out.absolute().parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--{option} cannot be written: {folder} is not a directory that takes new files")


def save(table: Any, out: Path | None, title: str) -> None:
    """Write a table completely or not at all, and say so; without ``out`` nothing."""
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
            file.write(as_html(table, title).encode("utf-8"))
    note(f"table: {markup.escape(str(out))} ({len(table)} rows)")


def as_json(table: Any) -> str:
    """A list of records, one a line, numbers in full; NaN, infinity and missing values are null.

    >>> import pandas as pd
    >>> print(as_json(pd.DataFrame({"head": [0, 1], "r": [0.1, float("-inf")]})), end="")
    [
    {"head": 0, "r": 0.1},
    {"head": 1, "r": null}
    ]
    """
    cells = table.astype(object).replace([math.inf, -math.inf], None)
    rows = cells.where(cells.notna(), None).to_dict("records")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False, default=lambda x: x.item()) for row in rows)
    return f"[\n{lines}\n]\n"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #d4d8dd; --head: #f3f5f7; --soft: #5b6570; }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #3a4048; --head: #23282e; --soft: #a2acb7; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.2rem auto; padding: 0 1rem; max-width: 72rem; }}
h1 {{ font-size: 1.25rem; overflow-wrap: anywhere; }}
p {{ color: var(--soft); }}
div {{ overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 6px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }}
th {{ position: sticky; top: 0; background: var(--head); }}
{numeric} {{ text-align: right; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{rows} rows</p>
<div>
{table}
</div>
</body>
</html>
"""


def as_html(table: Any, title: str) -> str:
    """A self-contained page, for phones and dark mode too. Numbers are shown to four digits; the full ones are in the
    cells' ``<data value>``.

    >>> import pandas as pd
    >>> page = as_html(pd.DataFrame({"<head>": [3], "r": [2 / 3]}), "r & more")
    >>> "<title>r &amp; more</title>" in page, "<th>&lt;head&gt;</th>" in page
    (True, True)
    >>> '<td><data value="0.6666666666666666">0.6667</data></td>' in page
    True
    """
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

    cells = pd.DataFrame({escape(str(name)): [_cell(x) for x in table[name]] for name in table.columns})
    numeric = [n for n, name in enumerate(table.columns, 1) if is_numeric_dtype(table[name])]
    with pd.option_context("display.max_colwidth", None):  # or pandas cuts long words
        body = cells.to_html(index=False, escape=False, border=0)
    aligned = ", ".join(f"tr > :nth-child({n})" for n in numeric) or ".number"
    return _PAGE.format(title=escape(title), numeric=aligned, rows=len(table), table=body)


def _cell(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return "–" if math.isnan(value) else f'<data value="{value!r}">{value:.4g}</data>'
    return "–" if value is None or str(value) == "<NA>" else escape(str(value))
