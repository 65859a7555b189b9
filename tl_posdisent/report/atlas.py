"""The atlas of a report: one map and one table of all heads, with the measurements of the other sections."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from markupsafe import Markup

from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.report.markup import ROWS, figure, map_height, render, table
from tl_posdisent.report.measurements import HEAD, Found, SectionName, by_head
from tl_posdisent.report.words import MISSING, number, signed
from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.plots.heatmaps import plot_heads, verdict_texts

_BLOCKS = "▁▂▃▄▅▆▇█"


def looks_at(heads: pd.DataFrame) -> pd.Series:
    """Classify each head as ``"where"``, ``"what"`` or ``"neither"``, by the largest of three shares of its variance.

    These are the shares of the scores' variance that the distance explains alone, that the key explains alone, and that
    no sum of components explains. The query's share is left out, because the softmax ignores it.
    """
    shares = {"where": heads["share_distance"], "what": heads["share_key"], "neither": 1 - heads["r"] ** 2}
    return pd.DataFrame(shares).fillna(-1.0).idxmax(axis=1).where(heads["r"].notna(), MISSING)


def atlas(found: Mapping[SectionName, Found]) -> Markup:
    """Render the section as HTML; empty without the section ``additivity``, whose shares colour the map."""
    if "additivity" not in found or found["additivity"].refused:
        return Markup()
    heads = atlas_table(found)
    told = _known(heads, found)
    partly: dict[SectionName, str] = {"ablation": "added loss", "ladder": "gap and verdict"}
    sampled = [f"For {of}, {found[x].sampled}." for x, of in partly.items() if x in found and found[x].sampled]
    drawn = plot_heads(heads, "what − where", signed=True)
    drawn.update_traces(colorbar_title_text="what − where<br>(share of variance)")
    grid = heads.assign(told=told).pivot(index="layer", columns="head", values="told")
    drawn.update_traces(customdata=grid.fillna("").to_numpy(), hovertemplate="%{customdata}")
    ranked = heads.sort_values("share_distance", ascending=False, kind="stable", na_position="last")
    rows = heads if len(heads) <= ROWS else ranked  # if there are many heads, those that other sections link to
    titles = {"share_distance": "distance alone", "share_key": "key alone", "effect": "added loss"}
    titles |= {"r_held_out": "held-out r", "looks": "looks at"}
    shown = rows.drop(columns=["r"] if "r_held_out" in rows else []).fillna(
        dict.fromkeys(("label", "verdict", "profile"), MISSING)
    )
    height, linked = map_height(heads["layer"].nunique()), len(heads) <= ROWS
    return render(
        "atlas",
        distances=heads.attrs["distances"],
        sampled=sampled,
        map=figure(drawn, "What − where, by head", height=height, linked=linked),
        table=table("atlas", "Every head", shown, titles, {"effect": 4, "gap": 4, "range": 2}, heads="named"),
    )


def atlas_table(found: Mapping[SectionName, Found]) -> pd.DataFrame:
    """Make a table with a row for each head and the columns of the sections that were measured."""
    heads = by_head(found["additivity"].trained)
    columns = ["share_distance", "share_key", *(name for name in ("r", "r_held_out") if name in heads)]
    heads = heads[[*HEAD, *columns]].assign(looks=looks_at(heads))
    heads.insert(2, "what − where", heads["share_key"] - heads["share_distance"])
    heads.insert(2, "looks", heads.pop("looks"))
    measured = {name: one.trained for name, one in found.items() if not one.refused}
    if "labels" in measured:
        heads = heads.merge(label_words(measured["labels"])[[*HEAD, "label"]], on=HEAD, how="left")
    if "ablation" in measured:
        heads = heads.merge(measured["ablation"][[*HEAD, "effect"]], on=HEAD, how="left")
    if "ladder" in measured:
        verdicts = head_verdicts(measured["ladder"])[[*HEAD, "gap", "verdict"]]
        heads = heads.merge(verdicts.astype(dict.fromkeys(HEAD, int)), on=HEAD, how="left")
    distances: list[int] = []
    if "distance" in measured:
        profiles = measured["distance"].pivot(index=HEAD, columns="distance", values="value")
        distances = [d for d in (0, *(2**n for n in range(20))) if d in profiles]
        heights = profiles[distances].sub(profiles[distances].min(axis=1), axis=0)
        ranges = heights.max(axis=1)
        steps = heights.div(ranges.replace(0.0, 1.0), axis=0).mul(len(_BLOCKS) - 1).round().astype(int)
        lines = ["".join(_BLOCKS[step] for step in row) for row in steps.to_numpy()]
        heads = heads.merge(ranges.to_frame("range").assign(profile=lines).reset_index(), on=HEAD, how="left")
    heads.attrs["distances"] = distances
    return heads


def label_words(labels: pd.DataFrame) -> pd.DataFrame:
    """Return the table with each ``label`` in words, or None for a head without one."""
    words = labels["label"].str.replace("_", " ").str.replace("+", " + ", regex=False)
    return labels.assign(label=words.where(words != "", None))


def _known(heads: pd.DataFrame, found: Mapping[SectionName, Found]) -> list[str]:
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
        shares = f"distance alone {number(row['share_distance'])}, key alone {number(row['share_key'])}"
        lines = [f"<b>{head_label(*at)}</b> looks at: {row['looks']}", f"{shares}, r {number(row['r'])}"]
        if isinstance(row.get("label"), str):
            lines.append(f"label: {row['label']}")
        if np.isfinite(row.get("effect", np.nan)):
            lines.append(f"added loss without it: {signed(row['effect'], 4)} nats per token")
        if at in climbed:
            lines.append(f"ladder: {climbed[at]}")
        if isinstance(row.get("profile"), str):
            lines.append(f"profile: {row['profile']} over {number(row['range'], 2)}")
        texts.append("<br>".join(lines))
    return texts
