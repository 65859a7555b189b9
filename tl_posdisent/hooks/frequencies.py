"""Limit heads to a band of RoPE's frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, rotary_heads
from tl_posdisent.hooks.planning.planner import layer_hooks
from tl_posdisent.hooks.planning.rotation_edits import FrequencyLimit, outside_band, within_band
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.validation import check_choice, is_number

Mode = Literal["drop", "freeze"]


def limit_frequencies(
    model: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    mode: Mode = "drop",
    layers: Layers = None,
    heads: Heads = None,
) -> list[Hook]:
    """Restrict heads to the rotary frequencies ``low ≤ θ ≤ high`` (arXiv 2511.11579).

    The score of query i and key j is ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c (i - j)))`` and what RoPE does not
    rotate. ``"drop"`` removes the terms outside the band, with their position and their content. ``"freeze"`` sets
    their exponential to 1: content stays and position does not. Coordinates that RoPE does not rotate (the rest under
    partial rotary, and frequency 0) always stay. With ``"drop"``, the scores of bands that partition the frequencies
    add up to the scores, if the un-rotated rest is counted once.

    A frequency is in radians per position: ``θ = 2π / wavelength``, so that ``low=2 * pi / 100`` keeps wavelengths up
    to 100 positions. A model's own are ``read_attention(model, layer).rotary.frequencies``.

    Args:
        model: a model with rotary embeddings.
        low, high: the band, both ends included (to 1e-6 of their size); None is no limit. ``high=0`` is the empty band:
            frozen, the model receives no positions at all, as under ``dummy_distance(model, 0)``.
        mode: how subspaces outside the band are removed.
        layers: default all that rotate.
        heads: query heads, default all. A head that shares its keys with others gets its own view of them.

    Returns:
        ``[(hook name, function), ...]``, none for layers of which every frequency is in the band.

    Raises:
        ValueError: ``low`` or ``high`` negative, not finite or in the wrong order; a band above 0 that holds no
            frequency of any of the layers; an unknown mode; a model or layer without rotary embeddings or without the
            hooks for it; layers or heads out of range or repeated. While running: a KV
            cache that was not filled under these hooks; a long text that the model rotates by other frequencies
            (longrope, dynamic NTK), of which the band holds other subspaces.

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
    check_choice("mode", mode, get_args(Mode))
    chosen = rotary_heads(model, layers, heads, "limit_frequencies")
    _refuse_no_frequency([spec for spec, _ in chosen], low, high)
    hooks: list[Hook] = []
    for spec, some in chosen:
        rotary = spec.require_rotary("limit_frequencies")
        outside = outside_band(rotary, low, high)
        if bool(outside.any()) or spec.holds_to is not None:
            hooks += layer_hooks(spec, some, FrequencyLimit("limit_frequencies", outside, mode, low, high))
    return hooks


def _checked_band(low: float | None, high: float | None) -> tuple[float, float]:
    for name, value in (("low", low), ("high", high)):
        if value is not None and not (is_number(value) and 0 <= value < float("inf")):
            raise ValueError(f"{name} must be a frequency in radians per position, 0 or more, or None, got {value!r}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low must be at most high, got {low!r} and {high!r}")
    return low or 0.0, float("inf") if high is None else high


def _refuse_no_frequency(specs: Sequence[AttentionSpec], low: float, high: float) -> None:
    """A wavelength given for a frequency, say, would otherwise blind the model without a word."""
    rotaries = [spec.require_rotary("limit_frequencies") for spec in specs]
    if high == 0 or any(bool(within_band(rotary, low, high).any()) for rotary in rotaries):
        return
    there = sorted({f"{x:.3g}" for rotary in rotaries for x in rotary.frequencies.tolist()}, key=float)
    raise ValueError(
        f"low and high must leave a frequency, in radians per position, or high be 0; got {low:g} and {high:g}, "
        f"and there are {', '.join(there)}"
    )
