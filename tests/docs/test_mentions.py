"""Pages mention every public name and quote messages that exist; the table of the README leads to all subjects."""

from __future__ import annotations

import ast
import re

from support.imports import parsed, sources
from support.pages import PAGES, ROOT
from support.public import public_names

DOCS = ROOT / "docs"


def prose() -> str:
    """All pages but those of the API, which have every name anyway, and the changelog."""
    left_out = ("api", "CHANGELOG")
    texts = [p.read_text(encoding="utf-8") for p in PAGES if not p.relative_to(ROOT).as_posix().startswith("docs/api")]
    assert len(texts) > 30, left_out
    return "\n".join(texts)


def test_every_public_name_is_mentioned_on_a_page() -> None:
    """A function that no guide and no table names is found by nobody."""
    text = prose()
    silent = [name for name in public_names() if not re.search(rf"\b{name}\b", text)]
    assert silent == []


def messages() -> list[str]:
    """Every string of the package, with … for what is put into it; that of an ArgumentError behind its argument."""
    found = []
    for path in sources().values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                found.append(written(node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("ArgumentError", "ContextExceeded"):
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
    assert len(rows) > 35
    gone = []
    for row in rows:
        parts = [part.strip() for part in row.split("…") if len(part.strip()) > 3]
        if not any(all(part in text for part in parts) for text in known):
            gone.append(row)
    assert gone == []


def test_the_readme_leads_to_every_page_of_tools() -> None:
    """The table of questions names a page for each subject of the toctrees of tools; no group is longer than nine."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    groups = dict(re.findall(r":caption: (.*?)\n.*?\n\n(.*?)\n```", index, re.DOTALL))
    assert max(len(pages.split()) for pages in groups.values()) <= 9
    tools = " ".join(groups[name] for name in ("Fits and measures", "Causal tools", "Figures, report, sweeps"))
    left_out = {"position_interventions"}  # a link to the guide, which is named
    assert [name for name in tools.split() if name not in left_out and f"docs/{name}.md" not in readme] == []
