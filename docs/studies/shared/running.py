"""Find studies by the names of their files, run them, and write what they give where pages read it.

A study has one of these functions: ``rows(model, source)`` yields numbers of the page of results, ``synthetic_rows()``
those of small models, ``table(model)`` returns a table of one model, ``figure()`` a picture, and ``main(*words)``
writes its files itself.
"""

from __future__ import annotations

import ast
import importlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch

import tl_posdisent as tp
from shared.rows import TABLES, Row, write
from shared.saving import save
from shared.texts import Source, digest, parts

FOLDER = Path(__file__).parents[1]
# In the order of their rows.
FINDINGS = ["additive", "controlled", "far_shares", "subspaces", "capacity", "concentration", "far_distance"]
FINDINGS += ["far_by_layer", "fixed_distance", "layers", "key_component", "bound", "sets", "rungs", "perturbation"]
FINDINGS += ["questions", "layer_tolerance", "static_heads", "beyond", "remedies", "far_positions"]
SYNTHETIC = ["initial", "accuracy", "margins", "leading", "toeplitz", "angles", "displaced"]


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
    wanted = [each for name in names for each in (FINDINGS if name == "findings" else [name])]
    if wanted and hasattr(study(wanted[0]), "main"):
        study(wanted[0]).main(*wanted[1:])
        return
    model = None
    if any(hasattr(study(name), kind) for name in wanted for kind in ("rows", "table")):
        model = tp.load_demo_model() if model_name == "demo" else tp.load_model(model_name)
    for name in wanted:
        start = time.monotonic()
        write_study(name, model, model_name, source, out or TABLES)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if out:
        (out / "results.md").write_text(study("results_page").page(out), encoding="utf-8")


def write_study(name: str, model: Any, model_name: str, source: Source, folder: Path) -> None:
    """Run one study, and write its rows, its table or its picture."""
    module = study(name)
    if hasattr(module, "rows"):
        folder.mkdir(parents=True, exist_ok=True)
        path, order = folder / f"{model_name}_{source}.csv", ["texts", *FINDINGS]
        write(path, "texts", [number_of_texts(model, source, length) for length in (256, 1024)], order)
        write(path, name, shown(name, module.rows(model, source)), order)
    elif hasattr(module, "synthetic_rows"):
        write(TABLES / "synthetic.csv", name, shown(name, module.synthetic_rows()), SYNTHETIC)
    elif hasattr(module, "table"):
        path = TABLES / model_name.partition("-")[0] / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        options = getattr(module, "GEMMA", {}) if path.parent.name == "gemma3" else {}
        module.table(model, **options).round(5).to_csv(path, index=False)
    else:
        save(module.figure(), name.removesuffix("_figure"), *module.SIZE)


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
