"""Tables for plots: validation, titles of axes with units, ranges of measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from tl_posdisent.utils.errors import ArgumentError

_SHARE = "share of variance"
_TITLES = {
    "accuracy": "accuracy (share)",
    "added_loss": "added loss (nats per token)",
    "change": "added loss (nats per token)",
    "distance": f"distance ({_SHARE})",
    "downstream": "downstream score",
    "entropy": "entropy of attention (nats)",
    "interaction": f"interaction ({_SHARE})",
    "key_concentration": "concentration of keys (0 … 1)",
    "key_phase": "phase of keys (radians)",
    "key_size": "mean size of keys",
    "kl": "KL(untouched ‖ this) (nats per token)",
    "loss": "loss (nats per token)",
    "mean_norm": "‖g‖, mean over batches",
    "norm_of_mean": "‖g‖ of the mean over batches",
    "query_concentration": "concentration of queries (0 … 1)",
    "query_phase": "phase of queries (radians)",
    "query_size": "mean size of queries",
    "r": "r, scores and additive fit",
    "r2": "r², scores and additive fit",
    "r_held_out": "r, profile of other texts",
    "r_no_distance": "r, query and key alone",
    "r_three_axis": "r, three-axis model",
    "r_two_axis": "r, two-axis model",
    "semantic": f"semantic ({_SHARE})",
    "share_distance": f"distance alone ({_SHARE})",
    "share_key": f"key alone ({_SHARE})",
    "share_query": f"query alone ({_SHARE})",
    "turn": "turn (0: no rotation … 1)",
}


def title_of(name: str, table: pd.DataFrame) -> str:
    """Return the title of an axis or colour bar for this column, with its unit."""
    if name == "effect" and {"clean", "source"} & set(table.columns):
        return "effect (0: run as it was, 1: as the other)" if "source" in table else "effect (0 corrupted, 1 clean)"
    if name == "effect" and "baseline" in table:
        return f"change of {metric_title(table)}"
    if name in ("value", "baseline", "source", "clean", "corrupted") and "metric" in table.attrs:
        return metric_title(table)
    return _TITLES.get(name, name.replace("_", " "))


def metric_title(table: pd.DataFrame) -> str:
    """Return the metric of a causal table with its unit; tables that were read from a file do not name it."""
    name = str(table.attrs.get("metric", "the metric"))
    return _TITLES.get(name, name)


def without_unit(title: str) -> str:
    """Cut the unit from the title of an axis, for the title of a figure."""
    return title.split(" (")[0]


def add_title(figure: go.Figure, title: str | None, default: str, note: str = "") -> go.Figure:
    """Add the given title to a figure, or the default with a note below it."""
    if title is not None and not isinstance(title, str):
        raise ArgumentError("title", f"must be a string, got {type(title).__name__}")
    small = f"<br><span style='font-size:0.75em'>{note}</span>" if note and title is None else ""
    return figure.update_layout(title={"text": default + small if title is None else title}, margin={"t": 80, "b": 60})


def whole(values: Iterable[Any]) -> list[str]:
    """Convert numbers of layers or heads to categories of an axis."""
    return [str(int(value)) for value in values]


def check_table(table: Any, columns: Sequence[str], numbers: Sequence[str], makers: str) -> pd.DataFrame:
    """Return the table, or raise unless it has rows, these columns and numbers; errors name the functions to use."""
    needed = [*columns, *numbers]
    if not isinstance(table, pd.DataFrame):
        raise ArgumentError("table", f"must be a pandas table as from {makers}, got {type(table).__name__}")
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise ArgumentError(
            "table",
            f"must have the columns {', '.join(needed)}, as from {makers}, got a table without {', '.join(missing)}"
            f"{_drawn_by(table, needed)}",
        )
    if table.empty:
        raise ArgumentError("table", f"must have rows, as from {makers}, got none")
    for name in numbers:
        if not is_numeric_dtype(table[name]) or is_bool_dtype(table[name]):
            raise ValueError(f"column {name} must be numbers, got {table[name].dtype}{_drawn_by(table, needed)}")
    return table


def _drawn_by(table: pd.DataFrame, needed: Sequence[str]) -> str:
    """Name the function that draws this table, if another than the one that needs these columns does."""
    plots = {"where_part": ("plot_where_or_what", "where_or_what"), "gap": ("plot_verdicts", "head_verdicts")}
    for column, (plot, maker) in plots.items():
        if column in table and column not in needed:
            return f": {plot} draws that of {maker}"
    return ""


def head_index(table: Any) -> list[str]:
    """Return the columns that identify a head or a layer: ``layer`` and ``head``, or the one of them that exists."""
    return [name for name in ("layer", "head") if name in getattr(table, "columns", ())]


def mean_over_texts(table: pd.DataFrame, index: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Average a table over texts: return one row for each ``index``, in ascending order.

    Rows that differ in anything except the text are not averaged but raise.
    """
    names = list(index)
    if names and bool(table[names].isna().any(axis=None)):
        raise ArgumentError("table", f"must name {' and '.join(names)} in every row: select rows first")
    texts = [*names, *(["batch"] if "batch" in table.columns else [])]
    if len(table) > 1 and (not texts or bool(table.duplicated(texts).any())):
        levels = ", ".join(texts) or "figure"
        raise ArgumentError("table", f"must have one row for each {levels}, got several: select rows first")
    if not names:
        return table[list(values)].mean().to_frame().T
    return table.groupby(names)[list(values)].mean().reset_index()
