"""Maps of heads with the same axes everywhere: all layers and heads that are analysed, measured or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup

from tl_posdisent.page.drawing.markup import figure, map_height, remove_cell_text
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.palette import BLACK

UNKNOWN = "#b9b9b9"
"""The colour of heads without a number, which is in none of the scales."""
_NAMED = 40  # the most layers that are all named on the axis


def head_map(drawn: go.Figure, caption: str, subject: Subject, *, linked: bool = False) -> Markup:
    """Render a map with a cell for each head of ``subject``; those without a value are grey and crossed.

    The caption says how many these are.
    """
    shown = name_layers(complete(drawn, subject), subject.layers, subject.attention)
    missing = sum(len(trace.x) for trace in shown.data if trace.type == "scatter")
    cells, heads = len(shown.data[0].y) * len(shown.data[0].x), sum(map(len, subject.heads.values()))
    caption += grey_cells(missing, cells - heads, " (crossed)")
    return figure(shown, caption, height=map_height(len(subject.layers)), linked=linked)


def grey_cells(missing: int, empty: int, mark: str = "") -> str:
    """Describe the grey cells of a map, for its caption: ``missing`` heads, and ``empty`` cells of no analysed head.

    >>> grey_cells(1, 3), grey_cells(0, 0)
    ('; grey: 1 head without a number and 3 cells without an analysed head', '')
    """
    kinds = [f"{plural(missing, 'head')} without a number{mark}"] if missing else []
    kinds += [f"{plural(empty, 'cell')} without an analysed head"] if empty else []
    return f"; grey: {' and '.join(kinds)}" if kinds else ""


def complete(drawn: go.Figure, subject: Subject) -> go.Figure:
    """Extend a map of some heads to all heads of ``subject``, and mark those without a value, with a legend."""
    (heat,) = drawn.data
    layers, heads = subject.layers, sorted({head for of_layer in subject.heads.values() for head in of_layer})
    rows, columns = [str(layer) for layer in layers], [str(head) for head in heads]
    remove_cell_text(heat)
    for name in ("z", "customdata"):
        if heat[name] is not None:
            cells = pd.DataFrame([[*row] for row in heat[name]], heat.y, heat.x, dtype=object)
            full = cells.reindex(index=rows, columns=columns)
            heat[name] = (
                full.to_numpy(dtype=float) if name == "z" else full.astype(object).where(full.notna(), "").to_numpy()
            )
    heat.update(x=columns, y=rows, hoverongaps=False)
    frame_cells(drawn, len(rows), len(columns))
    known = np.isfinite(np.array(heat.z, dtype=float))
    missing = [
        (str(head), str(layer))
        for row, layer in enumerate(layers)
        for column, head in enumerate(heads)
        if head in subject.heads[layer] and not known[row, column]
    ]
    if missing:
        x, y = zip(*missing, strict=True)
        cross = {"symbol": "x-thin", "size": 7, "line": {"color": BLACK, "width": 1.5}}
        drawn.add_scatter(
            x=x, y=y, mode="markers", marker=cross, name="not measured", hoverinfo="name", showlegend=True
        )
    return drawn if known.all() else drawn.update_layout(plot_bgcolor=UNKNOWN)


def frame_cells(drawn: go.Figure, n_rows: int, n_columns: int) -> go.Figure:
    """End the axes of a map at the edges of its cells, the first row at the top; marks in cells would widen them."""
    drawn.update_xaxes(autorange=False, range=[-0.5, n_columns - 0.5])
    return drawn.update_yaxes(autorange=False, range=[n_rows - 0.5, -0.5])


def name_layers(drawn: go.Figure, layers: Sequence[int], attention: dict[int, str]) -> go.Figure:
    """Label the layers of a map as global or local, where ``attention`` has them."""
    if attention:
        labelled: Any = layers[:: -(-len(layers) // _NAMED)]
        labels = [f"{attention[layer]} · {layer}" for layer in labelled]
        drawn.update_yaxes(tickvals=[str(layer) for layer in labelled], ticktext=labels, automargin=True)
    return drawn


def with_attention(table: pd.DataFrame, attention: dict[int, str]) -> pd.DataFrame:
    """Insert the column ``attention`` behind layer and head, if the model has sliding windows."""
    if not attention:
        return table
    column = [attention[int(layer)] for layer in table["layer"]]
    names = [name for name in table.columns if name not in ("layer", "head")]
    return table.assign(attention=column)[[*(name for name in table.columns if name not in names), "attention", *names]]
