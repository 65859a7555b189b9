"""Rank correlations over small models, with other columns held constant."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

WITHIN = ["encoding", "rotary_heads"]
CONTROLS = ("all models", "same accuracy and loss", "and same kind")


def partial_rank(x: np.ndarray, y: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """Rank correlation of x and y ``[…, model]`` after a regression of both ranks on a constant and on ``controls``
    ``[…, model, control]``; NaN where the controls leave nothing of x or y."""
    basis = np.concatenate([np.ones((*x.shape, 1)), controls], -1)
    ranks = np.stack([stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)], -1)
    rest = ranks - basis @ (np.linalg.pinv(basis, rcond=1e-10) @ ranks)
    norms = np.linalg.norm(rest, axis=-2)
    norms[norms < 1e-6] = np.nan
    return np.asarray((rest[..., 0] * rest[..., 1]).sum(-1) / norms.prod(-1))


def controls(name: str, accuracy: np.ndarray, loss: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """What is held constant, one column each ``[…, model, control]``.

    Ranks of accuracy and loss at the length of training (nearly all accuracies are 1, and no two losses are equal);
    and a constant for each encoding and number of rotary heads, numbered from 0 by ``kind``.
    """
    if name == "all models":
        return np.empty((*loss.shape, 0))
    trained = np.stack([stats.rankdata(accuracy, axis=-1), stats.rankdata(loss, axis=-1)], -1)
    if name == "same accuracy and loss":
        return trained
    return np.concatenate([trained, kind[..., None] == np.arange(1, kind.max() + 1)], -1)


def interval(table: pd.DataFrame, x: str, y: str, control: str, draws: int = 1_000) -> tuple[float, float, float]:
    """Rank correlation of two columns, and its 95 % interval from models drawn with replacement."""
    every = np.arange(len(table))
    drawn = np.random.default_rng(0).integers(len(table), size=(draws, len(table)))
    kind = table.groupby(WITHIN).ngroup().to_numpy()
    values = [table[name].to_numpy(float) for name in (x, y, "accuracy_1", "loss_1")]

    def found(chosen: np.ndarray) -> np.ndarray:
        first, second, accuracy, loss = (value[chosen] for value in values)
        return partial_rank(first, second, controls(control, accuracy, loss, kind[chosen]))

    low, high = np.nanquantile(found(drawn), [0.025, 0.975])
    return float(found(every)), float(low), float(high)


def permuted(table: pd.DataFrame, x: str, y: str, draws: int = 2_000) -> float:
    """Share of permutations of x within each kind of model with a correlation at least as large, all else the same."""
    kind = table.groupby(WITHIN).ngroup().to_numpy()
    first, second, accuracy, loss = (table[name].to_numpy(float) for name in (x, y, "accuracy_1", "loss_1"))
    # Sorted by kind and, within each, at random: the values that the places of a kind get.
    keys = np.random.default_rng(1).random((draws, len(table))) + kind
    shuffled = np.empty((draws, len(table)))
    np.put_along_axis(shuffled, kind.argsort(kind="stable")[None].repeat(draws, 0), first[keys.argsort(-1)], -1)
    columns = controls(CONTROLS[-1], accuracy, loss, kind)
    found = partial_rank(shuffled, second[None].repeat(draws, 0), columns[None].repeat(draws, 0))
    own = abs(float(partial_rank(first, second, columns)))
    return float((1 + (abs(found) >= own - 1e-9).sum()) / (1 + draws))
