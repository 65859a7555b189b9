"""Heads that see only a band of RoPE's frequencies.

Each layer takes the most exact way that it has. To drop subspaces it is enough to put queries at 0 there: to the last
bit, whatever their positions. To freeze them the model's rotation tables are edited where all heads see the same and
hooks reach them; else queries and keys are turned back; else scores are recomputed (``edits.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.reading import read_rotary_layers
from tl_posdisent.models.spec import AttentionSpec, Tap, select
from tl_posdisent.rope.rotary import Rotary, rotate, turn

from .rotation_edits import known_positions
from .score_edits import View, edit_scores

Mode = Literal["drop", "freeze"]

_ROUNDING = 1e-6  # relative: frequencies are read from tables in float32


def limit_frequencies(
    model: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    mode: Mode = "drop",
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks under which heads see only the frequencies ``low ≤ θ ≤ high`` of RoPE: the causal knob of arXiv 2511.11579.

    The score of query i and key j is ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c (i - j)))`` and what RoPE does not
    rotate. ``"drop"`` leaves the terms outside the band out: neither position nor content comes through there.
    ``"freeze"`` puts ``exp(0)`` in: content stays and position does not. Coordinates that RoPE does not rotate (the
    rest under partial rotary, and frequency 0) stay in any case. The scores of bands that share out the frequencies
    add up to the scores, with ``"drop"`` and counting the un-rotated rest once.

    A frequency is in radians per position: ``θ = 2π / wavelength``, so that ``low=2 * pi / 100`` keeps wavelengths up
    to 100 positions. A model's own are ``read_attention(model, layer).rotary.frequencies``.

    Args:
        model: a model with rotary embeddings.
        low, high: the band, both ends included (to 1e-6 of their size); None is no limit. ``high=0`` is the band of
            nothing, on purpose: frozen, the model sees no positions at all, as under ``dummy_distance(model, 0)``.
        mode: what becomes of subspaces outside the band.
        layers: default all that rotate.
        heads: query heads, default all. A head that shares its keys with others gets its own view of them.

    Returns:
        ``[(hook name, function), ...]``, none for layers of which every frequency is in the band.

    Raises:
        ValueError: ``low`` or ``high`` negative, not finite or in the wrong order; a band above 0 that holds no
            frequency of any of the layers; an unknown mode; a model or layer without rotary embeddings or without the
            hooks for it; layers or heads out of range or repeated. While running, where vectors are turned or scores
            recomputed: texts in parts (a key/value cache), padding.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, limit_frequencies, load_demo_model, read_attention
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> [float(f"{x:.1g}") for x in read_attention(model, 0).rotary.frequencies.tolist()]
        [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003]
        >>> losses = {"as it is": model(tokens, return_type="loss").item()}
        >>> for mode in ("drop", "freeze"):
        ...     hooks = limit_frequencies(model, 0.02, mode=mode)  # wavelengths up to 314
        ...     losses[mode] = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> losses["as it is"] < losses["freeze"] < losses["drop"]  # slow subspaces hold content, and some position
        True
    """
    low, high = _checked_band(low, high)
    if mode not in get_args(Mode):
        raise ValueError(f'mode must be "drop" or "freeze", got {mode!r}')
    specs = read_rotary_layers(model, layers, "limit_frequencies")
    chosen = select("heads", heads, specs[0].n_heads)
    _refuse_no_frequency(specs, low, high)
    hooks: list[Hook] = []
    for spec in specs:
        rotary = spec.require_rotary("limit_frequencies")
        outside = ~_within(rotary, low, high) & (rotary.frequencies != 0)
        if bool(outside.any()):
            hooks += _drop(spec, chosen, outside) if mode == "drop" else _freeze(spec, chosen, outside)
    return hooks


def _checked_band(low: float | None, high: float | None) -> tuple[float, float]:
    for name, value in (("low", low), ("high", high)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < float("inf")):
            raise ValueError(f"{name} must be a frequency in radians per position, 0 or more, or None, got {value!r}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low must be at most high, got {low!r} and {high!r}")
    return low or 0.0, float("inf") if high is None else high


def _within(rotary: Rotary, low: float, high: float) -> Bool[Tensor, "subspace"]:
    size = rotary.frequencies.abs()
    return (size >= low * (1 - _ROUNDING)) & (size <= high * (1 + _ROUNDING))


def _refuse_no_frequency(specs: Sequence[AttentionSpec], low: float, high: float) -> None:
    """A wavelength given for a frequency, say, would otherwise blind the model without a word."""
    rotaries = [spec.require_rotary("limit_frequencies") for spec in specs]
    if high == 0 or any(bool(_within(rotary, low, high).any()) for rotary in rotaries):
        return
    there = sorted({f"{x:.3g}" for rotary in rotaries for x in rotary.frequencies.tolist()}, key=float)
    raise ValueError(
        f"low and high must leave a frequency, in radians per position, or high be 0; got {low:g} and {high:g}, "
        f"and there are {', '.join(there)}"
    )


def _drop(spec: AttentionSpec, heads: Sequence[int], outside: Tensor) -> list[Hook]:
    """A term is gone when its query is 0."""
    tap, rotary = spec.turn_q, spec.require_rotary("dropping")

    def without(vectors: Tensor) -> Tensor:
        return vectors.masked_fill(_coordinates(rotary, outside, vectors), 0)

    if tap is not None:
        return [_edit(tap, heads, without)]
    return _recomputed(spec, heads, lambda q, k, at: (rotate(without(q), at, rotary), rotate(k, at, rotary)))


def _freeze(spec: AttentionSpec, heads: Sequence[int], outside: Tensor) -> list[Hook]:
    rotary = spec.require_rotary("freezing")
    groups = sorted({spec.key_head(h) for h in heads})
    whole = len(heads) == len(groups) * (spec.n_heads // spec.n_kv_heads)
    if len(heads) == spec.n_heads and spec.cos and spec.sin:
        factor = rotary.attention_factor
        return [_still(spec.cos, outside, factor), _still(spec.sin, outside, 0.0)]

    def back(vectors: Tensor) -> Tensor:
        angle = rotary.angles(torch.arange(vectors.shape[1], device=vectors.device))
        return turn(vectors, -(angle * outside.to(angle.device))[:, None], rotary.pairing, 1.0)

    if whole and spec.turn_q and spec.turn_k:
        return [*known_positions(spec), _edit(spec.turn_q, heads, back), _edit(spec.turn_k, groups, back)]
    still = replace(rotary, frequencies=rotary.frequencies.masked_fill(outside, 0.0))
    return _recomputed(spec, heads, lambda q, k, at: (rotate(q, at, still), rotate(k, at, still)))


def _still(name: str, outside: Tensor, value: float) -> Hook:
    """The model's table of cosines or sines, as at position 0 in some subspaces: one column each or two."""

    def still(x: Tensor, hook: Any) -> Tensor:
        n, columns = len(outside), outside.to(x.device)
        if x.shape[-1] == 2 * n:
            halves = torch.equal(x[..., :n], x[..., n:])
            columns = torch.cat([columns, columns]) if halves else columns.repeat_interleave(2)
        return x.masked_fill(columns, value)

    return name, still


def _edit(tap: Tap, heads: Sequence[int], change: Any) -> Hook:
    """Queries or keys of some heads, changed."""

    def edit(x: Tensor, hook: Any) -> Tensor:
        vectors = tap.read(x)
        some = torch.zeros(tap.n_heads, 1, dtype=torch.bool, device=x.device)
        some[list(heads)] = True
        return tap.write(torch.where(some, change(vectors), vectors))

    return tap.name, edit


def _recomputed(spec: AttentionSpec, heads: Sequence[int], rotated: Any) -> list[Hook]:
    """Scores of queries and keys (one key head per query head) that ``rotated`` turns to where they stand."""
    spec.require_scale()  # or an error at once

    def scores(view: View) -> Tensor:
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in view.vectors())
        q_rot, k_rot = rotated(q, k, torch.arange(q.shape[1], device=q.device))
        return spec.score(q_rot, k_rot)

    return edit_scores(spec, heads, scores, vectors=True)


def _coordinates(rotary: Rotary, subspaces: Bool[Tensor, "subspace"], x: Tensor) -> Bool[Tensor, "d_head"]:
    """The coordinates of ``x`` that make up these subspaces."""
    twice = torch.cat([subspaces, subspaces]) if rotary.pairing == "half" else subspaces.repeat_interleave(2)
    return torch.nn.functional.pad(twice, (0, x.shape[-1] - len(twice))).to(x.device)
