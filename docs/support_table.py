"""Which tool works with which architecture in which model class: tried, not typed.

Builds the tiny models of `tests/support/zoo.py` and runs `check_model` on each of them, on short texts, padded ones and
with a KV cache. A tool that refuses is noted with its error; one that runs and does something else stops this script.

    .venv/bin/python docs/support_table.py       # writes what holds for the installed TransformerLens
    .venv-tl4/bin/python docs/support_table.py   # and for the other one; what is there of the rest stays
    .venv/bin/python docs/support_table.py TOOL  # only this column

`tests/docs/test_docs.py` does the same and compares.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import pandas as pd
import torch

HERE = Path(__file__).parent
PAGE = HERE / "support.md"
sys.path.append(str(HERE.parent / "tests"))

from support import zoo  # noqa: E402

from tl_posdisent import check_model  # noqa: E402
from tl_posdisent.experiments.model_check import TOOLS  # noqa: E402

LENGTH = 12

OK = "✓"
MISSING = "not tried"
SHORT = {  # what a message says: what it is called in a cell, from the most particular
    "multi-head latent attention": "latent attention",
    "additive bias such as ALiBi": "additive bias",
    "no rotary position embedding": "no rotation",
    "hook_z": "z not by heads",
}
CLASSES = {"H2": "hooked", "H3": "hooked", "B3": "bridge", "B4": "bridge"}  # code in the table: kind in the zoo
Row = dict[str, str]
"""One architecture in one class: for every tool OK, or the error with which it refuses."""
Table = dict[tuple[str, str], Row]
"""By (architecture, class code)."""


# --- rows -------------------------------------------------------------------------------------------------------


def try_tools(model: Any, tools: Sequence[str] = tuple(TOOLS)) -> Row:
    """Every tool, or some, on one model."""
    table = check_model(model, tools=tools, lengths=LENGTH, progress=False)
    wrong = table[table["verdict"] == "wrong"]
    if len(wrong):
        raise AssertionError(f"a tool does something else than it says:\n{wrong.to_string()}")
    return {tool: _outcome(table[table["tool"] == tool]) for tool in tools}


def _outcome(rows: pd.DataFrame) -> str:
    """OK, the refusal, or OK but on which texts it refuses and why."""
    refused = rows[rows["verdict"] == "refused"]
    if not len(refused):
        return OK
    reasons = [f"{text}: {_shortened(reason)}" for text, reason in zip(refused["text"], refused["reason"], strict=True)]
    return _shortened(refused["reason"].iloc[0]) if len(rows) == 1 else f"{OK}; " + "; ".join(reasons)


def _shortened(error: str) -> str:
    """An error without what differs between tools and models, so that the same reason is given once."""
    words = error.replace("`", "'").split(" ")
    own = ("ForCausalLM", "LMHeadModel")  # ends of architectures' names
    words = ["…" if (bare := w.rstrip(":")).endswith(own) or bare in TOOLS else w for w in words]
    return re.sub(r"\d+", "…", " ".join(words))


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
    """Architectures that behave alike share a row, and tools that do so a column; refusals are quoted beneath."""
    refusals = [reason for row in table.values() for text in row.values() for reason in _refusals(text).values()]
    reasons = list(dict.fromkeys(refusals))
    columns: dict[tuple[str, ...], list[str]] = {}
    for tool in TOOLS:
        columns.setdefault(tuple(row.get(tool, MISSING) for row in table.values()), []).append(tool)
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for case, row in table.items():
        name, code = case
        cells = tuple(_cell(row.get(tools[0], MISSING), reasons) for tools in columns.values())
        rows.setdefault(cells, {}).setdefault(name, []).append(code)
    titles = [", ".join(f"`{tool}`" if tool.isidentifier() else tool for tool in tools) for tools in columns.values()]
    lines = [NOTE, "", _line(["architectures", *titles]), "| --- " * (1 + len(titles)) + "|"]
    lines += [_line([_names(where), *cells]) for cells, where in rows.items()]
    return "\n".join([*lines, "", *(f"{n}. `{text}`" for n, text in enumerate(reasons, 1)), "", ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _names(where: dict[str, list[str]]) -> str:
    """Architectures, and behind those of the same classes their codes."""
    alike: dict[str, list[str]] = {}
    for name, found in where.items():
        alike.setdefault(" ".join(sorted(found, key=list(CLASSES).index)), []).append(name)
    return "; ".join(f"{', '.join(names)} ({found})" for found, names in alike.items())


def _refusals(text: str) -> dict[str, str]:
    """What a tool refuses, by the text on which it does; "" stands for every text."""
    if text in (OK, MISSING):
        return {}
    if not text.startswith(OK):
        return {"": text}
    return dict(part.split(": ", 1) for part in re.split("; (?=padded:|KV cache:)", text)[1:])


def _cell(text: str, reasons: list[str]) -> str:
    """OK, or a word or two for each refusal, and the number under which it is quoted."""
    numbered = {where: reasons.index(reason) + 1 for where, reason in _refusals(text).items()}
    if "" in numbered:
        return f"{next((short for words, short in SHORT.items() if words in text), 'refused')} ({numbered['']})"
    parts = ", ".join(f"not {where} ({number})" for where, number in numbered.items())
    return f"{OK} {parts}" if parts else text


def from_markdown(text: str) -> Table:
    """The inverse."""
    reasons = {line.split(".")[0]: line.split("`")[1] for line in text.splitlines() if line[:1].isdigit()}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    columns = [[tool.strip("`") for tool in title.split(", ")] for title in rows[0][1:]]
    found = {
        (name, code): {
            tool: _outcome_of(cell, reasons) for tools, cell in zip(columns, cells, strict=True) for tool in tools
        }
        for architectures, *cells in rows[2:]
        for names, codes in re.findall(r"([^;()]+) \(([^()]+)\)", architectures)
        for name in names.strip().split(", ")
        for code in codes.split()
    }
    order = [(name, code) for name in (*zoo.NAMES, *zoo.HYBRID_NAMES) for code in CLASSES]
    return {case: found[case] for case in order if case in found}


def _outcome_of(cell: str, reasons: dict[str, str]) -> str:
    refused = re.findall(r"not (padded|KV cache) \((\d+)\)", cell)
    if cell.startswith(OK):
        return "; ".join([OK, *(f"{where}: {reasons[number]}" for where, number in refused)])
    return reasons.get(cell.rpartition("(")[2].rstrip(")"), cell)


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
    order = [(name, code) for name in (*zoo.NAMES, *zoo.HYBRID_NAMES) for code in CLASSES]
    text = to_markdown({case: table[case] for case in order if case in table})
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
