"""Noise in the phases that RoPE gives to queries and keys: every subspace may stand at a place of its own.

RoPE turns subspace c at position p by ``θ_c · p``. Other positions (``swap_positions``) turn all subspaces of a token
together; here each is turned by an angle of its own, so that its features may agree on no position at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.score_edits import View, check_whole_text, edit_scores
from tl_posdisent.models.forward import Hook, check_seed
from tl_posdisent.models.reading import read_rotary_layers
from tl_posdisent.models.spec import AttentionSpec, Tap, select
from tl_posdisent.rope.rotary import Rotary, turn

Phases = Callable[[Rotary, int, torch.device], Tensor]
"""From a layer's rotary and a length to angles in radians, ``(pos, subspace)`` or ``(batch, pos, subspace)``."""


def phase_noise(
    model: Any,
    noise: Float[Tensor, "*batch pos subspace"] | float | int,
    *,
    seed: int = 0,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks under which RoPE's angles are off by these, the same for the query and the key of a position.

    The score of query i and key j becomes ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c (i - j) + ε_ic - ε_jc)))``
    and what RoPE does not rotate. Lengths of vectors, the mask, and a token's score of itself stay. Zero changes
    nothing, nor does an angle that is the same at all positions; ``ε_pc = θ_c · δ_p`` is
    ``swap_positions(model, p + δ)``.

    Args:
        model: a model with rotary embeddings.
        noise: angles ε in radians, ``(pos, subspace)`` for all texts or ``(batch, pos, subspace)``; or a standard
            deviation in radians, of normal angles drawn for every position and subspace on its own.
        seed: of the angles drawn: the same for all texts, heads, and layers of equally many subspaces.
        layers: default all that rotate.
        heads: query heads, default all. A head that shares its keys with others gets its own view of them.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: a model or layer without rotary embeddings or without the hooks for it; angles of wrong rank or not
            finite, a negative standard deviation or seed; layers or heads out of range or repeated. While running:
            angles that do not fit the text or the subspaces; parts of texts (a key/value cache).

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, phase_noise
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> def change(noise):
        ...     return (model.run_with_hooks(tokens, fwd_hooks=phase_noise(model, noise)) - model(tokens)).norm().item()
        >>> change(0.0), change(0.01) < change(0.1) < change(1.0)
        (0.0, True)
    """
    check_seed(seed)
    phases = _given(noise) if isinstance(noise, Tensor) else _drawn(noise, seed)
    return phase_hooks(read_rotary_layers(model, layers, "phase_noise"), phases, heads)


def phase_hooks(specs: Sequence[AttentionSpec], phases: Phases, heads: Iterable[int] | None = None) -> list[Hook]:
    """``phase_noise`` for layers that have been read, with angles that may depend on the layer's rotary."""
    chosen = select("heads", heads, specs[0].n_heads)
    return [hook for spec in specs for hook in _in_layer(spec, phases, chosen)]


def _given(angles: Tensor) -> Phases:
    if angles.is_complex() or angles.dtype == torch.bool or not bool(angles.double().isfinite().all()):
        raise ValueError(f"noise must be finite real numbers, got {angles}")
    if angles.ndim not in (2, 3) or angles.numel() == 0:
        raise ValueError(f"noise must have shape (pos, subspace) or (batch, pos, subspace), got {tuple(angles.shape)}")
    held = angles.detach().double()
    return lambda rotary, length, device: held.to(device)


def _drawn(std: float | int, seed: int) -> Phases:
    if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < float("inf"):
        raise ValueError(f"noise must be a tensor of angles or a standard deviation of at least 0, got {std!r}")

    def phases(rotary: Rotary, length: int, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(seed)  # anew each time: the next run and layer get the same
        drawn = torch.randn(length, len(rotary.frequencies), generator=generator, dtype=torch.float64)
        return (std * drawn).to(device)

    return phases


def _in_layer(spec: AttentionSpec, phases: Phases, heads: Sequence[int]) -> list[Hook]:
    groups = sorted({spec.key_head(h) for h in heads})
    if len(heads) == len(groups) * (spec.n_heads // spec.n_kv_heads) and spec.turn_q and spec.turn_k:
        turns = [_turn(spec, spec.turn_q, phases, heads), _turn(spec, spec.turn_k, phases, groups)]
        name = spec.scores or spec.pattern
        return [*turns, (name, lambda x, hook: check_whole_text(spec, x))] if name else turns

    def rescored(view: View) -> Tensor:  # a key that is shared with other heads would have to stand at two places
        real = torch.arange(view.vectors()[0].shape[1], device=view.vectors()[0].device)
        q, k = (_turned(spec, spec.rotated(_wide(x), real), phases) for x in view.vectors())
        return spec.score(q, k)

    return edit_scores(spec, heads, rescored, vectors=True)


def _turn(spec: AttentionSpec, tap: Tap, phases: Phases, heads: Sequence[int]) -> Hook:
    """Queries or keys of some heads turned on; whether before or after RoPE's own turn is all one."""

    def turn_on(x: Tensor, hook: Any) -> Tensor:
        vectors = tap.read(x)
        turned = _turned(spec, vectors, phases)
        if len(heads) < tap.n_heads:
            some = torch.zeros(tap.n_heads, 1, dtype=torch.bool, device=x.device)
            some[list(heads)] = True
            turned = torch.where(some, turned, vectors)
        return tap.write(turned)

    return tap.name, turn_on


def _turned(spec: AttentionSpec, x: Float[Tensor, "batch pos head d_head"], phases: Phases) -> Tensor:
    rotary = spec.require_rotary("phase_noise")
    batch, length, n = x.shape[0], x.shape[1], len(rotary.frequencies)
    angles = phases(rotary, length, x.device)
    if angles.shape[-2:] != (length, n) or (angles.ndim == 3 and len(angles) not in (1, batch)):
        raise ValueError(
            f"noise must have shape (pos, subspace) = ({length}, {n}) or (batch, pos, subspace) = "
            f"({batch}, {length}, {n}) in layer {spec.layer}, got {tuple(angles.shape)}"
        )
    return turn(x, angles[..., None, :], rotary.pairing, 1.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
