"""The page around the sections: its head, its policy that lets nothing in from outside, and its widgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tl_posdisent.viz.widgets.offline import Widget, hashes, library

from .head_widgets import place
from .markup import escape
from .stylesheet import STYLE

_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def page(title: str, sections: Sequence[str], contents: Mapping[str, str], widgets: Sequence[Widget]) -> str:
    """The whole HTML document.

    Args:
        title: plain text.
        sections: HTML, with the places of the widgets.
        contents: id and title of each section, for the table of contents.
        widgets: each goes where its place is.
    """
    body, scripts = "".join(sections), []
    for number, widget in enumerate(widgets):
        element, script = _fragment(widget, number)
        scripts.append(script)
        body = body.replace(place(number), f'<div class="widget">{element}</div>', 1)
    scripts = [library(), *scripts] if scripts else []
    allowed = hashes(scripts) or "'none'"
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in contents.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(scripts=allowed)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f'<body><header><h1>{escape(title)}</h1><nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f"<main>{body}</main>\n<footer>Made by tl_posdisent. This file needs no network.</footer>"
        + "".join(f"\n<script>{script}</script>" for script in scripts)
        + "\n</body></html>\n"
    )


def _fragment(widget: Widget, number: int) -> tuple[str, str]:
    """A widget's element and script, under a name that is the same in every run."""
    element, _, script = widget.fragment().rpartition("\n<script>")
    script = script.removesuffix("</script>")
    found = re.match(r'<div id="(tl-posdisent-\w+)"', element)
    assert found is not None
    return tuple(part.replace(found[1], f"widget-{number}") for part in (element, script))  # type: ignore[return-value]
