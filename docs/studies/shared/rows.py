"""A row of a table of findings, and how studies make one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from tl_posdisent.hooks import applied

TABLES = Path(__file__).parents[1] / "tables"


class Row(NamedTuple):
    """A number of one model and one source of texts.

    Attributes:
        name: what it is, the same for every model and source.
        value, error: the number and its standard error; NaN where there is none.
        over: what the error is taken over: ``8 texts``, ``5 draws``.
        length: tokens of a text; 0 if they differ.
        call: how the package gives it.
    """

    name: str
    value: float
    error: float
    over: str
    length: int
    call: str


def row(name: str, values: Tensor, length: int, call: str, over: str = "texts") -> Row:
    """The mean of one value for each text (or draw), with its standard error."""
    n = len(values)
    error = values.std().item() / n**0.5 if n > 1 else torch.nan
    return Row(name, values.mean().item(), error, f"{n} {over}", length, call)


def losses(model: Any, tokens: Tensor, hooks: Any = (), first: int = 1) -> Tensor:
    """``[text]``: nats per token, of the tokens from position ``first`` on; one text after another."""
    by_text = []
    with torch.no_grad(), applied(model, hooks):
        for text in tokens:
            logits = model(text[None])[0, first - 1 : -1].float()
            by_text.append(torch.nn.functional.cross_entropy(logits, text[first:]))
    return torch.stack(by_text)


def area(values: np.ndarray, has: np.ndarray) -> float:
    """The probability that a value with the label exceeds one without it (area under the ROC curve, AUC)."""
    n = int(has.sum())
    return float(mannwhitneyu(values[has], values[~has]).statistic / (n * (len(has) - n)))


def write(path: Path, study: str, rows: list[Row], order: Sequence[str]) -> None:
    """Replace the rows of a study in a table whose studies stand in this order."""
    new = pd.DataFrame(rows).round(4)
    new.insert(0, "study", study)
    if path.exists():
        old = pd.read_csv(path)
        new = pd.concat([old[old["study"] != study], new])
    new.sort_values("study", key=lambda names: names.map(order.index), kind="stable").to_csv(path, index=False)
