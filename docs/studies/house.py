"""The folders of the package and who imports whom, for the guide for contributors: ``docs/figures/house.svg``.

Everything in the picture is read from the sources: the folders, their first sentences, and the imports, of which those
that follow from others are left out.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from support.imports import FOLDERS, PACKAGE, import_graph, parsed  # noqa: E402

ROW, LEFT, WIDTH, ARCS = 34, 16, 760, 200


def folder_imports() -> dict[str, set[str]]:
    """The folders that each folder imports from."""
    imports: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for module, others in import_graph().items():
        if module == ("__main__",):
            continue  # the command line, which is in no folder
        imports[module[0]] |= {other[0] for other in others if other and other[0] != module[0]}
    return imports


def direct(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the imports that follow from others: if a imports b and b imports c, no arc is drawn from a to c."""
    reached: dict[str, set[str]] = {}
    for folder in FOLDERS:  # from below, so what lies below is known
        reached[folder] = set().union(imports[folder], *(reached[other] for other in imports[folder]))
    return {
        folder: {x for x in imported if not any(x in reached[y] for y in imported)}
        for folder, imported in imports.items()
    }


def first_sentence(folder: str) -> str:
    """What the folder's ``__init__`` says first."""
    text = ast.get_docstring(parsed(PACKAGE / folder / "__init__.py")) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("``", "")


def house() -> str:
    """The picture as SVG, the highest folder on top; an arc leads from a folder down to one that it imports."""
    rows = {folder: ROW * (len(FOLDERS) - i) - ROW // 2 for i, folder in enumerate(FOLDERS)}
    height, edge = ROW * len(FOLDERS), LEFT + WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {edge + ARCS} {height}" font-family="sans-serif">',
        f'<rect width="{edge + ARCS}" height="{height}" fill="#fff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#4a6fa5"/></marker></defs>',
    ]
    for folder, y in rows.items():
        parts.append(f'<rect x="{LEFT}" y="{y - 14}" width="{WIDTH}" height="28" rx="4" fill="#f2f5fa"/>')
        parts.append(f'<text x="{LEFT + 10}" y="{y + 5}" font-size="15" font-weight="bold">{folder}/</text>')
        parts.append(f'<text x="{LEFT + 125}" y="{y + 4}" font-size="12">{escape(first_sentence(folder))}</text>')
    for folder, others in direct(folder_imports()).items():
        for other in sorted(others):
            start, end = rows[folder] + 5, rows[other] - 5
            far = edge + min(ARCS - 10, 14 + 0.62 * (end - start))
            curve = f"M{edge} {start}C{far:.0f} {start} {far:.0f} {end} {edge + 2} {end}"
            parts.append(
                f'<path d="{curve}" fill="none" stroke="#4a6fa5" marker-end="url(#tip)">'
                f"<title>{folder} imports {other}</title></path>"
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    (HERE.parent / "figures" / "house.svg").write_text(house(), encoding="utf-8")
