"""The HTML document of a report, with its scripts and its content-security policy."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from typing import NamedTuple

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tl_posdisent.page.markup import read, render

_LARGE = 100_000
"""Characters of a script from which it is compressed."""


class Part(NamedTuple):
    """A part of the page: its id, its title in the table of contents, and its HTML."""

    name: str
    title: str
    html: Markup


def page(title: str, parts: Sequence[Part]) -> str:
    """Assemble the HTML document.

    Libraries are compressed, and a script unpacks them and runs all others in their order.
    """
    plotly = [get_plotlyjs()] if any('class="plot"' in part.html for part in parts) else []
    atlas = [read("atlas.js")] if any(part.name == "atlas" for part in parts) else []
    scripts, loader = [*plotly, read("page.js"), *atlas], read("load.js")
    html = render(
        "page",
        title=title,
        parts=parts,
        scripts=[(len(script) > _LARGE, _packed(script) if len(script) > _LARGE else script) for script in scripts],
        loader=loader,
        style=read("page.css"),
        policy=_policy([*scripts, loader]),
    )
    return html + "\n"


def _policy(scripts: Iterable[str]) -> str:
    """Return the Content-Security-Policy of a page that runs only these scripts and fetches nothing."""
    digests = (sha256(script.encode("utf-8")).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{b64encode(digest).decode('ascii')}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _packed(script: str) -> str:
    """Compress a script, and write it in base64; the same script always gives the same text."""
    return b64encode(gzip.compress(script.encode("utf-8"), 9, mtime=0)).decode("ascii")
