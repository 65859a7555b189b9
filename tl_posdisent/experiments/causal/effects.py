"""What a run is worth by a metric, and how far a patch takes it from one run to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.forward import Hook

from .metrics import Metric, as_number


def measure(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    hooks: Sequence[Hook],
    metric: Metric,
    target: Int[Tensor, "batch pos"],
) -> float:
    """The metric of one run with these hooks, the mean over texts; the hooks are off when the metric is asked."""
    with torch.no_grad():
        with applied(model, hooks):
            logits = model(tokens)
        return as_number(metric(logits, target), len(tokens))


def check_apart(model: Any, measured: dict[str, float], argument: str) -> None:
    """Refuse two runs whose metrics differ by no more than rounding: every effect would be 0/0."""
    (one, a), (other, b) = measured.items()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if abs(a - b) <= max(1e-5, torch.finfo(dtype).eps / 8) * max(abs(a), abs(b)):
        raise ValueError(
            f"{argument} must change the metric, but it is {a:.6g} in the {one} run and {b:.6g} in the {other} one: "
            "there is no effect to divide"
        )


def as_table(rows: list[tuple[int, int, float]], measured: dict[str, float]) -> pd.DataFrame:
    """Layer, head and metric of patched runs, beside those of the run patched from and of the run patched (in this
    order, by the names of their columns), and the effect: 1 as in the first, 0 as in the second."""
    table = pd.DataFrame(rows, columns=["layer", "head", "value"])
    (source, everything), (base, nothing) = measured.items()
    table.insert(2, source, everything)
    table.insert(3, base, nothing)
    table["effect"] = (table["value"] - nothing) / (everything - nothing)
    return table.sort_values(["layer", "head"], ignore_index=True)
