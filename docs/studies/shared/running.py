"""Find studies by the names of their files, run them, and write what they give where pages read it.

A study has one of these functions: ``rows(model, source)`` yields numbers of the page of results, ``synthetic_rows()``
those of small models, ``table(model)`` returns a table of one model, and ``main(*words)`` writes its files itself.
"""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

import tl_posdisent as tp
from shared.rows import TABLES
from shared.texts import Source
from shared.writing import FINDINGS, write_study

FOLDER = Path(__file__).parents[1]


def first_lines() -> dict[str, str]:
    """The first sentence of each study, by its name."""
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__main__"]
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in texts.items()}


def unknown(names: Sequence[str]) -> list[str]:
    """The names, up to the first study that takes words, that are no studies."""
    for n, name in enumerate(names):
        if name != "findings" and not (FOLDER / f"{name}.py").is_file():
            return list(names[n:])
        if name != "findings" and hasattr(study(name), "main"):
            return []
    return []


def study(name: str) -> ModuleType:
    """The module of a study."""
    return importlib.import_module(name)


def run(names: Sequence[str], model_name: str, source: Source, out: Path | None) -> None:
    """Run studies one after another; the words behind one that writes its files itself are its own."""
    torch.set_num_threads(1)
    wanted = [study_name for name in names for study_name in (FINDINGS if name == "findings" else [name])]
    model = None
    if needs_model(wanted):
        model = tp.load_demo_model() if model_name == "demo" else tp.load_model(model_name)
    for n, name in enumerate(wanted):
        if hasattr(study(name), "main"):
            study(name).main(*wanted[n + 1 :])
            return
        start = time.monotonic()
        write_study(study(name), model, model_name, source, out or TABLES)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if out:
        (out / "results.md").write_text(study("results_page").page(out), encoding="utf-8")


def needs_model(names: Sequence[str]) -> bool:
    """Whether the studies before the first one with words of its own measure a model."""
    for name in names:
        if hasattr(study(name), "main"):
            return False
        if hasattr(study(name), "rows") or hasattr(study(name), "table"):
            return True
    return False
