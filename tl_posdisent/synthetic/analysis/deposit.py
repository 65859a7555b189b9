"""Positional deposit: concentration of ablation effects in single heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HEAD, HasTable
from tl_posdisent.utils.validation import check_choice, head_label
from tl_posdisent.utils.words import plural

_MEASURES = ("baseline", "drop", "second", "share", "effective_heads", "layer", "head")


@dataclass(frozen=True, eq=False, repr=False)
class DepositReport(HasTable):
    """Distribution of drops over heads. A drop is how much worse the metric is without one head, at least 0.

    With ``drop_h`` the drop of head h, and ``p_h = drop_h / Σ drop``:

    Attributes:
        baseline: the metric with all heads.
        drop: largest drop, in units of the metric; 0 or more.
        second: second largest drop; NaN if there is only one head.
        share: ``max p``, from 1 / heads (equal drops) to 1 (one head has the whole drop). NaN if all drops are 0.
        effective_heads: ``exp(-Σ p log p)``, from 1 (one head has the whole drop) to the number of heads. NaN if all
            drops are 0.
        layer, head: head with the largest drop (the first, if several are equal); None if all drops are 0.
        drops: one row per head: ``layer``, ``head``, ``drop`` (negative: a gain), ``share`` (its p).
    """

    baseline: float
    drop: float
    second: float
    share: float
    effective_heads: float
    layer: int | None
    head: int | None
    drops: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """Return one row with all measures."""
        return pd.DataFrame({name: [getattr(self, name)] for name in _MEASURES}).astype(
            {"layer": "Int64", "head": "Int64"}
        )

    def __repr__(self) -> str:
        layers = self.drops.groupby("layer")["share"].sum()
        heads, n_layers = plural(len(self.drops), "head"), plural(len(layers), "layer")
        begin = f"DepositReport of {heads} in {n_layers}, baseline {self.baseline:.3f}\n"
        if self.layer is None:
            return begin + "  no head has a drop"
        shares = " ".join(f"{x:.2f}" for x in layers)
        return begin + (
            f"  largest drop {self.drop:.3f} (layer {self.layer}, head {self.head}), second {self.second:.3f}; "
            f"share {self.share:.2f}, effective number of heads {self.effective_heads:.2f}\n"
            f"  share by layer: {shares}"
        )


def deposit(
    drops: pd.DataFrame,
    *,
    better: Literal["higher", "lower"] = "higher",
    measure: Literal["metric", "loss"] = "metric",
) -> DepositReport:
    """Summarise a table of ``head_drops`` or ``head_ablation``: largest drop, share, effective number of heads.

    Args:
        drops: a table of ``head_ablation`` or ``head_drops``: ``layer``, ``head``, ``baseline``, ``effect``.
        better: whether a ``"higher"`` metric is better, as for accuracy, or a ``"lower"`` one, as for a loss.
        measure: ``"metric"``, or ``"loss"`` for the columns ``loss_baseline`` and ``loss_effect`` of ``head_drops``.

    Raises:
        ValueError: a table without these columns, with several rows for a head, or with numbers that are not finite.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.synthetic import deposit
        >>> rows = [(0, 0, 0.95, -0.75), (0, 1, 0.95, -0.05), (1, 0, 0.95, -0.05), (1, 1, 0.95, 0.01)]
        >>> deposit(pd.DataFrame(rows, columns=["layer", "head", "baseline", "effect"]))
        DepositReport of 4 heads in 2 layers, baseline 0.950
          largest drop 0.750 (layer 0, head 0), second 0.050; share 0.88, effective number of heads 1.56
          share by layer: 0.94 0.06
    """
    check_choice("better", better, ("higher", "lower"))
    check_choice("measure", measure, ("metric", "loss"))
    names = ["loss_baseline", "loss_effect"] if measure == "loss" else ["baseline", "effect"]
    _check_drops(drops, names)
    baseline, effect = (drops[name].to_numpy(float) for name in names)
    drop = effect * (-1.0 if better == "higher" and measure == "metric" else 1.0) + 0.0
    positive = drop.clip(min=0)
    total = float(positive.sum())
    p = positive / total if total > 0 else np.zeros_like(positive)
    table = drops[HEAD].assign(drop=drop, share=p).sort_values(HEAD, ignore_index=True)
    largest = int(table["drop"].to_numpy().argmax())
    ranked = np.sort(positive)[::-1]
    return DepositReport(
        baseline=float(baseline[0]),
        drop=float(ranked[0]),
        second=float(ranked[1]) if len(ranked) > 1 else math.nan,
        share=float(p.max()) if total > 0 else math.nan,
        effective_heads=float(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())) if total > 0 else math.nan,
        layer=int(table["layer"].iloc[largest]) if total > 0 else None,
        head=int(table["head"].iloc[largest]) if total > 0 else None,
        drops=table,
    )


def _check_drops(drops: pd.DataFrame, names: list[str]) -> None:
    """Raise unless the table has one row per head, with finite numbers in these columns."""
    if not isinstance(drops, pd.DataFrame):
        raise ArgumentError("drops", f"must be a table of head_ablation, got {type(drops).__name__}")
    needed = [*HEAD, *names]
    missing = [name for name in needed if name not in drops]
    if missing or not len(drops):
        what = f"no column {missing[0]!r}" if missing else "no rows"
        raise ArgumentError("drops", f"must have rows, and columns {', '.join(needed)}, as of head_drops, got {what}")
    twice = drops[drops.duplicated(HEAD)]
    if len(twice):
        raise ArgumentError("drops", f"must have one row per head, got several for {head_label(*twice[HEAD].iloc[0])}")
    for name in names:
        values = drops[name].to_numpy(float)
        if not np.isfinite(values).all():
            raise ArgumentError("drops", f"must have finite numbers as {name}, got {values[~np.isfinite(values)][0]}")
