"""The heads, text and positions of score matrices that a widget shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_indices, check_integer, head_label

from .charts import Widget, axis_token, check_scale, check_title, heat_maps

CELLS = 200_000
"""The number of cells that a browser draws in about 20 s."""


@dataclass(frozen=True)
class Options:
    """The arguments that all widgets of matrices share, as given by the user; ``show_scores`` explains them."""

    heads: Iterable[int] | None
    text: int
    positions: Iterable[int] | None
    scale: float | None
    title: str | None
    layer: int | None = None


@dataclass(frozen=True)
class Choice:
    """The shown part of ``[*batch, query, key]`` matrices; ``rows`` index the heads with all leading axes flattened."""

    options: Options
    heads: list[int]
    rows: list[int]
    positions: list[int]
    tokens: list[str]
    layer: int | None = None

    def of(self, x: Tensor) -> Float64[Tensor, "head query key"]:
        """Return the chosen part of matrices ``[*batch, query, key]``."""
        at = torch.tensor(self.positions, device=x.device)
        return pick(x, self.rows)[:, at][:, :, at].double()

    def draw(
        self,
        matrices: Mapping[str, Float64[Tensor, "head query key"]],
        title: str,
        note: str,
        *,
        causal: bool,
        scaled_by: Iterable[Tensor] | None = None,
    ) -> Widget:
        """Draw matrices by name, head by head; the user's title and scale take precedence.

        The default of the scale is that of ``scaled_by``, by default the matrices.
        """
        shown = list(matrices.values())
        scale = check_scale(self.options.scale, list(scaled_by or shown), first=self.positions[0] == 0)
        return heat_maps(
            torch.stack(shown, 1).flatten(0, 1),
            [name for head in self.heads for name in self._names(head, list(matrices))],
            self.tokens,
            scale=scale,
            causal=causal,
            title=check_title(self.options.title, self._titled(title)),
            note=note,
        )

    def _names(self, head: int, matrices: Sequence[str]) -> list[str]:
        """Name the charts of a head: by the head if there are several, and by the matrix if there are several."""
        label = f"H{head}" if self.layer is None else head_label(self.layer, head)
        if len(matrices) == 1:
            return [label]
        return [name if len(self.heads) == 1 else f"{label} {name}" for name in matrices]

    def _titled(self, what: str) -> str:
        """Prefix a title with the head or the layer that is shown, if there is a single one."""
        layer, head = self.layer, self.heads[0]
        if len(self.heads) == 1:
            return f"{f'Head {head}' if layer is None else head_label(layer, head)}: {what}"
        return what[0].upper() + what[1:] if layer is None else f"Layer {layer}: {what}"


def pick(x: Tensor, rows: Sequence[int], *, cell_axes: int = 2) -> Tensor:
    """Flatten the batch axes of ``[*batch, …]``, all but the last ``cell_axes``, and select rows: ``[row, …]``.

    Components that pooled fits share between texts have no axis of texts; each text gets the same rows.
    """
    flat = x.reshape(-1, *x.shape[x.ndim - cell_axes :])
    return flat[torch.tensor(rows, device=x.device) % len(flat)]


def choose(
    shape: Sequence[int], tokens: Any, options: Options, *, charts: int = 1, layers: Sequence[int] | None = None
) -> Choice:
    """Check the options for matrices of shape ``[*batch, query, key]`` and select the part to show.

    ``charts`` matrices are drawn for each head. ``layers`` are the layers of an axis before the heads, if there is one.
    """
    *batch, n_query, n_key = shape
    layer, n_layers = options.layer, 1
    if layer is not None:
        check_integer("layer", layer, 0)
    if layers is not None:
        layer, n_layers = layers[0] if layer is None and len(layers) == 1 else layer, batch.pop(-2)
        if layer not in layers:
            raise ArgumentError("layer", f"must be one of the fit's, {', '.join(map(str, layers))}, got {layer!r}")
    heads, rows = _choose_heads(batch, options)
    n_heads = [1, *batch][-1]
    at = 0 if layers is None else layers.index(layer)  # texts, layers and heads as one axis
    rows = [(row // n_heads * n_layers + at) * n_heads + row % n_heads for row in rows]
    if n_query != n_key:
        raise ValueError(f"the matrices must be square, as a whole text's are, got {n_query} queries × {n_key} keys")
    words = _check_words(tokens, n_key)
    positions = check_indices("positions", options.positions, n_key)
    if positions != sorted(positions):
        raise ArgumentError("positions", f"must be ascending, got {positions}")
    _check_cells(len(heads), len(positions), charts)
    labels = [axis_token(words[i]) for i in positions]
    if positions != list(range(len(positions))):
        labels = [f"{label}@{i}" for label, i in zip(labels, positions, strict=True)]
    return Choice(options, heads, rows, positions, labels, layer)


def _choose_heads(batch: Sequence[int], options: Options) -> tuple[list[int], list[int]]:
    """Return the indices of the heads of one text, and their rows with all leading axes flattened."""
    if len(batch) > 2:
        raise ArgumentError(
            "scores",
            "must have shape (query, key), (head, query, key) or (text, head, query, key) to be shown, got "
            f"{len(batch)} leading axes: {tuple(batch)}",
        )
    texts, n_heads = [1, 1, *batch][-2:]
    check_integer("text", options.text, 0, texts - 1)
    chosen = check_indices("heads", options.heads, n_heads)
    return chosen, [options.text * n_heads + head for head in chosen]


def _check_words(tokens: Any, length: int) -> list[str]:
    words = None if isinstance(tokens, (str, bytes, Tensor)) or not isinstance(tokens, Iterable) else list(tokens)
    wrong = [word for word in words or () if not isinstance(word, str)]
    if words is None or wrong:
        got = type(tokens).__name__ if words is None else f"{wrong[0]!r} in it"
        raise ArgumentError("tokens", f"must be a list of strings, such as model.to_str_tokens(ids), got {got}")
    if len(words) != length:
        raise ArgumentError("tokens", f"must be as many as the keys, {length}, got {len(words)}")
    return words


def _check_cells(n_heads: int, length: int, charts: int) -> None:
    """Raise for more cells than a browser can draw; the error suggests selections that fit.

    Each matrix is drawn as a thumbnail, and the selected one once more.
    """
    matrices = n_heads * charts + 1
    if matrices * length**2 <= CELLS:
        return
    fewer, shorter = (CELLS // length**2 - 1) // charts, math.isqrt(CELLS // matrices)
    ways = [f"heads=range({fewer})"] if fewer > 0 else []
    ways += [f"positions=range({shorter})"] if shorter >= 2 else []
    raise ValueError(
        f"heads and positions must be fewer: {matrices} matrices of {length}×{length} are {matrices * length**2} "
        f"cells, and a browser is asked to draw {CELLS} at most; choose for instance " + " or ".join(ways)
    )
