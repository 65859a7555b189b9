"""The atlas of a report: one map and one table of all heads, with the measurements of the other sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from tl_posdisent.page.deciding.where_or_what import DIFFERENCE, ERROR, OVER_RANDOM
from tl_posdisent.page.deciding.words import MISSING, number, signed
from tl_posdisent.page.drawing.atlas_map import choices, map_caption, map_figure
from tl_posdisent.page.drawing.atlas_table import AtlasTable
from tl_posdisent.page.drawing.maps import with_attention
from tl_posdisent.page.drawing.markup import ROWS, figure, map_height, render, table
from tl_posdisent.page.drawing.panel_data import panel_data
from tl_posdisent.page.measuring.measurement import HEAD
from tl_posdisent.page.measuring.panels import SAME, SHOWN, Panels
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.widgets.offline import script_json

_COLUMNS = ["looks", DIFFERENCE, "kl", "verdict", "effect", "r_held_out", "r", "label", ERROR, OVER_RANDOM]
_COLUMNS += ["share_distance", "share_key", "between", "profile", "range"]
"""The columns of the table of all heads; the first are shown, the others on request."""
_TITLES = {
    "share_distance": "distance alone",
    "share_key": "key alone",
    "effect": "added loss",
    "kl": "KL",
    "r_held_out": "held-out r",
    "looks": "looks at",
    "between": "undecided between",
    ERROR: f"standard error of {DIFFERENCE} over texts",
}


def atlas(subject: Subject, measured: AtlasTable, *, baseline: bool, panels: Panels | None = None) -> Markup:
    """Render the section as HTML from its table and the measurements of the panels.

    Args:
        subject: the model and its texts.
        measured: the table of all heads.
        baseline: whether random weights were measured.
        panels: attention and scores of the heads that have a panel.
    """
    heads, profiles = measured
    options = choices(heads)
    drawn = map_figure(heads, [_hover_text(row) for row in heads.to_dict("records")], subject.attention)
    caption = map_caption("What − where", heads, int(heads[DIFFERENCE].isna().sum()))
    rows = with_attention(_cells(ranked(heads)), subject.attention)
    return render(
        "atlas",
        baseline=baseline,
        distances=list(profiles.columns),
        has={name for name in ("effect", "kl") if name in heads},
        map=figure(drawn, caption, height=map_height(heads["layer"].nunique()), choices=options),
        choices=options,
        panels=None if panels is None else Markup(script_json(panel_data(panels, profiles))),
        same=SAME,
        shown=min(SHOWN, len(panels.words)) if panels else 0,
        table=table("atlas", "Every head", rows, _TITLES, {"range": 2, "effect": 4, "kl": 4}, heads="linked"),
    )


def ranked(heads: pd.DataFrame) -> pd.DataFrame:
    """Sort many heads, so that those to which other sections link are among the rows that are shown."""
    if len(heads) <= ROWS:
        return heads
    return heads.sort_values("share_distance", ascending=False, kind="stable", na_position="last")


def listed(heads: pd.DataFrame) -> list[tuple[int, int]]:
    """Return layer and head of each row that is shown: these heads have panels."""
    return [*ranked(heads).head(ROWS)[HEAD].astype(int).itertuples(index=False, name=None)]


def _cells(heads: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the table, with a dash for words that are missing."""
    names = [name for name in _COLUMNS if name in heads and not (name == "r" and "r_held_out" in heads)]
    return (
        heads[[*HEAD, *names]]
        .fillna(dict.fromkeys(("label", "profile", "verdict", "between"), MISSING))
        .replace({"between": {"": MISSING}})
    )


def _hover_text(head: Mapping[Any, Any]) -> str:
    """Make the hover text of a head in the map from its row."""
    error = f" ± {number(head[ERROR])} (a standard error over texts)" if np.isfinite(head.get(ERROR, np.nan)) else ""
    shares = f"distance alone {number(head['share_distance'])}, key alone {number(head['share_key'])}"
    lines = [
        f"<b>{head_label(int(head['layer']), int(head['head']))}</b> looks at: {head['looks']}",
        f"{DIFFERENCE} {signed(head[DIFFERENCE])}{error}",
        f"{shares}, r {number(head['r'])}",
    ]
    if isinstance(head.get("label"), str):
        lines.append(f"label: {head['label']}")
    if np.isfinite(head.get("effect", np.nan)):
        lines.append(f"added loss without it: {signed(head['effect'], 4)} nats per token")
    if isinstance(head.get("verdict_text"), str):
        lines.append(f"KL with its mean output: {number(head['kl'], 4)} nats per token")
        lines.append(f"ladder: {head['verdict_text']}")
    if isinstance(head.get("profile"), str):
        lines.append(f"profile: {head['profile']} over {number(head['range'], 2)}")
    return "<br>".join(lines)
