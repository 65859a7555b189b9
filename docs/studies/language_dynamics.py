"""The heads of the demo model in the course of its training.

``python docs/studies language_dynamics FOLDER`` measures the checkpoints ``step-*.safetensors`` of a folder that
``examples/train_demo_model.py`` has written, some seconds each.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from shared.rows import TABLES
from shared.texts import demo_texts

import tl_posdisent as tp

SINKS = 50


def measured(checkpoint: Path, tokens: torch.Tensor) -> pd.DataFrame:
    """One row per head: r of the text, r and the distance share at controlled distances, and the loss."""
    model = tp.load_demo_model(backend="bridge", checkpoint=checkpoint)
    table = tp.disentanglement(model, tokens, sinks=SINKS, progress=False)
    shares = tp.controlled_distance(model, tokens, sinks=SINKS, progress=False)
    with torch.no_grad():
        loss = model(tokens, return_type="loss").item()
    table = table.merge(shares[["layer", "head", "distance"]], on=["layer", "head"])
    table.insert(0, "step", int(checkpoint.stem.removeprefix("step-")))
    return table.assign(loss=loss)


def main(folder: str) -> None:
    """Write ``tables/language_dynamics.csv``."""
    tables = [measured(path, demo_texts(7, 450)) for path in sorted(Path(folder).glob("step-*.safetensors"))]
    pd.concat(tables).round(4).to_csv(TABLES / "language_dynamics.csv", index=False)
