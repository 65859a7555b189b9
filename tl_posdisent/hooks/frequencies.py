"""Limit heads to a band of RoPE's frequencies.

RoPE rotates subspace c at position p by ``θ_c · p``. Each subspace is edited separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from tl_posdisent.hooks.edit import Band, within_band
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, is_number, shown

Mode = Literal["drop", "freeze"]
Unrotated = Literal["keep", "drop"]
CutSide = Literal["outside", "inside"]


def limit_frequencies(
    model: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    mode: Mode = "drop",
    side: CutSide = "outside",
    unrotated: Unrotated = "keep",
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Restrict heads to the rotary frequencies ``low ≤ θ ≤ high`` (arXiv 2511.11579).

    The score of query i and key j is ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c (i - j)))`` plus the part that RoPE
    does not rotate. ``"drop"`` removes the terms outside the band, also from vectors that
    ``patch_vectors`` puts in; ``"freeze"`` sets their exponential to 1, which keeps content and removes position.

    Frequencies are in radians per position: ``θ = 2π / wavelength``. Those of a model are
    ``read_model(model).specs(layer)[0].rotary.frequencies``.

    Args:
        model: a model with rotary embeddings.
        low, high: the band, both ends included; None means no limit. At least one is needed, unless the band itself or
            the part that RoPE does not rotate is removed. An end counts as equal to a frequency that differs
            by 1e-6 of its size, or by the rounding of the model's frequencies or tables (0.8 % in bfloat16, 0.1 % in
            float16). ``high=0`` is the empty band: with ``"freeze"``, the model receives no positions at all, as under
            ``dummy_distance(model, 0)``.
        mode: how subspaces are removed.
        side: ``"outside"`` removes what lies outside the band, ``"inside"`` the band itself.
        unrotated: ``"drop"`` removes the part that RoPE does not rotate: the content slice of latent attention, and of
            layers with partial rotation. ``high=0`` removes the other part, the rotary slice.
        layers, heads: as in ``swap_positions``.

    Raises:
        ValueError: ``low`` or ``high`` negative, not finite or in the wrong order; arguments that remove nothing; a
            band above 0, or to be removed, that contains no frequency of any of the layers; an unknown mode or side;
            ``unrotated="drop"`` where all coordinates rotate; or what ``swap_positions`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, limit_frequencies, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> losses = {"as it is": model(tokens, return_type="loss").item()}
        >>> for mode in ("drop", "freeze"):
        ...     hooks = limit_frequencies(model, 0.02, mode=mode)  # wavelengths up to 314
        ...     losses[mode] = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).item()
        >>> losses["as it is"] < losses["freeze"] < losses["drop"]  # slow subspaces hold content, and some position
        True
    """
    for name, value in (("low", low), ("high", high)):
        if value is not None and not (is_number(value) and 0 <= value < float("inf")):
            raise ArgumentError(
                name, f"must be a frequency in radians per position, 0 or more, or None, got {shown(value)}"
            )
    if low is None and high is None and side == "outside" and unrotated == "keep":
        raise ArgumentError(
            "low",
            "or high must be given, or nothing is removed, got None for both: give the ends of the band in radians per "
            'position, or unrotated="drop" to remove the part that RoPE does not rotate',
        )
    if low is not None and high is not None and low > high:
        raise ArgumentError("low", f"must be at most high, got {low!r} and {high!r}")
    low, high = float(low or 0), float("inf") if high is None else float(high)
    check_choice("mode", mode, get_args(Mode))
    check_choice("side", side, get_args(CutSide))
    check_choice("unrotated", unrotated, get_args(Unrotated))
    chosen = any_heads(model, layers, heads, "limit_frequencies")
    inside = side == "inside"
    _refuse_no_frequency([spec for spec, _ in chosen], low, high, inside)
    given = [f"low={low:g}"] * bool(low) + [f"high={high:g}"] * (high < float("inf"))
    given += ["mode='freeze'"] * (mode == "freeze")
    without_rest = unrotated == "drop"
    given += ["side='inside'"] * inside + ["unrotated='drop'"] * without_rest
    if without_rest:
        _require_rest([spec for spec, _ in chosen])
    band = Band(low, high, mode, inside, without_rest)
    acting = [
        (spec, some)
        for spec, some in chosen
        if without_rest or bool(band.removed(spec.require_rotary("limit_frequencies")).any())
    ]
    return hooks_for(acting, f"limit_frequencies({', '.join(given)})", band=band)


def _require_rest(specs: Sequence[AttentionSpec]) -> None:
    """Refuse layers that rotate every coordinate."""
    for spec in specs:
        rotary = spec.require_rotary("limit_frequencies")
        if rotary.dim == spec.d_head and bool((rotary.frequencies != 0).all()):
            raise ArgumentError(
                "unrotated",
                f'must be "keep" for layer {spec.layer} of {spec.architecture}, which rotates all {spec.d_head} '
                'coordinates, got "drop"',
            )


def _refuse_no_frequency(specs: Sequence[AttentionSpec], low: float, high: float, inside: bool) -> None:
    """Refuse a band without any frequency: a wavelength given as a frequency, for example."""
    rotaries = [spec.require_rotary("limit_frequencies") for spec in specs]
    if (high == 0 and not inside) or any(bool(within_band(rotary, low, high).any()) for rotary in rotaries):
        return
    there = sorted({f"{x:.7g}" for rotary in rotaries for x in rotary.frequencies.tolist()}, key=float)
    raise ValueError(
        f"low and high must enclose a frequency, in radians per position, or high must be 0; got {low:g} and {high:g}, "
        f"and the layers have {', '.join(there)}"
    )
