"""Run the notebooks of ``examples/`` and store what they show, as images that need no script.

    python docs/notebooks.py 06_smollm2   # which; all by default

Figures are drawn by plotly's exporter (``pip install kaleido``), widgets by Chromium (Playwright drives it): a widget's
HTML is 1.3 MB, and code hosts do not run it. What goes to stderr is dropped.
"""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image
from playwright.sync_api import sync_playwright

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDGET = re.compile(r"Widget\('")


def run(path: Path) -> None:
    """Run one notebook from the top, in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    shown = [out.data for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs if "data" in out]
    widgets = [data for data in shown if WIDGET.match(data.get("text/plain", ""))]
    for data, image in zip(widgets, screenshots([data.pop("text/html") for data in widgets]), strict=True):
        data["image/png"] = base64.b64encode(image).decode("ascii") + "\n"
    for data in shown:
        if "image/png" in data:
            data["image/png"] = base64.b64encode(smaller(base64.b64decode(data["image/png"]))).decode("ascii") + "\n"
    nbformat.write(notebook, path)


@contextmanager
def browser() -> Iterator[Any]:
    """The system's Chromium."""
    with sync_playwright() as playwright:
        path = os.environ.get("POSDISENT_CHROMIUM") or shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def screenshots(pages: list[str]) -> list[bytes]:
    """Each widget as a browser draws it."""
    images = []
    with browser() as chromium:
        for page_html in pages:
            page = chromium.new_page(viewport={"width": 1150, "height": 400})
            page.set_content(f"<!doctype html><meta charset='utf-8'>{page_html}")
            page.wait_for_timeout(3000)  # charts are drawn in several steps
            images.append(page.locator("div.tl-posdisent").screenshot())
    return images


def smaller(png: bytes) -> bytes:
    """The image with 256 colours."""
    written = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE).save(
        written, "PNG", optimize=True
    )
    return written.getvalue()


def main(names: list[str]) -> None:
    os.environ |= {"PLOTLY_RENDERER": "png", "HF_HUB_OFFLINE": "1"}
    found: list[Any] = sorted(EXAMPLES.glob("*.ipynb"))
    for path in found:
        if not names or path.stem in names:
            run(path)


if __name__ == "__main__":
    main(sys.argv[1:])
