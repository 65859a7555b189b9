"""Targets of the links of a Markdown page or notebook, and links without a target. No network is used."""

from __future__ import annotations

import json
import re
from pathlib import Path

_FENCED = re.compile(r"^(`{3,}) *([^\s`]*)[^\n`]*\n(?:.*?\n)??\1$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"``[^\n]+?``|`[^`\n]+`")
_LINKS = [
    re.compile(r"\]\(<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\)"),  # [text](target), ![alt](target), text over several lines
    re.compile(r"^\[[^\]]+\]: *(\S+)", re.MULTILINE),  # [text]: target
    re.compile(r"^`{3,}\{(?:image|figure|include)\} *(\S+)", re.MULTILINE),
    re.compile(r"(?:src|href)=\"([^\"]+)\""),
]
_BUILT = {"demo_report.html"}  # beside the page, by `make docs`
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def text_of(path: Path) -> str:
    """Return the text of a page, or of the Markdown cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return text


def without_code(page: str, *, directives: bool) -> str:
    """A page without its blocks of code; MyST's directives are such blocks, and may stay."""
    return _FENCED.sub(lambda block: block[0] if directives and block[2].startswith("{") else "", page)


def links_of(page: str) -> list[str]:
    """All targets, entries of toctrees included; code is left out."""
    prose = without_code(page, directives=True)
    entries = [line for tree in _TOCTREE.findall(prose) for line in tree.splitlines() if line and line[0] != ":"]
    prose = _INLINE.sub("", prose)
    return [link for pattern in _LINKS for link in pattern.findall(prose)] + [f"{entry}.md" for entry in entries]


def anchors_of(page: str) -> set[str]:
    """What can stand behind ``#``: headings as code hosts and MyST spell them, and ids that are set by hand."""
    found: list[str] = []
    for heading in _HEADING.findall(without_code(page, directives=False)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        same = sum(re.fullmatch(re.escape(slug) + r"(-\d+)?", other) is not None for other in found)
        found.append(f"{slug}-{same}" if same else slug)
    return {*found, *re.findall(r"^\(([\w-]+)\)=$", page, re.MULTILINE)}


def broken_links(path: Path) -> list[str]:
    """Every link of a page that leads to no file or to no heading of it, with the reason."""
    broken = []
    for link in links_of(text_of(path)):
        if re.match(r"[a-z]+:", link):
            if not re.fullmatch(r"https://[\w.-]+\.[a-z]+(/\S*)?", link):
                broken.append(f"{link}: not an https address")
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if name in _BUILT:
            continue
        if not target.exists():
            broken.append(f"{link}: there is no {name}")
        elif anchor and (target.suffix not in (".md", ".ipynb") or anchor not in anchors_of(text_of(target))):
            broken.append(f"{link}: there is no heading #{anchor}")
    return broken
