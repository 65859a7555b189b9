"""Selection of heads, text and positions of a widget, and its layout: title, colour scale, circuitsvis's charts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_indices, check_integer, check_number, head_label
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE
from tl_posdisent.viz.widgets.offline import Widget, axis_token, rounded, script_json

# Draws each choice when it is first selected, and keeps it, because drawing a chart is expensive.
_DRAW = """(circuitsvis, root) => {
  const data = %s;
  const stage = root.querySelector("[data-stage]"), select = root.querySelector("select"), drawn = [];
  const draw = (n) => {
    const row = stage.appendChild(document.createElement("div"));
    row.style.cssText = "gap:8px;grid-template-columns:" + data.columns;
    data.choices[n].forEach((props, p) => {
      const figure = row.appendChild(document.createElement("figure"));
      figure.style.cssText = "margin:0;min-width:0;box-sizing:border-box;" + data.style;
      if (data.captions[p]) {
        const caption = figure.appendChild(document.createElement("figcaption"));
        caption.style.cssText = "font-weight:600;text-align:center;padding:4px 0";
        caption.textContent = data.captions[p];
      }
      const chart = figure.appendChild(document.createElement("div"));
      chart.id = `${root.id}-${n}-${p}`;
      circuitsvis.render(chart.id, circuitsvis[data.component], {...data.common, ...props});
    });
    return row;
  };
  const show = (n) => {
    drawn.forEach((row) => { row.style.display = "none"; });
    drawn[n] = drawn[n] || draw(n);
    drawn[n].style.display = "grid";
  };
  if (select) select.addEventListener("change", () => show(select.selectedIndex));
  show(select ? select.selectedIndex : 0);
}"""


@dataclass(frozen=True)
class Layout:
    """Title, explanation and colours of a widget.

    Attributes:
        scale: magnitude of the darkest colours.
        title, note: plain text.
        causal: whether cells after the query are grey.
        choice: what the menu selects.
    """

    scale: float
    title: str
    note: str
    causal: bool = False
    choice: str = "head"

    def common(self, tokens: Sequence[str]) -> dict[str, Any]:
        """Return the properties that all charts of a widget share."""
        ends = {"maxValue": self.scale, "minValue": -self.scale}
        return {"tokens": list(tokens), **ends, "negativeColor": NEGATIVE, "positiveColor": POSITIVE}

    def widget(self, groups: Mapping[str, Sequence[str]], values: Iterable[Tensor], draw: str, data: Any) -> Widget:
        """Build the widget of these data, drawn by this script: title, explanation, scale, and choices in groups."""
        body = self._header(values) + _menu(groups, self.choice) + '<div data-stage=""></div>'
        return Widget(body, draw % script_json(data), title=self.title)

    def beyond(self, values: Iterable[Tensor]) -> bool:
        """Return whether a magnitude exceeds the scale, so that it has the colour of the scale's end."""
        return any(bool((x.abs() > self.scale).any()) for x in values)

    def _header(self, values: Iterable[Tensor]) -> str:
        """Render the title, the explanation and the colour scale, with its negative half if a value is below 0."""
        values = list(values)
        negative, beyond = any(bool((x < 0).any()) for x in values), self.beyond(values)
        scale = f"{self.scale:.3g}"
        colours = f"{NEGATIVE},#fff,{POSITIVE}" if negative else f"#fff,{POSITIVE}"
        gradient = f"linear-gradient(to right in lab,{colours})"  # as circuitsvis mixes colours
        bar = f"height:10px;border:1px solid #bbb;background:{gradient}"
        low, high = (f"≤ −{scale}", f"≥ {scale}") if beyond else (f"−{scale}", scale)
        ends = "".join(f"<span>{end}</span>" for end in ((low, "0", high) if negative else ("0", high)))
        note = f"{self.note} {'Grey: after the query.' if self.causal else ''}".strip()
        return (
            f'<div style="font-size:16px;font-weight:600">{html.escape(self.title)}</div>'
            f'<div style="color:#555;font-size:13px;margin:0 0 8px">{html.escape(note)}</div>'
            f'<div data-legend="" style="max-width:260px;margin:0 0 10px"><div style="{bar}"></div>'
            f'<div style="display:flex;justify-content:space-between;font-size:12px">{ends}</div></div>'
        )


def head_selector(
    matrices: Float64[Tensor, "head query key"], names: Sequence[str], tokens: Sequence[str], layout: Layout
) -> Widget:
    """Draw all heads as thumbnails and the selected one in full size: circuitsvis's ``AttentionHeads``."""
    short = [name if name.startswith("L") else f"H{name}" for name in names]  # longer names would cover the chart
    props = {"attention": rounded(matrices, layout.scale), "attentionHeadNames": short}
    common = layout.common(tokens) | {"maskUpperTri": layout.causal}
    data = {"component": "AttentionHeads", "common": common, "choices": [[props]], "captions": [""], **_ONE}
    return layout.widget({}, [matrices], _DRAW, data)


def matrices_beside(
    matrices: Mapping[str, Float64[Tensor, "head query key"]],
    names: Sequence[str],
    tokens: Sequence[str],
    layout: Layout,
) -> Widget:
    """Draw several matrices of one head side by side, with a menu of heads."""
    charts = [rounded(x, layout.scale) for x in matrices.values()]
    per_row = 3 if len(matrices) % 3 == 0 else 2  # at most, so that rows are full
    width = 260 if per_row == 3 else 320 if len(tokens) <= 16 else 440
    least = f"max({width}px,(100% - {10 * (per_row - 1)}px)/{per_row})"
    data = {
        "component": "AttentionPattern",
        "common": layout.common(tokens) | {"maskUpperTri": layout.causal},
        "choices": [[{"attention": matrix} for matrix in heads] for heads in zip(*charts, strict=True)],
        "captions": list(matrices),
        "columns": f"repeat(auto-fill,minmax(min(100%,{least}),1fr))",
        "style": "padding:0 16px;max-width:640px",  # otherwise circuitsvis's negative margins cut the labels
    }
    return layout.widget({"": names}, matrices.values(), _DRAW, data)


def coloured_text(
    values: Mapping[str, Float[Tensor, "head token"]], names: Sequence[str], tokens: Sequence[str], layout: Layout
) -> Widget:
    """Draw a text with tokens coloured by their values, with a menu of heads in groups."""
    data = {
        "component": "ColoredTokens",
        "common": layout.common(tokens) | {"paddingBottom": 60},  # room for a tooltip
        "choices": [[{"values": row}] for x in values.values() for row in rounded(x, layout.scale)],
        "captions": [""],
        **_ONE,
    }
    return layout.widget(dict.fromkeys(values, names), values.values(), _DRAW, data)


_ONE = {"columns": "minmax(0,1fr)", "style": ""}


def _menu(groups: Mapping[str, Sequence[str]], choice: str) -> str:
    """Render the menu, with groups if there are several; empty if there is only one choice."""
    if sum(map(len, groups.values())) < 2:
        return ""
    options = ""
    for group, names in groups.items():
        prefix = f"{group}, {choice} " if group else ""
        listed = "".join(f"<option>{html.escape(prefix + name)}</option>" for name in names)
        options += f'<optgroup label="{html.escape(group)}">{listed}</optgroup>' if len(groups) > 1 else listed
    select = f'<select style="font:inherit">{options}</select>'
    return f'<label style="display:block;margin:0 0 8px">{choice} {select}</label>'


CELLS = 200_000
"""The number of cells that a browser draws in about 20 s."""


@dataclass(frozen=True)
class Options:
    """The arguments that all widgets of matrices share, as given by the user; ``show_scores`` explains them."""

    heads: Iterable[int] | None
    text: int
    positions: Iterable[int] | None
    scale: float | None
    title: str | None
    layer: int | None = None


@dataclass(frozen=True)
class Choice:
    """The shown part of ``[*batch, query, key]`` matrices; ``rows`` index the heads with all leading axes flattened."""

    options: Options
    heads: list[int]
    rows: list[int]
    positions: list[int]
    tokens: list[str]
    layer: int | None = None

    @property
    def names(self) -> list[str]:
        """The names of the heads."""
        return [str(head) if self.layer is None else head_label(self.layer, head) for head in self.heads]

    def titled(self, what: str) -> str:
        """Prefix a title with the head or the layer that is shown, if there is a single one."""
        one, layer = len(self.heads) == 1, self.layer
        of = f"Head {self.heads[0]}" if one and layer is None else self.names[0] if one else f"Layer {layer}"
        return f"{of}: {what}" if one or layer is not None else what[0].upper() + what[1:]

    def of(self, x: Tensor) -> Float64[Tensor, "head query key"]:
        """Return the chosen part of matrices ``[*batch, query, key]``."""
        at = torch.tensor(self.positions, device=x.device)
        return pick(x, self.rows)[:, at][:, :, at].double()

    def layout(self, shown: Iterable[Tensor], title: str, note: str, *, causal: bool) -> Layout:
        """Return the layout of a widget of these matrices; the user's title and scale take precedence."""
        scale = check_scale(self.options.scale, shown, first=self.positions[0] == 0)
        return Layout(scale, check_title(self.options.title, self.titled(title)), note, causal)


def pick(x: Tensor, rows: Sequence[int], *, cell_axes: int = 2) -> Tensor:
    """Flatten the batch axes of ``[*batch, …]``, all but the last ``cell_axes``, and select rows: ``[row, …]``.

    Components that pooled fits share between texts have no axis of texts; each text gets the same rows.
    """
    flat = x.reshape(-1, *x.shape[x.ndim - cell_axes :])
    return flat[torch.tensor(rows, device=x.device) % len(flat)]


def choose(
    shape: Sequence[int],
    tokens: Any,
    options: Options,
    *,
    charts: int = 1,
    more: int = 0,
    layers: Sequence[int] | None = None,
) -> Choice:
    """Check the options for matrices of shape ``[*batch, query, key]`` and select the part to show.

    ``charts`` matrices are drawn for each head, and ``more`` in addition. ``layers`` are the layers of an axis before
    the heads, if there is one.
    """
    *batch, n_query, n_key = shape
    layer, n_layers = options.layer, 1
    if layer is not None:
        check_integer("layer", layer, 0)
    if layers is not None:
        layer, n_layers = layers[0] if layer is None and len(layers) == 1 else layer, batch.pop(-2)
        if layer not in layers:
            raise ArgumentError("layer", f"must be one of the fit's, {', '.join(map(str, layers))}, got {layer!r}")
    heads, rows = pick_heads(batch, options.heads, options.text)
    n_heads = [1, *batch][-1]
    at = 0 if layers is None else layers.index(layer)  # texts, layers and heads as one axis
    rows = [(row // n_heads * n_layers + at) * n_heads + row % n_heads for row in rows]
    if n_query != n_key:
        raise ValueError(f"the matrices must be square, as a whole text's are, got {n_query} queries × {n_key} keys")
    words = check_words(tokens, n_key)
    positions = check_positions(options.positions, n_key)
    _check_cells(len(heads), len(positions), charts, more)
    labels = [axis_token(words[i]) for i in positions]
    if positions != list(range(len(positions))):
        labels = [f"{label}@{i}" for label, i in zip(labels, positions, strict=True)]
    return Choice(options, heads, rows, positions, labels, layer)


def pick_heads(batch: Sequence[int], heads: Any, text: int) -> tuple[list[int], list[int]]:
    """Return the indices of the heads of one text, and their rows with all leading axes flattened."""
    if len(batch) > 2:
        raise ArgumentError(
            "scores",
            "must have shape (query, key), (head, query, key) or (text, head, query, key) to be shown, got "
            f"{len(batch)} leading axes: {tuple(batch)}",
        )
    texts, n_heads = [1, 1, *batch][-2:]
    check_integer("text", text, 0, texts - 1)
    chosen = check_indices("heads", heads, n_heads)
    return chosen, [text * n_heads + head for head in chosen]


def check_positions(positions: Any, length: int) -> list[int]:
    chosen = check_indices("positions", positions, length)
    if chosen != sorted(chosen):
        raise ArgumentError("positions", f"must be ascending, got {chosen}")
    return chosen


def check_words(tokens: Any, length: int) -> list[str]:
    words = None if isinstance(tokens, (str, bytes, Tensor)) or not isinstance(tokens, Iterable) else list(tokens)
    wrong = [word for word in words or () if not isinstance(word, str)]
    if words is None or wrong:
        got = type(tokens).__name__ if words is None else f"{wrong[0]!r} in it"
        raise ArgumentError("tokens", f"must be a list of strings, such as model.to_str_tokens(ids), got {got}")
    if len(words) != length:
        raise ArgumentError("tokens", f"must be as many as the keys, {length}, got {len(words)}")
    return words


def _check_cells(n_heads: int, length: int, charts: int, more: int) -> None:
    """Raise for more cells than a browser can draw; the error suggests selections that fit."""
    matrices = n_heads * charts + more
    if matrices * length**2 <= CELLS:
        return
    fewer, shorter = (CELLS // length**2 - more) // charts, math.isqrt(CELLS // matrices)
    ways = [f"heads=range({fewer})"] if fewer > 0 else []
    ways += [f"positions=range({shorter})"] if shorter >= 2 else []
    raise ValueError(
        f"heads and positions must be fewer: {matrices} matrices of {length}×{length} are {matrices * length**2} "
        f"cells, and a browser is asked to draw {CELLS} at most; choose for instance " + " or ".join(ways)
    )


def check_scale(scale: float | None, shown: Iterable[Tensor], *, first: bool = True) -> float:
    """Return the given scale, or one from the shown values (last axis keys) that an attention sink does not stretch.

    The default is the largest magnitude without the first key (if it is shown: ``first``) and without one cell in 200,
    and at least a twentieth of the largest of all. It is never 0.
    """
    if scale is not None:
        return check_number("scale", scale, above=0)
    ends = [1e-9]
    for x in shown:
        others = x[..., 1:] if first and x.shape[-1] > 1 else x
        sizes = others.abs().double().flatten()
        ends += [float(sizes.kthvalue(len(sizes) - len(sizes) // 200).values), float(x.abs().max()) / 20]
    return max(ends)


def check_title(title: str | None, default: str) -> str:
    if title is not None and not isinstance(title, str):
        raise ArgumentError("title", f"must be a string, got {type(title).__name__}")
    return default if title is None else title
