"""circuitsvis's charts for a page without a network, in the project's colours, in which no text runs as code."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import circuitsvis
from circuitsvis.utils.render import RenderedHTML
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_number, printable
from tl_posdisent.viz.palette import NEGATIVE, POSITIVE

_LONGEST = 24  # characters of a token for which an axis has room


class Widget(RenderedHTML):  # type: ignore[misc]
    """A chart of circuitsvis with a title, which a notebook displays with or without a network.

    ``str(widget)`` is its HTML, with the library of circuitsvis inside (1.3 MB).

    Args:
        chart: what a function of circuitsvis returns.
        title, note: plain text above the chart.

    Example:
        >>> from circuitsvis.tokens import colored_tokens
        >>> from tl_posdisent.viz import Widget
        >>> widget = Widget(colored_tokens(["a", "b"], [0.5, -1.0]), title="Two tokens", note="")
        >>> widget
        Widget('Two tokens')
        >>> "unpkg.com" in str(widget)
        False
    """

    def __init__(self, chart: RenderedHTML, *, title: str, note: str) -> None:
        self.title = title
        style = "background:#fff;color:#222;padding:12px;font:14px/1.4 system-ui,sans-serif"
        above = f"<b>{html.escape(title)}</b><br>{html.escape(note)}".encode("ascii", "xmlcharrefreplace").decode()
        # circuitsvis leaves its <div> open, so that the rest of a page would become a part of the chart.
        source = f'<div class="tl-posdisent" style="{style}">{above}\n{chart.local_src}</div></div>'
        super().__init__(local_src=source, cdn_src=source)

    def _repr_html_(self) -> str:
        """Return the HTML; circuitsvis's own method asks google.com at every display whether there is a network."""
        return str(self.local_src)

    def __repr__(self) -> str:
        return f"Widget({self.title!r})"


def heat_maps(
    matrices: Float[Tensor, "matrix query key"],
    names: Sequence[str],
    tokens: Sequence[str],
    *,
    scale: float,
    causal: bool,
    title: str,
    note: str,
) -> Widget:
    """Draw all matrices as thumbnails and the selected one in full size; cells after the query are grey if causal.

    Tokens are those of ``axis_token``. Magnitudes from ``scale`` on have the darkest colours.
    """
    chart = circuitsvis.attention.attention_heads(
        _rounded(matrices, scale), list(tokens), list(names), scale, -scale, NEGATIVE, POSITIVE, causal
    )
    grey = " Grey: after the query." if causal else ""
    return Widget(chart, title=title, note=f"{note} Rows are queries, columns keys.{grey} {_colours(scale)}".strip())


def coloured_text(
    values: Float[Tensor, " token"], tokens: Sequence[str], *, scale: float, title: str, note: str
) -> Widget:
    """Draw a text with tokens coloured by their values; tokens are those of ``text_token``."""
    chart = circuitsvis.tokens.colored_tokens(list(tokens), _rounded(values, scale), -scale, scale, NEGATIVE, POSITIVE)
    return Widget(chart, title=title, note=f"{note} {_colours(scale)}")


def _colours(scale: float) -> str:
    return f"Red: above 0, blue: below 0, darkest from {scale:.3g} on."


def _rounded(values: Tensor, scale: float) -> Tensor:
    """Round to the fourth digit of the scale, which is enough for a tooltip."""
    return values.detach().double().cpu().round(decimals=max(0, 3 - math.floor(math.log10(scale))))


def check_scale(scale: float | None, shown: Sequence[Tensor], *, first: bool = True) -> float:
    """Return the given scale, or the largest magnitude of the values (last axis keys), never 0.

    The first key (if it is shown: ``first``) does not count, because it often is an attention sink.
    """
    if scale is not None:
        return check_number("scale", scale, above=0)
    return max(1e-9, *(float(x[..., int(first and x.shape[-1] > 1) :].abs().max()) for x in shown))


def check_title(title: str | None, default: str) -> str:
    if title is not None and not isinstance(title, str):
        raise ArgumentError("title", f"must be a string, got {type(title).__name__}")
    return default if title is None else title


# --- tokens -------------------------------------------------------------------------------------------------

_SEEN = {" ": "·", "\n": "↵"}


def _harmless(text: str) -> str:
    """Break what begins markup: circuitsvis writes tokens into a script, and those of a text into HTML.

    The character after ``<`` and ``&`` is a word joiner, which has no width.
    """
    return text.replace("<", "<\u2060").replace("&", "&\u2060")


def _visible(token: str) -> str:
    """Make a token's invisible parts visible: spaces, line breaks, control characters, halves of characters."""
    return "".join(_SEEN.get(c) or printable(c) for c in token) or "∅"


def axis_token(token: str) -> str:
    """Format a token for the axes of a chart, which have little room."""
    text = _visible(token)
    return _harmless(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def text_token(token: str) -> str:
    """Format a token for running text."""
    return _harmless(_visible(token)) + ("\n" if "\n" in token else "")  # circuitsvis breaks the line there
