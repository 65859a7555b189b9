"""The page around the sections: head, contents, scripts, and a policy that admits nothing from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plotly.offline import get_plotlyjs

from tl_posdisent.viz.widgets.offline import library, policy

from .markup import escape
from .stylesheet import STYLE

_WITHOUT_SCRIPTS = "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
# A finger scrolls the page and does not zoom; paper is narrower than most windows.
_DRAW = """
for (const plot of document.querySelectorAll(".plot")) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, modeBarButtons });
  if (layout.meta === "linked")
    plot.on("plotly_click", ({ points: [{ x, y }] }) => { location.hash = `L${y}H${x}`; });
  addEventListener("beforeprint", () => Plotly.relayout(plot, { width: Math.min(680, plot.offsetWidth) }));
  addEventListener("afterprint", () => Plotly.relayout(plot, { width: null, autosize: true }));
}
"""


def page(title: str, sections: Sequence[str], contents: Mapping[str, str], widgets: Sequence[str]) -> str:
    """The whole HTML document: sections in HTML, titles in ``contents`` by id, scripts of the widgets."""
    body = "".join(sections)
    scripts = [get_plotlyjs(), _DRAW] if '<div class="plot"' in body else []
    scripts += [library(), *widgets] if widgets else []
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in contents.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f'<body><header><h1>{escape(title)}</h1><nav aria-label="Sections"><ul>{links}</ul></nav>'
        f"{_WITHOUT_SCRIPTS if scripts else ''}</header>\n"
        f"<main>{body}</main>\n<footer>Made by tl_posdisent. This file needs no network.</footer>"
        + "".join(f"\n<script>{script}</script>" for script in scripts)
        + "\n</body></html>\n"
    )
