"""Layout of widgets: title, colour scale, and charts of circuitsvis, side by side or selected from a list."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.viz.palette import NEGATIVE, POSITIVE

from .offline import Widget, rounded, script_json

# Draws every choice once, when it is first asked for, and keeps it: a chart is dear.
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
    """

    scale: float
    title: str
    note: str
    causal: bool = False

    def common(self, tokens: Sequence[str]) -> dict[str, Any]:
        """Properties that all charts of a widget have."""
        ends = {"maxValue": self.scale, "minValue": -self.scale}
        return {"tokens": list(tokens), **ends, "negativeColor": NEGATIVE, "positiveColor": POSITIVE}

    def widget(
        self, groups: Mapping[str, Sequence[str]], values: Iterable[Tensor], draw: str, data: Any, style: str = ""
    ) -> Widget:
        """The widget of these data, drawn by this script: title, explanation, scale, and choices in groups."""
        body = self._header(values) + _menu(groups) + f'<div data-stage="" style="{style}"></div>'
        return Widget(body, draw % script_json(data), title=self.title)

    def _header(self, values: Iterable[Tensor]) -> str:
        """Title, explanation, and the colours with their numbers: below 0 as well, if a value is."""
        scale, negative = f"{self.scale:.3g}", any(bool((x < 0).any()) for x in values)
        colours = f"{NEGATIVE},#fff,{POSITIVE}" if negative else f"#fff,{POSITIVE}"
        bar = (  # as circuitsvis mixes colours; older browsers take the first
            f"height:10px;border:1px solid #bbb;background:linear-gradient(to right,{colours});"
            f"background:linear-gradient(to right in lab,{colours})"
        )
        ends = "".join(f"<span>{end}</span>" for end in ((f"−{scale}", "0", scale) if negative else ("0", scale)))
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
    """All heads small, and the selected one in full size: circuitsvis's ``AttentionHeads``."""
    short = [f"H{name}" for name in names]  # they cover the chart
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
    """Several matrices of one head beside each other; a list of heads to choose from."""
    charts = [rounded(x, layout.scale) for x in matrices.values()]
    width = 320 if len(tokens) <= 16 else 440
    data = {
        "component": "AttentionPattern",
        "common": layout.common(tokens) | {"maskUpperTri": layout.causal},
        "choices": [[{"attention": matrix} for matrix in heads] for heads in zip(*charts, strict=True)],
        "captions": list(matrices),
        "columns": f"repeat(auto-fill,minmax(min(100%,{width}px),1fr))",
        "style": "padding:0 16px;max-width:640px",  # or circuitsvis's negative margins would cut the labels
    }
    return layout.widget({"": names}, matrices.values(), _DRAW, data)


def coloured_text(
    values: Mapping[str, Float64[Tensor, "head token"]], names: Sequence[str], tokens: Sequence[str], layout: Layout
) -> Widget:
    """A text whose tokens have the colours of their values; groups of heads to choose from."""
    data = {
        "component": "ColoredTokens",
        "common": layout.common(tokens) | {"paddingBottom": 60},  # room for a tooltip
        "choices": [[{"values": row}] for x in values.values() for row in rounded(x, layout.scale)],
        "captions": [""],
        **_ONE,
    }
    return layout.widget(dict.fromkeys(values, names), values.values(), _DRAW, data)


_ONE = {"columns": "minmax(0,1fr)", "style": ""}


def _menu(groups: Mapping[str, Sequence[str]]) -> str:
    """The choices, grouped where there are several groups; none where there is nothing to choose."""
    if sum(map(len, groups.values())) < 2:
        return ""
    options = ""
    for group, names in groups.items():
        prefix = f"{group}, head " if group else ""
        listed = "".join(f"<option>{html.escape(prefix + name)}</option>" for name in names)
        options += f'<optgroup label="{html.escape(group)}">{listed}</optgroup>' if len(groups) > 1 else listed
    return f'<label style="display:block;margin:0 0 8px">head <select style="font:inherit">{options}</select></label>'
