"""Which tool works with which architecture in which model class: tried, not typed.

Builds the tiny models of `tests/support/zoo.py` and tries the laws of `tests/support/support_laws.py` on each of them,
on whole texts and on padded ones. What a tool refuses has a name in its cell; one that breaks a law stops this script.

    .venv/bin/python docs/support_table.py       # writes what holds for the installed TransformerLens
    .venv-tl4/bin/python docs/support_table.py   # and for the other one; what is there of the rest stays
    .venv/bin/python docs/support_table.py TOOL  # only this column

`tests/docs/test_docs.py` does the same and compares.
"""

from __future__ import annotations

import os
import re
import string
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import pandas as pd
import torch

HERE = Path(__file__).parent
PAGE = HERE / "support.md"
sys.path.append(str(HERE.parent / "tests"))

from support import zoo  # noqa: E402
from support.support_laws import PADDED, TOOLS, try_laws  # noqa: E402

OK = "✓"
WHOLE_ONLY = f"{OK} not {PADDED}"
REFUSALS = {  # words of an error: what it is called in a cell
    "additive bias such as ALiBi": "additive bias",
    "no rotary position embedding": "no rotation",
}
CLASSES = {"H3": "hooked", "B3": "bridge", "B4": "bridge"}  # code in the table: kind in the zoo
Row = dict[str, str]
"""One architecture in one class: the cell of every tool, OK, WHOLE_ONLY or the name of its refusal."""
Table = dict[tuple[str, str], Row]
"""By (architecture, class code)."""


# --- rows -------------------------------------------------------------------------------------------------------


def try_tools(model: Any, tools: Sequence[str] = tuple(TOOLS)) -> Row:
    """Every tool, or some, on one model."""
    table = try_laws(model, tools)
    wrong = table[table["verdict"] == "wrong"]
    if len(wrong):
        raise AssertionError(f"a tool does something else than it says:\n{wrong.to_string()}")
    return {tool: _cell(table[table["tool"] == tool]) for tool in tools}


def _cell(rows: pd.DataFrame) -> str:
    """OK, that padded texts are refused, or the name of the refusal."""
    refused = rows[rows["verdict"] == "refused"]
    if not len(refused):
        return OK
    (text,), (error,) = refused["text"], refused["reason"]
    if text == PADDED:
        return WHOLE_ONLY
    return next(name for words, name in REFUSALS.items() if words in error)


def codes() -> list[str]:
    """The classes of the installed TransformerLens."""
    return [code for code in CLASSES if code.endswith(str(zoo.TL_MAJOR))]


def cases() -> list[tuple[str, str]]:
    """(architecture, class code) for all that the installed TransformerLens has."""
    names = {"hooked": zoo.HOOKED_NAMES, "bridge": (*zoo.BRIDGE_NAMES, *zoo.HYBRID_NAMES)}
    return [(name, code) for code in codes() for name in names[CLASSES[code]]]


# --- the table as Markdown ------------------------------------------------------------------------------------------

NOTE = "<!-- Written by docs/support_table.py. Do not edit. -->"
END = "<!-- The end of what docs/support_table.py writes. -->"


def written() -> str:
    """The part of the page that this script writes."""
    _, start, rest = PAGE.read_text(encoding="utf-8").partition(NOTE)
    return start + rest.partition(END)[0]


def to_markdown(table: Table) -> str:
    """Architectures that behave alike are a group, and tools that do so share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for tool in TOOLS:
        rows.setdefault(tuple(row[tool] for row in table.values()), []).append(tool)
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for (name, code), row in table.items():
        groups.setdefault(tuple(row[tools[0]] for tools in rows.values()), {}).setdefault(name, []).append(code)
    letters = string.ascii_uppercase[: len(groups)]
    titles = [", ".join(f"`{tool}`" if tool.isidentifier() else tool for tool in tools) for tools in rows.values()]
    lines = [NOTE, "", *_table(["group", "architectures"], zip(letters, map(_names, groups.values()), strict=True))]
    return "\n".join([*lines, "", *_table(["tool", *letters], zip(titles, *groups, strict=True)), "", ""])


def _table(titles: list[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _names(where: dict[str, list[str]]) -> str:
    """Architectures, and behind those of the same classes their codes."""
    alike: dict[str, list[str]] = {}
    for name, found in where.items():
        alike.setdefault(" ".join(found), []).append(name)
    return "; ".join(f"{', '.join(names)} ({found})" for found, names in alike.items())


def from_markdown(text: str) -> Table:
    """The inverse."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    groups, tools = [row for row in rows if len(row) == 2][2:], [row for row in rows if len(row) > 2][2:]
    found = {
        (name, code): {tool.strip("`"): row[n] for row in tools for tool in row[0].split(", ")}
        for n, (_, architectures) in enumerate(groups, start=1)
        for names, codes in re.findall(r"([^;()]+) \(([^()]+)\)", architectures)
        for name in names.strip().split(", ")
        for code in codes.split()
    }
    return in_order(found)


def in_order(table: Table) -> Table:
    """By architecture and class, as the zoo has them."""
    order = [(name, code) for name in (*zoo.NAMES, *zoo.HYBRID_NAMES) for code in CLASSES]
    return {case: table[case] for case in order if case in table}


def main(tools: Sequence[str]) -> None:
    """Replace what the table says of the installed TransformerLens: of these tools, or of all."""
    torch.set_num_threads(1)
    table = from_markdown(written())
    kept = {case: row for case, row in table.items() if case[1] not in codes()}
    new = {(name, code): try_tools(zoo.load(CLASSES[code], name), tools or tuple(TOOLS)) for name, code in cases()}
    if tools:
        new = {case: table.get(case, {}) | row for case, row in new.items()}
    write(kept | new)
    print(f"{PAGE.name}: {len(new)} tried with TransformerLens {zoo.TL_MAJOR}, {len(kept)} kept")


def write(table: Table) -> None:
    """Put the table, in the order of the architectures, in its place on the page."""
    text = to_markdown(in_order(table))
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
