"""How far does the positional subspace move from that of the embedded text?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import torch
from shared.rows import TABLES, Row, row

ANGLES = TABLES / "displaced_subspace.csv"


def synthetic_rows() -> Iterator[Row]:
    """How far the positional subspace moves from that of the embedded text: hybrids, absolute positions alone, and both
    before training, of six layers of 16 heads (study ``displaced_subspace``)."""
    table = pd.read_csv(ANGLES)
    names = {"sinusoidal": "absolute", "sinusoidal_rope": "hybrid"}
    for (encoding, state, layer), part in table.groupby(["encoding", "model", "layer"]):
        name = f"before layer {layer}, {names[encoding]}, {'untrained' if state == 'new' else state}"
        for label, column in (("largest", "angle0"), ("second", "angle1"), ("smallest", "angle3")):
            yield row(
                f"{label} of four angles {name}",
                torch.tensor(part[column].to_numpy()),
                0,
                "scipy.linalg.subspace_angles(...)",
                "models",
            )
