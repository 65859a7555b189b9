"""The atlas: a map and a table of all heads, with the numbers of the sections, and a panel for each head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from tl_posdisent.page.contract import AtlasData, Colour
from tl_posdisent.page.markup import cells_of, map_height, render, table
from tl_posdisent.page.panels import SAME, SHOWN, Panels, shown_distances
from tl_posdisent.page.section import Measured, by_head, with_attention
from tl_posdisent.page.sections import main_correlation
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import label_words, numbers
from tl_posdisent.utils.tables import HEAD
from tl_posdisent.utils.validation import head_label, printable
from tl_posdisent.viz.palette import NEEDS
from tl_posdisent.viz.plots.heatmaps import category_map, plot_heads

_TITLES = {
    "verdict": "verdict",
    "contribution": "contribution",
    "where_part": "where",
    "what_part": "what",
    "neither_part": "neither",
    "joint": "joint",
    "open": "open",
    "measured": "measured",
    "contribution_se": "error of contribution",
    "where_part_se": "error of where",
    "what_part_se": "error of what",
    "neither_part_se": "error of neither",
    "joint_se": "error of joint",
    "kept_distance": "kept by distance",
    "kept_content": "kept by content",
    "kept_uniform": "kept by uniform",
    "gate": "kept by gate",
    "content_distance": "best constant distance",
    "share_distance": "distance alone",
    "share_key": "key alone",
    "r_held_out": "held-out r",
    "r": "r",
    "label": "label",
    "effect": "added loss",
    "profile": "profile",
    "range": "range",
}
"""The columns of the table of all heads and their titles; the first are shown, the others on request."""
_DIGITS = {"effect": 4, "contribution": 4, "contribution_se": 4, "range": 2}
_PARTS = ("where_part", "what_part", "neither_part", "joint")
_DIGITS |= dict.fromkeys([*_PARTS, *(f"{name}_se" for name in _PARTS)], 2)
_DIGITS |= dict.fromkeys(("kept_distance", "kept_content", "kept_uniform", "gate"), 2)
_HOVER = (
    "verdict",
    "open",
    "contribution",
    "measured",
    *_PARTS,
    "share_distance",
    "share_key",
    "r_held_out",
    "r",
    "label",
    "effect",
    "profile",
)
"""The columns of which one reads by pointing at a head."""
_COLOURS = {
    "where_part": "where (part of the contribution)",
    "what_part": "what (part of the contribution)",
    "neither_part": "neither (part of the contribution)",
    "joint": "joint (above 0: where and what together)",
    "contribution": "contribution (nats per token)",
    "share_distance": "distance alone (share of variance)",
    "share_key": "key alone (share of variance)",
    "r_held_out": "held-out r",
    "r": "r",
    "effect": "added loss (nats per token)",
}
_BLOCKS = "▁▂▃▄▅▆▇█"


def atlas(subject: Subject, heads: pd.DataFrame, panels: Panels) -> Markup:
    """Render the section.

    Args:
        subject: the model and its texts.
        heads: the table of all heads (``atlas_table``).
        panels: of the heads that are listed.
    """
    layers = sorted(int(layer) for layer in heads["layer"].unique())
    data: AtlasData = {
        "labels": [head_label(*place) for place in places_of(heads)],
        "hover": _hover_texts(heads),
        "layers": {str(layer): _layer_name(layer, subject.attention) for layer in layers},
        "colours": colours_of(heads),
        "words": [printable(word) for word in subject.words[:SHOWN]],
        "causal": panels.causal,
        "distances": panels.distances,
        "attended": panels.attended,
        "panels": panels.by_label,
    }
    shown = with_attention(heads[[*HEAD, *(name for name in _TITLES if name in heads)]], subject.attention)
    return render(
        "atlas",
        has=set(heads.columns),
        axes={name: colour["title"] for name, colour in data["colours"].items() if not colour["names"]},
        colours={name: colour["title"] for name, colour in data["colours"].items()},
        data=Markup(_script_json(data)),
        distances=panels.distances,
        height=map_height(len(layers)),
        reasons=[f"{reason} (layers {numbers(of_layers)})" for reason, of_layers in panels.reasons.items()],
        same=SAME,
        shown=len(data["words"]),
        table=table("atlas", "Every head", shown, _TITLES, _DIGITS, named=True),
    )


def _script_json(data: Any) -> str:
    """Encode JSON for ``<script>``: ASCII without ``<``, which is needed to end a script or begin a comment."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def places_of(heads: pd.DataFrame) -> list[tuple[int, int]]:
    """Return layer and head of each row."""
    return [*heads[HEAD].astype(int).itertuples(index=False, name=None)]


def _layer_name(layer: int, attention: Mapping[int, str]) -> str:
    return f"{attention[layer]} · {layer}" if attention else str(layer)


def atlas_table(places: Sequence[tuple[int, int]], measured: Mapping[str, Measured]) -> pd.DataFrame:
    """Join the tables of the sections: a row for each head, the heads that contribute most first."""
    heads = pd.DataFrame([*places], columns=HEAD)
    tables = {name: one.trained for name, one in measured.items()}
    names = ("where_or_what", "additivity", "labels", "ablation", "distance")
    needs, additivity, labels, ablation, distance = map(tables.get, names)
    if needs is not None:
        heads = heads.merge(needs, on=HEAD, how="left").sort_values("contribution", ascending=False, kind="stable")
    if additivity is not None:
        columns = ["share_distance", "share_key", main_correlation(additivity)]
        heads = heads.merge(by_head(additivity)[[*HEAD, *columns]], on=HEAD, how="left")
    if labels is not None:
        words = labels[HEAD].assign(label=label_words(labels["label"]))
        heads = heads.merge(words, on=HEAD, how="left")
    if ablation is not None:
        heads = heads.merge(ablation[[*HEAD, "effect"]], on=HEAD, how="left")
    if distance is not None:
        heads = heads.merge(_profile_lines(distance), on=HEAD, how="left")
    return heads.reset_index(drop=True)


def _profile_lines(distance: pd.DataFrame) -> pd.DataFrame:
    """Draw each profile as a line of blocks, on its own scale, with its range; a blank where a window has no keys."""
    near = distance[distance["distance"].isin(shown_distances(distance["distance"]))]
    profiles = near.pivot(index=HEAD, columns="distance", values="value")
    heights = profiles.sub(profiles.min(axis=1), axis=0)
    ranges = heights.max(axis=1)
    steps = heights.div(ranges.replace(0.0, 1.0), axis=0).mul(len(_BLOCKS) - 1).round().fillna(-1).astype(int)
    lines = ["".join("\u2002" if step < 0 else _BLOCKS[step] for step in row) for row in steps.to_numpy()]
    return ranges.to_frame("range").assign(profile=lines).reset_index()


def _hover_texts(heads: pd.DataFrame) -> list[str]:
    """Write the numbers of each head in the digits of the table, with the standard errors over texts that there are."""
    cells = cells_of(heads, _DIGITS)
    lines = [[head_label(*place) for place in places_of(heads)]]
    for name in _HOVER:
        if name in cells:
            errors = cells.get(f"{name}_se")
            values = cells[name] if errors is None else [f"{x} ± {e}" for x, e in zip(cells[name], errors, strict=True)]
            lines.append([f"{_TITLES[name]}: {value}" if value != "" else "" for value in values])
    if "verdict" in cells:
        lines.append(["(± standard error over texts)"] * len(heads))
    return ["\n".join(filter(None, of_head)) for of_head in zip(*lines, strict=True)]


def colours_of(heads: pd.DataFrame) -> dict[str, Colour]:
    """Return the measures that the map may show; the verdicts of ``where_or_what`` are first."""
    colours = {"verdict": _verdict_colour(heads)} if "verdict" in heads else {}
    for name, title in _COLOURS.items():
        if name in heads and heads[name].notna().any():
            (heat,) = plot_heads(heads, name, signed=name in ("effect", "joint")).data
            values = [None if pd.isna(x) else float(f"{x:.6g}") for x in heads[name]]
            colours[name] = _colour(title, heat, values)
    return colours


def _verdict_colour(heads: pd.DataFrame) -> Colour:
    names = [name for name in NEEDS if (heads["verdict"] == name).any()]
    codes = [names.index(verdict) if verdict in names else None for verdict in heads["verdict"]]
    cells = heads[HEAD].assign(code=pd.array(codes, dtype="Float64"))
    grid = cells.pivot(index="layer", columns="head", values="code")
    heat = category_map(grid, names, [NEEDS[name] for name in names])
    return _colour("What the contribution needs", heat, codes, names)


def _colour(title: str, heat: go.Heatmap, values: list[Any], names: list[str] | None = None) -> Colour:
    scale = [list(stop) for stop in heat.colorscale]
    return {
        "title": title,
        "values": values,
        "scale": scale,
        "low": float(heat.zmin),
        "high": float(heat.zmax),
        "names": names or [],
    }
