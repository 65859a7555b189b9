"""Principal angles of the positional subspaces of models of six layers of 16 heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.linalg import subspace_angles
from shared.rows import TABLES

from tl_posdisent.experiments import positional_subspace
from tl_posdisent.synthetic import load_checkpoint, preset

MEDIUM = preset("medium")
KEY = ["encoding", "task", "seed", "model", "layer"]


def angles(folder: Path) -> pd.DataFrame:
    """Principal angles, in degrees, of the four leading positional directions before layer 0 and each later layer, of
    the models that ``deposit_96_heads`` trained into the folder."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "trainings").glob("gap*-sinusoidal*-seed*.safetensors")):
        task, encoding, seed = path.stem.split("-")
        tokens, _ = MEDIUM.tasks[task].batch(512, seed=99)
        lengths = (tokens != MEDIUM.model(encoding, task).config.pad_id).sum(1)
        width = int(lengths.double().quantile(0.75))
        texts = tokens[lengths >= width][:, :width]
        for state, model in (("new", MEDIUM.model(encoding, task, int(seed[4:]))), ("trained", load_checkpoint(path))):
            subspaces = [positional_subspace(model, texts, layer, rank=4) for layer in range(6)]
            for layer, subspace in enumerate(subspaces):
                degrees = np.rad2deg(subspace_angles(subspaces[0].basis.numpy(), subspace.basis.numpy()))
                row = {"encoding": encoding, "task": task, "seed": seed, "model": state, "layer": layer}
                rows.append(row | {"share": subspace.share} | {f"angle{n}": x for n, x in enumerate(degrees)})
    return pd.DataFrame(rows).round(2)


def main(folder: str) -> None:
    """Write ``tables/displaced_subspace.csv``: new models replace those of the same name."""
    path = TABLES / "displaced_subspace.csv"
    both = pd.concat([angles(Path(folder)), pd.read_csv(path)])
    both.drop_duplicates(KEY).sort_values(KEY, ignore_index=True).to_csv(path, index=False)
