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
IMAGE_CELLS = 2**24
"""Cells that are made into images: each takes some 50 bytes while they are."""


@dataclass(frozen=True)
class Options:
    """The arguments of all widgets of matrices, as users gave them; ``show_scores`` explains them."""

    heads: Iterable[int] | None
    text: int
    positions: Iterable[int] | None
    scale: float | None
    title: str | None
    max_cells: int
    raster: bool
    cdn: bool


@dataclass(frozen=True)
class Choice:
    """What is shown of ``[*batch, query, key]`` matrices.

    Attributes:
        options: as given.
        text: entry of the first axis, if there are an axis of texts and one of heads.
        heads: numbers of the heads, in the order shown.
        positions: ascending, both as queries and as keys.
        tokens: of the positions, as axes show them.
    """

    options: Options
    text: int
    heads: list[int]
    positions: list[int]
    tokens: list[str]

    @property
    def names(self) -> list[str]:
        """Of the heads."""
        return [str(head) for head in self.heads]

    def of_heads(self, x: Tensor, *, cell_axes: int = 2) -> Tensor:
        """``[*batch, …]`` with ``cell_axes`` axes behind the batch's: those of the chosen heads, ``[head, …]``."""
        return of_heads(x, self.text, self.heads, cell_axes=cell_axes)

    def of(self, x: Tensor) -> Float64[Tensor, "head query key"]:
        """The chosen part of matrices ``[*batch, query, key]``."""
        at = torch.tensor(self.positions, device=x.device)
        return self.of_heads(x)[:, at][:, :, at].double()

    def layout(self, shown: Iterable[Tensor], title: str, note: str, *, causal: bool) -> Layout:
        """The layout of a widget of these matrices, with this title and scale unless others were given."""
        scale, title = check_scale(self.options.scale, shown), check_title(self.options.title, title)
        return Layout(scale, title, note, causal, self.options.cdn)


def of_heads(x: Tensor, text: int, heads: Sequence[int], *, cell_axes: int) -> Tensor:
    """``[*batch, …]`` with ``cell_axes`` axes behind the batch's: those of these heads of one text, ``[head, …]``."""
    batch, cells = x.shape[: x.ndim - cell_axes], x.shape[x.ndim - cell_axes :]
    return x.reshape(*_two(batch), *cells)[text, torch.tensor(heads, device=x.device)]


def choose(shape: Sequence[int], tokens: Any, options: Options, *, charts: int = 1, more: int = 0) -> Choice:
    """Check what of matrices of shape ``[*batch, query, key]`` is to be shown.

    Args:
        charts: matrices drawn for each head.
        more: matrices drawn besides, unless as images.

    Raises:
        ValueError: of every argument that is unusable, and of more cells than a browser draws.
    """
    *batch, n_query, n_key = shape
    _, n_heads = check_batch(batch, options.text)
    if n_query != n_key:
        raise ValueError(f"the matrices must be square, as a whole text's are, got {n_query} queries × {n_key} keys")
    words = check_tokens(tokens, n_key)
    heads = check_indices("heads", options.heads, n_heads)
    at = check_indices("positions", options.positions, n_key)
    if at != sorted(at):
        raise ValueError(f"positions must be ascending, got {at}")
    check_flag("raster", options.raster)
    more = 0 if options.raster else more
    check_cells(len(heads), len(at), options.max_cells, charts=charts, more=more, raster=options.raster)
    labels = [axis_token(words[i]) for i in at]
    if at != list(range(len(at))):
        labels = [f"{label}@{i}" for label, i in zip(labels, at, strict=True)]
    return Choice(options, options.text, heads, at, labels)


def check_batch(batch: Sequence[int], text: int) -> tuple[int, int]:
    """Numbers of texts and heads."""
    if len(batch) > 2:
        raise ValueError(
            "scores must have shape (query, key), (head, query, key) or (text, head, query, key) to be shown, got "
            f"{len(batch)} leading axes: {tuple(batch)}"
        )
    texts, n_heads = _two(batch)
    check_integer("text", text, 0, texts - 1)
    return texts, n_heads


def check_tokens(tokens: Any, length: int) -> list[str]:
    """The tokens of one text."""
    hint = "a list of strings, such as model.to_str_tokens(ids)"
    if isinstance(tokens, (str, bytes, Tensor)) or not isinstance(tokens, Iterable):
        raise ValueError(f"tokens must be {hint}, got {type(tokens).__name__}")
    words = list(tokens)
    wrong = [word for word in words if not isinstance(word, str)]
    if wrong:
        raise ValueError(f"tokens must be {hint}, got {wrong[0]!r} in it")
    if len(words) != length:
        raise ValueError(f"tokens must be as many as the keys, {length}, got {len(words)}")
    return words


def check_cells(n_heads: int, length: int, max_cells: int, *, charts: int, more: int = 0, raster: bool = False) -> None:
    """Raise for more cells than a browser can draw; the error suggests selections that fit."""
    max_cells = max(check_integer("max_cells", max_cells, 1), IMAGE_CELLS if raster else 0)
    matrices = n_heads * charts + more
    cells = matrices * length**2
    if cells <= max_cells:
        return
    fewer = (max_cells // length**2 - more) // charts
    shorter = math.isqrt(max_cells // matrices)
    alone = math.isqrt(max_cells // (charts + more))
    ways = [f"heads=range({fewer})"] if 0 < fewer < n_heads else []
    ways += [f"positions=range({shorter})"] if shorter >= 2 else []
    ways += [f"heads=[0], positions=range({alone})"] if not fewer > 0 and n_heads > 1 and alone > shorter else []
    ways += ["raster=True"] if not raster and n_heads * charts * length**2 <= IMAGE_CELLS else []
    asked = f"{max_cells} at most are made into images" if raster else f"a browser is asked to draw {max_cells} at most"
    raise ValueError(
        f"{matrices} matrices of {length}×{length} are {cells} cells, and {asked}: choose fewer heads or positions, "
        f"for instance {' or '.join(ways)}, or wait with max_cells={cells}"
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


def _two(batch: Sequence[int]) -> tuple[int, int]:
    """Batch axes as (text, head)."""
    full = (1, 1, *batch)
    return full[-2], full[-1]
