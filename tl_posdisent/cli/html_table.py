"""A table as a self-contained HTML page, for phones and dark mode too.

Not pandas' ``to_html``: it cannot keep the full number beside the four digits that are shown, and cuts long words.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #d4d8dd; --head: #f3f5f7; --soft: #5b6570; }
@media (prefers-color-scheme: dark) { :root { --line: #3a4048; --head: #23282e; --soft: #a2acb7; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2rem auto; padding: 0 1rem; max-width: 72rem; }
h1 { font-size: 1.25rem; overflow-wrap: anywhere; }
p { color: var(--soft); }
div { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--head); }
.n { text-align: right; }
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""


def table_page(table: Any, title: str) -> str:
    """Numbers are shown to four digits; the full ones are in the cells' ``<data value>``.

    >>> import pandas as pd
    >>> page = table_page(pd.DataFrame({"<head>": [3], "r": [2 / 3]}), "r & more")
    >>> "<title>r &amp; more</title>" in page, '<th class="n" scope="col">&lt;head&gt;</th>' in page
    (True, True)
    >>> '<td class="n"><data value="0.6666666666666666">0.6667</data></td>' in page
    True
    """
    from pandas.api.types import is_numeric_dtype

    right = ["n" if is_numeric_dtype(table[name]) else "" for name in table.columns]
    classes = [f' class="{c}"' if c else "" for c in right]
    head = "".join(
        f'<th{c} scope="col">{escape(str(name))}</th>' for c, name in zip(classes, table.columns, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(f"<td{c}>{_cell(x)}</td>" for c, x in zip(classes, row, strict=True)) + "</tr>"
        for row in table.itertuples(index=False, name=None)
    )
    return (
        f"{_HEAD}<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{len(table)} rows</p>\n<div>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n"
        "</table>\n</div>\n</body>\n</html>\n"
    )


def _cell(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return f'<data value="{value!r}">{value:.4g}</data>'
    return "–" if value is None or str(value) == "<NA>" else escape(str(value))
