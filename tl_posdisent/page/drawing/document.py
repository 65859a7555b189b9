"""The HTML document of a report, with its scripts and its content-security policy."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tl_posdisent.page.drawing.markup import read, render
from tl_posdisent.viz.widgets.offline import library, policy


def page(title: str, sections: Sequence[Markup], contents: Mapping[str, str], widgets: Sequence[str]) -> str:
    """Assemble the HTML document from the sections, their titles by id (``contents``) and the widgets' scripts.

    Libraries are compressed, and a script unpacks them and runs all others in their order.
    """
    scripts = [get_plotlyjs(), read("page.js")] if any('<div class="plot"' in section for section in sections) else []
    scripts += [read("atlas.js")] if "atlas" in contents else []
    scripts += [library(), *widgets] if widgets else []
    stored = [(len(script) > _LARGE, _packed(script) if len(script) > _LARGE else script) for script in scripts]
    loader = read("load.js") if scripts else ""
    html = render(
        "page",
        title=title,
        sections=sections,
        contents=contents,
        scripts=stored,
        loader=loader,
        style=read("page.css"),
        policy=policy([*scripts, loader] if scripts else []),
    )
    return html + "\n"


_LARGE = 100_000
"""Characters of a script from which it is compressed."""


@cache
def _packed(script: str) -> str:
    """Compress a script, and write it in base64; the same script always gives the same text."""
    return b64encode(gzip.compress(script.encode("utf-8"), 9, mtime=0)).decode("ascii")
