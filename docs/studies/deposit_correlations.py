"""Is a concentrated deposit related to accuracy on longer texts? Rank correlations over small models."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from shared.deposits import NAMES, markdown
from shared.rows import TABLES

DRAWS = 1_000


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation of the share of the largest drop with accuracy at 1.5 times the length, with accuracy and loss
    at the length of training held constant, then also the encoding and the number of rotary heads."""
    rows = []
    for mode, words in (("zero", "zeroed"), ("mean", "mean")):
        known = table.dropna(subset=f"{mode}_accuracy_share")
        x, y, trained = known[f"{mode}_accuracy_share"], known["accuracy_1.5"], known[["accuracy_1", "loss_1"]]
        kind = known.groupby(["encoding", "rotary_heads"]).ngroup().to_numpy()
        kinds = kind[:, None] == np.arange(1, kind.max() + 1)
        values = [v.to_numpy(float) for v in (x, y, trained)]
        row = {"heads": words, "same accuracy and loss": with_interval(*values, kinds[:, :0])}
        rows.append(row | {"and same kind": with_interval(*values, kinds)})
    return pd.DataFrame(rows)


def with_interval(x: np.ndarray, y: np.ndarray, trained: np.ndarray, kinds: np.ndarray) -> str:
    """The correlation, and its 95 % interval from models drawn with replacement."""
    drawn = np.random.default_rng(0).integers(len(x), size=(DRAWS, len(x)))
    found = [partial_rank(x[some], y[some], trained[some], kinds[some]) for some in (np.arange(len(x)), *drawn)]
    low, high = np.nanquantile(found[1:], [0.025, 0.975])
    return f"{found[0]:+.2f} ({low:+.2f}, {high:+.2f})"


def partial_rank(x: np.ndarray, y: np.ndarray, trained: np.ndarray, kinds: np.ndarray) -> float:
    """Correlation of the ranks of x and y after a regression on the ranks of ``trained`` and on the kinds; NaN where
    these leave nothing of x or y."""
    basis = np.column_stack([np.ones(len(x)), rankdata(trained, axis=0), kinds])
    ranks = np.column_stack([rankdata(x), rankdata(y)])
    rest = ranks - basis @ (np.linalg.pinv(basis, rcond=1e-10) @ ranks)
    norms = np.linalg.norm(rest, axis=0)
    return float(rest[:, 0] @ rest[:, 1] / norms.prod()) if norms.min() > 1e-6 else np.nan


def by_encoding(table: pd.DataFrame) -> pd.DataFrame:
    """Means over the models of an encoding ± their standard deviation."""
    columns = {f"accuracy_{length}": f"accuracy at {length} times the length" for length in ("1", "1.5", "2")}
    rows = []
    for encoding, models in table.groupby("encoding"):
        row = {"encoding": NAMES[str(encoding)], "models": len(models)}
        rows.append(row | {shown: f"{models[x].mean():.2f}±{models[x].std():.2f}" for x, shown in columns.items()})
    return pd.DataFrame(rows)


def main() -> None:
    """Print the page's tables."""
    table = pd.read_csv(TABLES / "deposit_and_length.csv")
    print(markdown(by_encoding(table)), markdown(correlations(table)), sep="\n\n")
