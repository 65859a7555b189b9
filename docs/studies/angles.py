"""How far does the positional subspace move from that of the embedded text?"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import torch
from shared.rows import TABLES, Row, row

NAMES = {"sinusoidal": "absolute", "sinusoidal_rope": "hybrid"}


def synthetic_rows() -> Iterator[Row]:
    """Of hybrids and of absolute positions alone, trained and not: six layers of 16 heads (``displaced_subspace``)."""
    table = pd.read_csv(TABLES / "displaced_subspace.csv")
    for (encoding, state, layer), part in table.groupby(["encoding", "model", "layer"]):
        name = f"before layer {layer}, {NAMES[str(encoding)]}, {'untrained' if state == 'new' else state}"
        for label, column in (("largest", "angle0"), ("second", "angle1")):
            degrees, call = torch.tensor(part[column].to_numpy()), "scipy.linalg.subspace_angles(...)"
            yield row(f"{label} of four angles {name}", degrees, 0, call, "models")
