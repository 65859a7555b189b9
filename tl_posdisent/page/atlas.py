"""The atlas of a report: one map and one table of all heads, with the measurements of the other sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.page.atlas_map import choices, map_caption, map_figure
from tl_posdisent.page.every_head import HEAD
from tl_posdisent.page.looks import DIFFERENCE, ERROR, OVER_RANDOM, looks_at
from tl_posdisent.page.maps import with_attention
from tl_posdisent.page.markup import ROWS, figure, map_height, render, table
from tl_posdisent.page.measurements import Found, SectionName, by_head, powers
from tl_posdisent.page.panels import SAME, SHOWN, Panels, panel_data
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import ABOUT, MISSING, NO_LABEL, number, signed
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.plots.heatmaps import verdict_texts
from tl_posdisent.viz.widgets.offline import script_json

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS = ["looks", DIFFERENCE, "kl", "verdict", "effect", "r_held_out", "r", "label", ERROR, OVER_RANDOM]
_COLUMNS += ["share_distance", "share_key", "between", "profile", "range"]
"""The columns of the table of all heads; the first are shown, the others on request."""


class AtlasTable(NamedTuple):
    """A row for each head, and its distance component at distances 0, 1, 2, 4 … (the columns of ``profiles``)."""

    heads: pd.DataFrame
    profiles: pd.DataFrame


def atlas(
    subject: Subject, found: Mapping[SectionName, Found], measured: AtlasTable, panels: Panels | None = None
) -> Markup:
    """Render the section as HTML from its table (``atlas_table``) and the measurements of the panels."""
    heads, profiles = measured
    told = _hover_texts(heads, found)
    partly: dict[SectionName, str] = {"ablation": "Added loss"}
    titles = {"share_distance": "distance alone", "share_key": "key alone", "effect": "added loss", "kl": "KL"}
    titles |= {"r_held_out": "held-out r", "looks": "looks at", ERROR: "± standard error"}
    titles |= {"between": "undecided between"}
    options = choices(heads)
    caption = map_caption("What − where", heads, int(heads[DIFFERENCE].isna().sum()))
    height = map_height(heads["layer"].nunique())
    return render(
        "atlas",
        baseline=found["additivity"].random is not None,
        distances=list(profiles.columns),
        has={name for name in ("effect", "kl") if name in heads},
        estimated={of: found[name].agreement for name, of in partly.items() if name in found and found[name].run},
        map=figure(map_figure(heads, told, subject.attention), caption, height=height, choices=options),
        choices=options,
        panels=None if panels is None else Markup(script_json(panel_data(panels, profiles))),
        same=SAME,
        shown=min(SHOWN, len(panels.words)) if panels else 0,
        table=table(
            "atlas",
            "Every head",
            with_attention(_cells(ranked(heads)), subject.attention),
            titles,
            {"range": 2},
            heads="linked",
        ),
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
    """Return the columns of the table, with estimates marked."""
    shown = heads.copy()
    for name in ("effect", "kl"):
        if name in heads:
            shown[name] = shown[name].map(lambda x: number(x, 4) if pd.notna(x) else MISSING)
    if "effect" in heads:
        marked = ~heads["effect_exact"] & (shown["effect"] != MISSING)
        shown.loc[marked, "effect"] = ABOUT + shown.loc[marked, "effect"]
    names = [name for name in _COLUMNS if name in shown and not (name == "r" and "r_held_out" in shown)]
    return (
        shown[[*HEAD, *names]]
        .fillna(dict.fromkeys(("label", "profile", "verdict", "between"), MISSING))
        .replace({"between": {"": MISSING}})
    )


def atlas_table(found: Mapping[SectionName, Found]) -> AtlasTable | None:
    """Make a table with a row for each head and the columns of the sections that were measured.

    None without the section ``additivity``, whose shares colour the map.
    """
    if "additivity" not in found or found["additivity"].refused:
        return None
    heads = by_head(found["additivity"].trained)
    columns = ["share_distance", "share_key", *(name for name in ("r", "r_held_out") if name in heads)]
    decided = looks_at(found["additivity"].trained, found["additivity"].random)
    missing = [name for name in (ERROR, OVER_RANDOM) if decided[name].isna().all()]  # a single text, no baseline
    heads = (
        decided[[*HEAD, "looks", DIFFERENCE, ERROR, OVER_RANDOM]]
        .drop(columns=missing)
        .merge(heads[[*HEAD, *columns]], on=HEAD)
    )
    measured = {name: one.trained for name, one in found.items() if not one.refused}
    if "labels" in measured:
        labels = label_words(measured["labels"])[[*HEAD, "label"]].fillna({"label": NO_LABEL})
        heads = heads.merge(labels, on=HEAD, how="left")
    if "ablation" in measured:
        effects = measured["ablation"][[*HEAD, "effect", "exact"]].rename(columns={"exact": "effect_exact"})
        heads = heads.merge(effects, on=HEAD, how="left")
    if "ladder" in measured:
        heads = heads.merge(_verdicts(measured["ladder"]), on=HEAD, how="left")
    profiles = pd.DataFrame(index=pd.MultiIndex.from_arrays([[], []], names=HEAD))
    if "distance" in measured:
        profiles = measured["distance"].pivot(index=HEAD, columns="distance", values="value")
        profiles = profiles[powers(profiles.columns)]
        heads = heads.merge(_profile_lines(profiles), on=HEAD, how="left")
    if "effect_exact" in heads:
        heads["effect_exact"] = heads["effect_exact"].eq(True)  # heads without a number have no mark
    return AtlasTable(heads, profiles)


def _verdicts(ladder: pd.DataFrame) -> pd.DataFrame:
    """Return the divergence with the mean output, and the verdict, of each head."""
    verdicts = head_verdicts(ladder)[[*HEAD, "gap_mean", "verdict", "between"]].rename(columns={"gap_mean": "kl"})
    return verdicts.astype(dict.fromkeys(HEAD, int))


def _profile_lines(profiles: pd.DataFrame) -> pd.DataFrame:
    """Draw each profile as a line of blocks, on its own scale, with its range; a blank where a window has no keys."""
    heights = profiles.sub(profiles.min(axis=1), axis=0)
    ranges = heights.max(axis=1)
    steps = heights.div(ranges.replace(0.0, 1.0), axis=0).mul(len(_BLOCKS) - 1).round().fillna(-1).astype(int)
    lines = ["".join("\u2002" if step < 0 else _BLOCKS[step] for step in row) for row in steps.to_numpy()]
    return ranges.to_frame("range").assign(profile=lines).reset_index()


def label_words(labels: pd.DataFrame) -> pd.DataFrame:
    """Return the table with each ``label`` in words, or None for a head without one."""
    words = labels["label"].str.replace("_", " ").str.replace("+", " + ", regex=False)
    return labels.assign(label=words.where(words != "", None))


def _hover_texts(heads: pd.DataFrame, found: Mapping[SectionName, Found]) -> list[str]:
    """Make the hover text of each head in the map."""
    ladder = found.get("ladder")
    climbed: dict[tuple[int, int], str] = {}
    if ladder is not None and not ladder.refused:
        verdicts = head_verdicts(ladder.trained)
        places = zip(verdicts["layer"], verdicts["head"], strict=True)
        climbed = dict(zip(places, verdict_texts(verdicts, ladder.trained), strict=True))
    texts = []
    for row in heads.to_dict("records"):
        at = int(row["layer"]), int(row["head"])
        error = f" ± {number(row[ERROR])}" if np.isfinite(row.get(ERROR, np.nan)) else ""
        shares = f"distance alone {number(row['share_distance'])}, key alone {number(row['share_key'])}"
        lines = [f"<b>{head_label(*at)}</b> looks at: {row['looks']}", f"{shares}, r {number(row['r'])}"]
        lines.insert(1, f"{DIFFERENCE} {signed(row[DIFFERENCE])}{error}")
        if isinstance(row.get("label"), str):
            lines.append(f"label: {row['label']}")
        if np.isfinite(row.get("effect", np.nan)):
            about = "" if row["effect_exact"] else ABOUT
            lines.append(f"added loss without it: {about}{signed(row['effect'], 4)} nats per token")
        if at in climbed:
            lines.append(f"KL with its mean output: {number(row['kl'], 4)} nats per token")
            lines.append(f"ladder: {climbed[at]}")
        if isinstance(row.get("profile"), str):
            lines.append(f"profile: {row['profile']} over {number(row['range'], 2)}")
        texts.append("<br>".join(lines))
    return texts
