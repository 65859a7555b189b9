"""The atlas of a report: one map and one table of all heads, with the measurements of the other sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from tl_posdisent.page.deciding.words import MISSING, number, numbers, signed
from tl_posdisent.page.drawing.atlas_map import choices, map_figure
from tl_posdisent.page.drawing.atlas_table import AtlasTable
from tl_posdisent.page.drawing.maps import with_attention
from tl_posdisent.page.drawing.markup import ROWS, figure, map_height, render, table
from tl_posdisent.page.drawing.panel_data import panel_data
from tl_posdisent.page.measuring.measurement import HEAD
from tl_posdisent.page.measuring.panels import SAME, SHOWN, Panels
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.widgets.offline import script_json

_TITLES = {
    "verdict": "verdict",
    "contribution": "contribution",
    "where_unclipped": "where",
    "what_unclipped": "what",
    "uniform_unclipped": "uniform",
    "where_se": "error of where",
    "what_se": "error of what",
    "exact": "exact",
    "contribution_se": "error of contribution",
    "content_distance": "best constant distance",
    "share_distance": "distance alone",
    "share_key": "key alone",
    "r_held_out": "held-out r",
    "r": "r",
    "label": "label",
    "effect": "added loss",
    "ladder": "ladder",
    "between": "undecided between",
    "profile": "profile",
    "range": "range",
}
"""The columns of the table of all heads and their titles; the first are shown, the others on request."""
_DIGITS = {"range": 2, "effect": 4, "contribution": 4, "contribution_se": 4, "where_unclipped": 2, "what_unclipped": 2}
_DIGITS |= {"where_se": 2, "what_se": 2, "uniform_unclipped": 2}
_WORDS = ("label", "profile", "verdict", "ladder", "between")


def atlas(
    subject: Subject, measured: AtlasTable, panels: Panels, sentences: Mapping[tuple[int, int], Sequence[str]]
) -> Markup:
    """Render the section as HTML.

    Args:
        subject: the model and its texts.
        measured: the table of all heads, in the order of its rows.
        panels: attention and scores of the heads that have a panel.
        sentences: the description of each head.
    """
    heads, profiles = measured
    options = choices(heads)
    drawn = map_figure(heads, options, [_hover_text(row) for row in heads.to_dict("records")], subject.attention)
    (first, *_) = options["colours"].values()
    rows = with_attention(_cells(heads), subject.attention)
    return render(
        "atlas",
        distances=list(profiles.columns),
        has=set(heads.columns),
        map=figure(drawn, first["caption"], height=map_height(heads["layer"].nunique()), choices=options),
        choices=options,
        panels=Markup(script_json(panel_data(panels, profiles, sentences))),
        reasons=[f"{reason} (layers {numbers(layers)})" for reason, layers in panels.reasons.items()],
        same=SAME,
        shown=min(SHOWN, len(panels.words)),
        table=table("atlas", "Every head", rows, _TITLES, _DIGITS, heads="linked"),
    )


def listed(heads: pd.DataFrame) -> list[tuple[int, int]]:
    """Return layer and head of each row that is shown: these heads have panels."""
    return [*heads.head(ROWS)[HEAD].astype(int).itertuples(index=False, name=None)]


def _cells(heads: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the table, with a dash for words that are missing."""
    cells = heads[[*HEAD, *(name for name in _TITLES if name in heads)]]
    if "exact" in cells:
        cells = cells.assign(exact=cells["exact"].map({True: "yes", False: "no"}))
    return cells.fillna(dict.fromkeys((*_WORDS, "exact"), MISSING)).replace({"between": {"": MISSING}})


def _hover_text(head: Mapping[Any, Any]) -> str:
    """Make the hover text of a head in the map from its row."""
    verdict = head.get("verdict")
    lines = [f"<b>{head_label(int(head['layer']), int(head['head']))}</b> verdict: {verdict or MISSING}"]
    if np.isfinite(head.get("contribution", np.nan)):
        errors = {name: number(head[f"{name}_se"], 2) for name in ("where", "what")}
        where, what = (f"{name} {number(head[f'{name}_unclipped'], 2)} ± {error}" for name, error in errors.items())
        lines.append(f"{where}, {what} (± standard error over texts)")
        lines.append(f"contribution {number(head['contribution'], 4)} nats per token")
    if np.isfinite(head.get("share_distance", np.nan)):
        shares = f"distance alone {number(head['share_distance'])}, key alone {number(head['share_key'])}"
        lines.append(f"variance of the scores: {shares}")
    if isinstance(head.get("label"), str):
        lines.append(f"label: {head['label']}")
    if np.isfinite(head.get("effect", np.nan)):
        lines.append(f"added loss without it: {signed(head['effect'], 4)} nats per token")
    if isinstance(head.get("ladder_text"), str):
        lines.append(f"ladder: {head['ladder_text']}")
    if isinstance(head.get("profile"), str):
        lines.append(f"profile: {head['profile']} over {number(head['range'], 2)}")
    return "<br>".join(lines)
