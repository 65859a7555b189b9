"""circuitsvis without a network: the page contains its library, and data in the page never run as code.

circuitsvis's own HTML contacts google.com at every display and allows a token of the text to become a script of the
page, so the page is written here, and only the drawing code is circuitsvis's.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
from collections.abc import Iterable
from importlib import resources
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

from circuitsvis.utils.render import RenderedHTML
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.utils.files import whole_file
from tl_posdisent.utils.validation import printable

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{title}</title>
<style>:root {{ color-scheme: light dark }} @media screen and (prefers-color-scheme: dark) {{
  body {{ background: #14181d }} body > div:not(:has(.colored-tokens)) {{ filter: invert(1) hue-rotate(180deg) }} }}
</style></head><body>
"""
_STYLE = "background:#fff;color:#222;color-scheme:light;font:14px/1.4 system-ui,sans-serif;padding:12px"


class Widget(RenderedHTML):  # type: ignore[misc]
    """A widget that a notebook displays and that can be saved: circuitsvis's ``RenderedHTML``, without a network.

    ``str(widget)`` is its HTML, with the library of circuitsvis inside (1.3 MB).

    Example:
        >>> import tempfile, pathlib
        >>> from tl_posdisent import demo_tokens, fit_additive, load_demo_model, show_scores
        >>> model, tokens = load_demo_model(), demo_tokens(length=8)
        >>> _, cache = model.run_with_cache(tokens)
        >>> widget = show_scores(fit_additive(cache["attn_scores", 3]), model.to_str_tokens(tokens[0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     widget.save(pathlib.Path(folder, "scores.html")).name
        'scores.html'
    """

    def __init__(self, body: str, draw: str, *, title: str) -> None:
        """``draw`` is JavaScript, a function of the library and of the element with ``body``; both are trusted."""
        self._body, self._draw, self.title = body, draw, title

    @property
    def local_src(self) -> str:
        """The HTML with the library inside; nothing is fetched."""
        return f"<script>{library()}</script>\n{self.fragment()}"

    cdn_src = local_src

    def element_and_script(self, name: str | None = None) -> tuple[str, str]:
        """Return the HTML and the script that draws in it, for a page on which ``library()`` has run.

        ``name`` is the id of the element. By default it is new each time, because a widget may be displayed twice.
        """
        name = name or f"tl-posdisent-{uuid4().hex[:12]}"
        # Without this style, circuitsvis's charts shrink with the window and never grow again.
        body = f"<style>#{name} div:has(> canvas) {{ width: 100% !important }}</style>{self._body}"
        # The attribute keeps JupyterLab's shortcuts from taking the arrow keys.
        element = f'<div id="{name}" style="{_STYLE}" data-lm-suppress-shortcuts="true">{body}</div>'
        return element, f'({self._draw})({_GLOBAL}, document.getElementById("{name}"));'

    def fragment(self) -> str:
        """Return the HTML with the script in a ``<script>`` element."""
        element, script = self.element_and_script()
        return f"{element}\n<script>{script}</script>"

    def _repr_html_(self) -> str:
        return self.local_src

    def __repr__(self) -> str:
        return f"Widget({self.title!r})"

    def save(self, path: str | PathLike[str]) -> Path:
        """Write a separate page, which may run no other script and may fetch nothing."""
        element, script = self.element_and_script()
        scripts = [library(), script]
        page = _HEAD.format(policy=policy(scripts), title=html.escape(self.title)) + element
        page += "".join(f"\n<script>{script}</script>" for script in scripts) + "\n</body></html>\n"
        path = Path(path)
        with whole_file(path) as file:
            file.write(page.encode("utf-8"))
        return path


_GLOBAL = "window.tlPosdisentCircuitsVis"
DARK_TOKEN = 0.445
"""Brightness (0.299 r + 0.587 g + 0.114 b) below which text on a token is white: with circuitsvis's 0.6 the contrast is
as low as 3.2, with this one at least 4.5 on every mixture of the diverging colours."""
_REPLACED = {
    'brightness()<.6?"white":"black"': f'brightness()<{DARK_TOKEN}?"white":"black"',
    '"Destination Token"': '"query"',
    '"Source Token"': '"key"',
    "`Dest: $": "`query: $",
    "`Src: $": "`key: $",
}
"""What circuitsvis's library says, and what it says here: the colour of text, titles of axes, and tooltips."""


@functools.cache
def library() -> str:
    """Return JavaScript that defines circuitsvis under one global name, unless it is already defined."""
    source = (resources.files("circuitsvis") / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    source = adapted(source.split("//# sourceMappingURL=")[0]).replace("</script", r"<\/script")
    return f"{_GLOBAL} = {_GLOBAL} || (() => {{\n{source}\nreturn CircuitsVis;\n}})();"


def adapted(source: str) -> str:
    """Make circuitsvis's library write legibly on dark tokens, and say query and key, as all of this package does."""
    for before, after in _REPLACED.items():
        if before not in source:
            raise RuntimeError(
                f"circuitsvis's library must contain {before!r}, as that of version 1.43.3 does, but that of "
                f"{version('circuitsvis')} does not: install circuitsvis 1.43.3"
            )
        source = source.replace(before, after)
    return source


def policy(scripts: Iterable[str]) -> str:
    """Return the Content-Security-Policy of a page that runs only these scripts and fetches nothing."""
    digests = (hashlib.sha256(script.encode("utf-8")).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def script_json(data: Any) -> str:
    """Encode JSON for ``<script>``: ASCII without ``<``, which is needed to end a script or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def rounded(values: Float[Tensor, "*shape"], scale: float) -> Any:
    """Return numbers as lists, rounded to the fourth digit of the scale, which is enough for a tooltip."""
    decimals = max(0, 3 - math.floor(math.log10(scale)))
    return values.detach().double().cpu().numpy().round(decimals).tolist()


# --- tokens -------------------------------------------------------------------------------------------------

_SEEN = {" ": "·", "\n": "↵"}


def visible(token: str) -> str:
    """Make a token's invisible parts visible: spaces, line breaks, control characters, halves of characters."""
    return "".join(_SEEN.get(c) or printable(c) for c in token) or "∅"


def axis_token(token: str) -> str:
    """Format a token for the axes of a chart, which show it literally and have little room."""
    text = visible(token)
    return text if len(text) <= 24 else text[:23] + "…"


def text_token(token: str) -> str:
    """Format a token for running text, which circuitsvis reads as HTML: ``<`` and ``&`` must not begin markup."""
    text = visible(token).replace("<", "<\u2060").replace("&", "&\u2060")  # a word joiner, of no width
    return text + "\n" if "\n" in token else text  # circuitsvis breaks the line there
