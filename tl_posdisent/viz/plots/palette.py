"""Colours and axis titles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

# The palette of Okabe and Ito, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, GREY, YELLOW)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")

SIGNED = "RdBu_r"  # blue below 0, white at 0, red above
UNSIGNED = "YlGnBu"  # light to dark: numbers written on it are read anywhere

_SHARE = "share of the variance of the scores"
_TITLES = {
    "accuracy": "accuracy (share)",
    "added_loss": "added loss (nats per token)",
    "amplification": "margin over that of the next layer",
    "bound": "bound (share of the variance)",
    "change": "added loss (nats per token)",
    "cosine": "cosine of z with its mean in range",
    "distance": f"distance ({_SHARE})",
    "downstream": "downstream score",
    "entropy": "entropy of attention (nats)",
    "grad_norm": "norm of the gradient",
    "interaction": f"interaction ({_SHARE})",
    "key_concentration": "concentration of keys (0 … 1)",
    "key_phase": "phase of keys (radians)",
    "key_size": "mean size of keys",
    "kl": "KL(untouched ‖ this) (nats per token)",
    "largest_score": "largest score",
    "loss": "loss (nats per token)",
    "margin": "margin of the leading head (gradient)",
    "mahalanobis": "Mahalanobis distance of z / √d_head",
    "mean_norm": "‖g‖, mean over batches",
    "norm_of_mean": "‖g‖ of the mean over batches",
    "outside": "z outside its usual range (share of positions)",
    "perplexity": "perplexity",
    "query_concentration": "concentration of queries (0 … 1)",
    "query_phase": "phase of queries (radians)",
    "query_size": "mean size of queries",
    "r": "r, scores and additive fit",
    "r2": "r², scores and additive fit",
    "r_three_axis": "r, three-axis model",
    "r_two_axis": "r, two-axis model",
    "semantic": f"semantic ({_SHARE})",
    "share_distance": f"distance alone ({_SHARE})",
    "share_key": f"key alone ({_SHARE})",
    "share_query": f"query alone ({_SHARE})",
    "turn": "turn (0 stands still … 1)",
}


def title_of(name: str, table: pd.DataFrame) -> str:
    """Title of an axis or colour bar for this column, with its unit."""
    if name == "effect" and {"clean", "source"} & set(table.columns):
        return "effect (0: run as it was, 1: as the other)" if "source" in table else "effect (0 corrupted, 1 clean)"
    if name == "effect" and "baseline" in table:
        return "effect (metric without the head − untouched)"
    return _TITLES.get(name, name.replace("_", " "))


def line_style(number: int) -> dict[str, Any]:
    """Colour and dash of the nth line of many: no two of the first forty are alike."""
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def faint(colour: str) -> str:
    """The same colour, for an area behind its line."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.2)"


def whole(values: Iterable[Any]) -> list[str]:
    """Numbers of layers or heads as categories of an axis."""
    return [str(int(value)) for value in values]
