"""The notebooks run from a clean kernel and print what they were committed with."""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from support.packaged_models import needs
from support.pages import ROOT, assert_prints

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MINUTES = ("06_smollm2", "07_indirect_object")
"""Notebooks that take minutes, run with ``POSDISENT_NOTEBOOKS=1`` alone."""


# What a notebook finds that runs where others ran: nothing of theirs, this package not yet imported, the seed and the
# options that torch and pandas have of themselves, an empty folder. Starting a kernel and importing what is not ours
# takes as long as many a notebook.
AS_NEW = """
%reset -f
import gc, os, sys
import pandas, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "tl_posdisent"]:
    del sys.modules[name]
gc.collect()
pandas.reset_option("^(display|styler)")
torch.manual_seed(67280421310721)
os.chdir({folder!r})
%reset -f
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncKernelManager]:
    """A kernel that knows nothing of this process."""
    folder = tmp_path_factory.mktemp("kernel")
    own = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in own.items():
            environment.setenv(name, value)
        manager = AsyncKernelManager(kernel_name="python3")
        run_sync(manager.start_kernel)(cwd=str(folder))
        yield manager
        run_sync(manager.shutdown_kernel)(now=True)


@pytest.fixture
def run(kernel: AsyncKernelManager, tmp_path: Path) -> Any:
    """Run a notebook as in a new kernel, away from the project's folder."""

    def execute(notebook: Any) -> Any:
        first = nbformat.v4.new_code_cell(AS_NEW.format(folder=str(tmp_path)))
        notebook.cells.insert(0, first)
        client = NotebookClient(notebook, km=kernel, timeout=300)
        try:
            client.execute()
        finally:
            client.kc.stop_channels()
        assert notebook.cells.pop(0) is first
        return notebook

    return execute


def read(path: Path) -> Any:
    """A notebook without its outputs, if the model that it loads is installed."""
    notebook = nbformat.read(path, as_version=4)
    if any('"smollm2"' in cell.source for cell in notebook.cells):
        needs("smollm2")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def printed(cell: Any) -> str:
    """What a code cell shows as plain text; what goes to stderr is the environment's business."""
    shown = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return "\n".join(x for x, out in zip(shown, cell.outputs, strict=True) if out.get("name") != "stderr")


def outputs(cell: Any) -> list[Any]:
    """The data of what a code cell shows, by MIME type."""
    return [out.data for out in cell.get("outputs", []) if "data" in out]


def is_figure(data: Any) -> bool:
    """Whether an output is a figure or a widget, as a kernel sends it or as an image."""
    return "image/png" in data or any("plotly" in kind for kind in data) or "Widget('" in data.get("text/plain", "")


def colours(png: bytes) -> int:
    """How many values the pixels of a PNG with a palette have, or pairs of pixels: an empty figure has one."""
    chunks, at = {}, 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        chunks.setdefault(png[at + 4 : at + 8], bytearray()).extend(png[at + 8 : at + 8 + size])
        at += 12 + size
    return len(set(zlib.decompress(bytes(chunks[b"IDAT"]))))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_what_it_shows(path: Path, run: Any) -> None:
    if path.stem in MINUTES and not os.environ.get("POSDISENT_NOTEBOOKS"):
        pytest.skip("takes minutes: POSDISENT_NOTEBOOKS=1 runs it")
    fresh = run(read(path))
    for cell, shown in zip(fresh.cells, nbformat.read(path, as_version=4).cells, strict=True):
        if cell.cell_type == "code":
            assert_prints(printed(cell), printed(shown))
            assert [is_figure(data) for data in outputs(cell)] == [is_figure(data) for data in outputs(shown)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_figures_are_images_without_a_script(path: Path) -> None:
    # Code hosts and pages of nbconvert run no script of an output, and load nothing for it.
    for data in [data for cell in nbformat.read(path, as_version=4).cells for data in outputs(cell)]:
        assert set(data) <= {"text/plain", "text/html", "image/png"}
        assert not re.search(r"<script|<iframe|<link|src=|https?:", data.get("text/html", ""))
        if is_figure(data):
            assert "text/html" not in data
            assert colours(base64.b64decode(data["image/png"])) > 16


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_no_error_and_no_path_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(out.output_type != "error" for cell in code for out in cell.outputs)
