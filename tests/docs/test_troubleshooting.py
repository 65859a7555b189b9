"""The messages that the page on troubleshooting explains exist."""

from __future__ import annotations

import ast
import re

from support.imports import parsed, sources
from support.pages import ROOT

DOCS = ROOT / "docs"


def messages() -> list[str]:
    """Every string of the package, with … for what is put into it; that of an ArgumentError behind its argument."""
    found = []
    for path in sources().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(written(node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "ArgumentError":
                found.append(" ".join(written(x) for x in node.args[:2]))
    return found


def written(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"


def quoted() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \|$", page, re.MULTILINE)
    return [row for row in rows if row not in ("message",)]


def test_messages_of_the_troubleshooting_page_exist() -> None:
    rows, known = quoted(), [re.sub(r"(…[ '()]*)+", "…", text) for text in messages()]
    assert rows
    gone = []
    for row in rows:
        parts = [part.strip() for part in row.split("…") if len(part.strip()) > 3]
        if not any(all(part in text for part in parts) for text in known):
            gone.append(row)
    assert gone == []
