"""Find studies by the names of their files, run them, and write what they give where pages read it.

A study has one of these functions: ``rows(model, source)`` yields numbers of the page of results, ``synthetic_rows()``
those of small models, ``table(model)`` returns a table of one model, and ``main(*words)`` writes its files itself.
"""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch

import tl_posdisent as tp
from shared.rows import TABLES, Row, write
from shared.texts import Source, digest, parts

FOLDER = Path(__file__).parents[1]
# In the order of their rows.
FINDINGS = ["additive", "controlled", "far_shares", "subspaces", "capacity", "concentration", "far_distance"]
FINDINGS += ["fixed_distance", "key_component", "bound", "perturbation", "questions", "layer_tolerance", "beyond"]
FINDINGS += ["far_positions"]
SYNTHETIC = ["initial", "margins", "leading", "toeplitz", "angles", "displaced"]


def first_lines() -> dict[str, str]:
    """The first sentence of each study, by its name."""
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__main__"]
    texts = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths}
    return {name: " ".join(text.split("\n\n")[0].split()) for name, text in texts.items()}


def run(names: Sequence[str], model_name: str, source: Source, out: Path | None) -> None:
    """Run studies one after another; the words behind one that writes its files itself are its own."""
    torch.set_num_threads(1)
    wanted = [study for name in names for study in (FINDINGS if name == "findings" else [name])]
    for n, name in enumerate(wanted):
        module, start = importlib.import_module(name), time.monotonic()
        if hasattr(module, "main"):
            module.main(*wanted[n + 1 :])
            return
        write_study(module, model_name, source, out or TABLES)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if out:
        (out / "results.md").write_text(importlib.import_module("results_page").page(out), encoding="utf-8")


@cache
def loaded(name: str) -> Any:
    return tp.load_demo_model(backend="bridge") if name == "demo" else tp.load_model(name, backend="bridge")


def write_study(module: ModuleType, model_name: str, source: Source, folder: Path) -> None:
    """Run one study, and write its rows or its table."""
    name = module.__name__
    if hasattr(module, "rows"):
        model, order = loaded(model_name), ["texts", *FINDINGS]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{model_name}_{source}.csv"
        write(path, "texts", [number_of_texts(model, source, length) for length in (256, 1024)], order)
        write(path, name, shown(name, module.rows(model, source)), order)
    elif hasattr(module, "synthetic_rows"):
        write(TABLES / "synthetic.csv", name, shown(name, module.synthetic_rows()), SYNTHETIC)
    else:
        path = TABLES / model_name.partition("-")[0] / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        options = getattr(module, "GEMMA", {}) if path.parent.name == "gemma3" else {}
        module.table(loaded(model_name), **options).round(5).to_csv(path, index=False)


def shown(name: str, rows: Iterable[Row]) -> list[Row]:
    """Print rows as they come, and return them."""
    finished = []
    for row in rows:
        finished.append(row)
        spread = "" if pd.isna(row.error) else f" ± {row.error:.3f}"
        print(f"{name}: {row.name}: {row.value:.3f}{spread} ({row.over} of {row.length})", flush=True)
    return finished


def number_of_texts(model: Any, source: Source, length: int) -> Row:
    """How many texts of a length there are, at most eight, and the hash of their ids."""
    texts = parts(model, source, 8, length)
    return Row("texts", len(texts), torch.nan, "", length, f"SHA-256 of the ids {digest(texts)} …")
