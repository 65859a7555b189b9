"""Layout of widgets: title, colour scale, and charts of circuitsvis, side by side or selected from a list."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.viz.palette import NEGATIVE, POSITIVE

from .offline import Widget, rounded, script_json

_MUTED = "color:#555;font-size:13px;margin:0 0 8px"
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


def head_selector(
    matrices: Float64[Tensor, "head query key"],
    names: Sequence[str],
    tokens: Sequence[str],
    *,
    scale: float,
    causal: bool,
    title: str,
    note: str,
    cdn: bool,
) -> Widget:
    """All heads small, and the selected one in full size: circuitsvis's ``AttentionHeads``."""
    props = {
        "attention": rounded(matrices, scale),
        "attentionHeadNames": [f"H{name}" for name in names],  # short: it covers the chart
        "tokens": list(tokens),
        "maskUpperTri": causal,
        **_colours(scale),
    }
    data: dict[str, Any] = {
        "component": "AttentionHeads",
        "common": {},
        "choices": [[props]],
        "captions": [""],
        **_ONE,
    }
    note = with_grey(note, causal)
    body = header(title, note, scale, negative=bool((matrices < 0).any())) + _STAGE
    return Widget(body, _DRAW % script_json(data), title=title, cdn=cdn)


def matrices_beside(
    matrices: Mapping[str, Float64[Tensor, "head query key"]],
    names: Sequence[str],
    tokens: Sequence[str],
    *,
    scale: float,
    causal: bool,
    title: str,
    note: str,
    cdn: bool,
) -> Widget:
    """Several matrices of one head beside each other; a list of heads to choose from."""
    charts = {caption: rounded(x, scale) for caption, x in matrices.items()}
    choices = [[{"attention": charts[caption][n]} for caption in charts] for n in range(len(names))]
    width = 320 if len(tokens) <= 16 else 440
    data: dict[str, Any] = {
        "component": "AttentionPattern",
        "common": {"tokens": list(tokens), "maskUpperTri": causal, **_colours(scale)},
        "choices": choices,
        "captions": list(charts),
        "columns": f"repeat(auto-fill,minmax(min(100%,{width}px),1fr))",
        "style": "padding:0 16px;max-width:640px",  # or circuitsvis's negative margins would cut the labels
    }
    negative = any(bool((x < 0).any()) for x in matrices.values())
    body = header(title, with_grey(note, causal), scale, negative=negative) + menu({"": names}) + _STAGE
    return Widget(body, _DRAW % script_json(data), title=title, cdn=cdn)


def coloured_text(
    values: Mapping[str, Float64[Tensor, "head token"]],
    names: Sequence[str],
    tokens: Sequence[str],
    *,
    scale: float,
    title: str,
    note: str,
    cdn: bool,
) -> Widget:
    """A text whose tokens have the colours of their values; groups of heads to choose from."""
    data: dict[str, Any] = {
        "component": "ColoredTokens",
        "common": {"tokens": list(tokens), "paddingBottom": 60, **_colours(scale)},  # room for a tooltip
        "choices": [[{"values": row}] for x in values.values() for row in rounded(x, scale)],
        "captions": [""],
        **_ONE,
    }
    negative = any(bool((x < 0).any()) for x in values.values())
    body = header(title, note, scale, negative=negative) + menu(dict.fromkeys(values, names)) + _STAGE
    return Widget(body, _DRAW % script_json(data), title=title, cdn=cdn)


_ONE = {"columns": "minmax(0,1fr)", "style": ""}
_STAGE = '<div data-stage=""></div>'


def _colours(scale: float) -> dict[str, Any]:
    return {"maxValue": scale, "minValue": -scale, "negativeColor": NEGATIVE, "positiveColor": POSITIVE}


def with_grey(note: str, causal: bool) -> str:
    return f"{note} {'Grey: after the query.' if causal else ''}".strip()


def header(title: str, note: str, scale: float, *, negative: bool) -> str:
    """Title, explanation, and the colours with their numbers."""
    colours = f"{NEGATIVE},#fff,{POSITIVE}" if negative else f"#fff,{POSITIVE}"
    ends = (f"−{scale:.3g}", "0", f"{scale:.3g}") if negative else ("0", f"{scale:.3g}")
    bar = (  # as circuitsvis mixes colours; older browsers take the first
        f"height:10px;border:1px solid #bbb;background:linear-gradient(to right,{colours});"
        f"background:linear-gradient(to right in lab,{colours})"
    )
    numbers = "".join(f"<span>{end}</span>" for end in ends)
    return (
        f'<div style="font-size:16px;font-weight:600">{html.escape(title)}</div>'
        f'<div style="{_MUTED}">{html.escape(note)}</div>'
        f'<div data-legend="" style="max-width:260px;margin:0 0 10px"><div style="{bar}"></div>'
        f'<div style="display:flex;justify-content:space-between;font-size:12px">{numbers}</div></div>'
    )


def menu(groups: Mapping[str, Sequence[str]]) -> str:
    """The choices, grouped where there are several groups; none where there is nothing to choose."""
    if sum(map(len, groups.values())) < 2:
        return ""
    options = ""
    for group, names in groups.items():
        prefix = f"{group}, head " if group else ""
        listed = "".join(f"<option>{html.escape(prefix + name)}</option>" for name in names)
        options += f'<optgroup label="{html.escape(group)}">{listed}</optgroup>' if len(groups) > 1 else listed
    return f'<label style="display:block;margin:0 0 8px">head <select style="font:inherit">{options}</select></label>'
