"""Selection of heads, text and positions for a widget, and the limit on the number of cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.utils.validation import check_flag, check_indices, check_integer, check_number

from .layout import Layout
from .offline import axis_token

CELLS = 200_000
"""Cells that a browser draws in about 20 s."""
IMAGE_CELLS = 2**23
"""Cells that are made into images: a page of some 8 MB."""


@dataclass(frozen=True)
class Options:
    """The arguments of all widgets of matrices, as users gave them; ``show_scores`` explains them."""

    heads: Iterable[int] | None
    text: int
    positions: Iterable[int] | None
    scale: float | None
    title: str | None
    raster: bool


@dataclass(frozen=True)
class Choice:
    """What is shown of ``[*batch, query, key]`` matrices; ``rows`` are the heads with all leading axes as one."""

    options: Options
    heads: list[int]
    rows: list[int]
    positions: list[int]
    tokens: list[str]

    @property
    def names(self) -> list[str]:
        """Of the heads."""
        return [str(head) for head in self.heads]

    def of(self, x: Tensor) -> Float64[Tensor, "head query key"]:
        """The chosen part of matrices ``[*batch, query, key]``."""
        at = torch.tensor(self.positions, device=x.device)
        return pick(x, self.rows)[:, at][:, :, at].double()

    def layout(self, shown: Iterable[Tensor], title: str, note: str, *, causal: bool) -> Layout:
        """The layout of a widget of these matrices, with this title and scale unless others were given."""
        return Layout(check_scale(self.options.scale, shown), check_title(self.options.title, title), note, causal)


def pick(x: Tensor, rows: Sequence[int], *, cell_axes: int = 2) -> Tensor:
    """``[*batch, …]``, with ``cell_axes`` axes behind the batch's, as ``[row, …]``.

    Pooled fits lack the axis of texts, which share what they have.
    """
    flat = x.reshape(-1, *x.shape[x.ndim - cell_axes :])
    return flat[torch.tensor(rows, device=x.device) % len(flat)]


def choose(shape: Sequence[int], tokens: Any, options: Options, *, charts: int = 1, more: int = 0) -> Choice:
    """Check what of matrices of shape ``[*batch, query, key]`` is to be shown.

    ``charts`` matrices are drawn for each head, and ``more`` besides, unless as images.
    """
    *batch, n_query, n_key = shape
    heads, rows = check_heads(batch, options.heads, options.text)
    if n_query != n_key:
        raise ValueError(f"the matrices must be square, as a whole text's are, got {n_query} queries × {n_key} keys")
    words = check_tokens(tokens, n_key)
    at = check_indices("positions", options.positions, n_key)
    if at != sorted(at):
        raise ValueError(f"positions must be ascending, got {at}")
    check_flag("raster", options.raster)
    _check_cells(len(heads), len(at), charts, 0 if options.raster else more, raster=options.raster)
    labels = [axis_token(words[i]) for i in at]
    if at != list(range(len(at))):
        labels = [f"{label}@{i}" for label, i in zip(labels, at, strict=True)]
    return Choice(options, heads, rows, at, labels)


def check_heads(batch: Sequence[int], heads: Any, text: int) -> tuple[list[int], list[int]]:
    """Numbers of the heads of one text, and their rows if all leading axes were one."""
    if len(batch) > 2:
        raise ValueError(
            "scores must have shape (query, key), (head, query, key) or (text, head, query, key) to be shown, got "
            f"{len(batch)} leading axes: {tuple(batch)}"
        )
    texts, n_heads = [1, 1, *batch][-2:]
    check_integer("text", text, 0, texts - 1)
    chosen = check_indices("heads", heads, n_heads)
    return chosen, [text * n_heads + head for head in chosen]


def check_tokens(tokens: Any, length: int) -> list[str]:
    """The tokens of one text."""
    words = None if isinstance(tokens, (str, bytes, Tensor)) or not isinstance(tokens, Iterable) else list(tokens)
    wrong = [word for word in words or () if not isinstance(word, str)]
    if words is None or wrong:
        got = type(tokens).__name__ if words is None else f"{wrong[0]!r} in it"
        raise ValueError(f"tokens must be a list of strings, such as model.to_str_tokens(ids), got {got}")
    if len(words) != length:
        raise ValueError(f"tokens must be as many as the keys, {length}, got {len(words)}")
    return words


def _check_cells(n_heads: int, length: int, charts: int, more: int, *, raster: bool) -> None:
    """Raise for more cells than a browser can draw; the error suggests selections that fit."""
    most, matrices = IMAGE_CELLS if raster else CELLS, n_heads * charts + more
    if matrices * length**2 <= most:
        return
    fewer, shorter = (most // length**2 - more) // charts, math.isqrt(most // matrices)
    ways = [f"heads=range({fewer})"] if fewer > 0 else []
    ways += [f"positions=range({shorter})"] if shorter >= 2 else []
    ways += ["raster=True"] if not raster and n_heads * charts * length**2 <= IMAGE_CELLS else []
    raise ValueError(
        f"heads and positions must be fewer: {matrices} matrices of {length}×{length} are {matrices * length**2} "
        f"cells, and {'images have' if raster else 'a browser is asked to draw'} {most} at most; choose for instance "
        + " or ".join(ways)
    )


def check_scale(scale: float | None, shown: Iterable[Tensor]) -> float:
    """The given scale, or the largest magnitude of what is shown; never 0, which would be no scale."""
    if scale is None:
        return max(1e-9, *(float(x.abs().max()) for x in shown))
    return check_number("scale", scale, above=0)


def check_title(title: str | None, default: str) -> str:
    """The given title, or the default."""
    if title is not None and not isinstance(title, str):
        raise ValueError(f"title must be a string, got {type(title).__name__}")
    return default if title is None else title
