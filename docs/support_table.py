"""Which tool works with which architecture in which model class: tried, not typed.

Builds the tiny models of `tests/support/zoo.py` and compares every tool on each of them with attention summed by hand
(`tests/support/attention_law.py`). What a tool refuses has a name in its cell; one that breaks the law stops it.

    .venv/bin/python docs/support_table.py       # writes what holds for the installed TransformerLens
    .venv-tl4/bin/python docs/support_table.py   # and for the other one; what is there of the rest stays

`tests/laws/test_attention_by_hand.py` does the same and compares.
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

import torch

HERE = Path(__file__).parent
PAGE = HERE / "support.md"
sys.path.append(str(HERE.parent / "tests"))

from support import zoo  # noqa: E402
from support.attention_law import TOOLS, tried  # noqa: E402

OK = "✓"
REFUSALS = {  # words of an error: what it is called in a cell
    "additive bias such as ALiBi": "additive bias",
    "no rotary position embedding": "no rotation",
}
CLASSES = {"H3": "hooked", "B3": "bridge", "B4": "bridge"}  # code in the table: kind in the zoo
Row = dict[str, str]
"""One architecture in one class: the cell of every tool, OK or the name of its refusal."""
Table = dict[tuple[str, str], Row]
"""By (architecture, class code)."""


# --- rows -------------------------------------------------------------------------------------------------------


def try_tools(model: Any) -> Row:
    """Every tool on one model: OK, or the name of its refusal."""
    return {tool: _cell(why) for tool, why in tried(model).items()}


def _cell(why: str) -> str:
    return next(name for words, name in REFUSALS.items() if words in why) if why else OK


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


def main() -> None:
    """Replace what the table says of the installed TransformerLens."""
    torch.set_num_threads(1)
    kept = {case: row for case, row in from_markdown(written()).items() if case[1] not in codes()}
    new = {(name, code): try_tools(zoo.load(CLASSES[code], name)) for name, code in cases()}
    write(kept | new)
    print(f"{PAGE.name}: {len(new)} tried with TransformerLens {zoo.TL_MAJOR}, {len(kept)} kept")


def write(table: Table) -> None:
    """Put the table, in the order of the architectures, in its place on the page."""
    text = to_markdown(in_order(table))
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
