"""Names, means and counts of the tables of the page on the deposit."""

from __future__ import annotations

import pandas as pd

NAMES = {"rope": "rotation alone", "sinusoidal_rope": "hybrid", "sinusoidal": "absolute", "mla": "MLA"}
SMALL_NAMES = {"rope": "RoPE", "mla": "MLA", "learned": "learned absolute", "none": "none (NoPE)", "alibi": "ALiBi"}
ROTATING = ("rope", "sinusoidal_rope")
HEADS = 16  # of each layer of the models of 96 heads


def one_necessary(table: pd.DataFrame, mode: str, measure: str = "accuracy") -> pd.Series:
    """The models with one necessary head: without it (``"zero"``), or with its mean in its place (``"mean"``), accuracy
    falls (or the loss grows) by 0.1 or more, four times as far as for any other head."""
    largest, second = table[f"{mode}_{measure}_drop"], table[f"{mode}_{measure}_second"]
    return (largest >= 0.1) & (largest >= 4 * second)


def spread(values: pd.Series, digits: int = 2) -> str:
    """Mean and standard deviation over models; – where nothing was measured."""
    known = values.dropna()
    text = f"{known.mean():.{digits}f}" if len(known) else "–"
    return f"{text}±{known.std():.{digits}f}" if len(known) > 1 else text


def span(values: pd.Series) -> str:
    """The least and the greatest; – where nothing was measured."""
    known = sorted({int(x) for x in values.dropna()})
    return "–" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def markdown(table: pd.DataFrame) -> str:
    """The table as the page has it."""
    lines = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(x).strip() for x in line)} |" for line in lines).replace(" --- ", "---")
