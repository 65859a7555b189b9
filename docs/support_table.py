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
TABLE = HERE / "support_table.md"
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
    return " ".join(words)


def codes() -> list[str]:
    """The classes of the installed TransformerLens."""
    return [code for code in CLASSES if code.endswith(str(zoo.TL_MAJOR))]


def cases() -> list[tuple[str, str]]:
    """(architecture, class code) for all that the installed TransformerLens has."""
    names = {"hooked": zoo.HOOKED_NAMES, "bridge": (*zoo.BRIDGE_NAMES, *zoo.HYBRID_NAMES)}
    return [(name, code) for code in codes() for name in names[CLASSES[code]]]


# --- the table as Markdown ------------------------------------------------------------------------------------------

NOTE = "<!-- Written by docs/support_table.py. Do not edit. -->"
HEADER = (
    "| architecture | Hugging Face class | where | "
    + " | ".join(f"`{tool}`" if tool.isidentifier() else tool for tool in TOOLS)
    + " |"
)


def to_markdown(table: Table) -> str:
    """Architectures that behave alike in several classes share a row; refusals are numbered and quoted beneath."""
    reasons = list(dict.fromkeys(text for row in table.values() for text in row.values() if text not in (OK, MISSING)))
    lines = [NOTE, HEADER, "| --- " * (3 + len(TOOLS)) + "|"]
    for name in (*zoo.NAMES, *zoo.HYBRID_NAMES):
        alike: dict[tuple[str, ...], list[str]] = {}
        for code in CLASSES:
            if (name, code) in table:
                alike.setdefault(tuple(table[name, code].get(tool, MISSING) for tool in TOOLS), []).append(code)
        for row, where in alike.items():
            cells = [text if text in (OK, MISSING) else _named(text, reasons.index(text) + 1) for text in row]
            lines.append(f"| {' | '.join([name, zoo.ARCHITECTURES[name].model, ' '.join(where), *cells])} |")
    return "\n".join([*lines, "", *(f"{n}. `{text}`" for n, text in enumerate(reasons, 1)), ""])


def _named(error: str, number: int) -> str:
    """A refusal in a cell: in a word or two why, and under which number it is quoted."""
    if error.startswith(OK):
        return f"{OK} not {', '.join(re.findall('; (padded|KV cache): ', error))} ({number})"
    return f"{next((short for words, short in SHORT.items() if words in error), 'refused')} ({number})"


def from_markdown(text: str) -> Table:
    """The inverse."""
    reasons = {line.split(".")[0]: line.split("`")[1] for line in text.splitlines() if line[:1].isdigit()}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    tools = [title.strip("`") for title in rows[0][3:]]
    return {
        (name, code): {
            tool: reasons.get(cell.rpartition("(")[2].rstrip(")"), cell)
            for tool, cell in zip(tools, cells, strict=True)
        }
        for name, _, where, *cells in rows[2:]
        for code in where.split()
    }


def main(tools: Sequence[str]) -> None:
    """Replace what the table says of the installed TransformerLens: of these tools, or of all."""
    torch.set_num_threads(1)
    table = from_markdown(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    kept = {case: row for case, row in table.items() if case[1] not in codes()}
    new = {(name, code): try_tools(zoo.load(CLASSES[code], name), tools or tuple(TOOLS)) for name, code in cases()}
    if tools:
        new = {case: table.get(case, {}) | row for case, row in new.items()}
    TABLE.write_text(to_markdown(kept | new), encoding="utf-8")
    print(f"{TABLE.name}: {len(new)} tried with TransformerLens {zoo.TL_MAJOR}, {len(kept)} kept")


if __name__ == "__main__":
    main(sys.argv[1:])
