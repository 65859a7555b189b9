"""Write what a study gives where pages read it: rows, or a table of one model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch

from shared.rows import TABLES, Row, write
from shared.texts import Source, digest, parts

# In the order of their rows.
FINDINGS = ["additive", "controlled", "far_shares", "subspaces", "capacity", "concentration", "far_distance"]
FINDINGS += ["fixed_distance", "key_component", "bound", "perturbation", "questions", "layer_tolerance", "beyond"]
FINDINGS += ["far_positions"]
SYNTHETIC = ["initial", "margins", "leading", "toeplitz", "angles", "displaced"]


def write_study(module: ModuleType, model: Any, model_name: str, source: Source, folder: Path) -> None:
    """Run one study, and write its rows or its table."""
    name = module.__name__
    if hasattr(module, "rows"):
        folder.mkdir(parents=True, exist_ok=True)
        path, order = folder / f"{model_name}_{source}.csv", ["texts", *FINDINGS]
        write(path, "texts", [number_of_texts(model, source, length) for length in (256, 1024)], order)
        write(path, name, shown(name, module.rows(model, source)), order)
    elif hasattr(module, "synthetic_rows"):
        write(TABLES / "synthetic.csv", name, shown(name, module.synthetic_rows()), SYNTHETIC)
    else:
        path = TABLES / model_name.partition("-")[0] / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        options = getattr(module, "GEMMA", {}) if path.parent.name == "gemma3" else {}
        module.table(model, **options).round(5).to_csv(path, index=False)


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
