"""Noise in the phases of RoPE, by position and subspace.

RoPE rotates subspace c at position p by ``θ_c · p``. Other positions (``swap_positions``) displace all subspaces of a
token alike; here each subspace is rotated by an angle of its own, so that they may disagree about the position.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, rotary_heads
from tl_posdisent.hooks.planning.planner import hooks_for
from tl_posdisent.hooks.planning.rotation_edits import PhaseNoise, Phases
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.validation import check_number, check_seed

_BLOCK = 64  # positions drawn at a time, so that those of a longer text begin with those of a shorter one


def phase_noise(
    model: Any,
    noise: Float[Tensor, "*batch pos subspace"] | float | int,
    *,
    seed: int = 0,
    layers: Layers = None,
    heads: Heads = None,
) -> list[Hook]:
    """Add angles to those of RoPE, the same for the query and the key of a position.

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
            angles that do not fit the text or the subspaces; a KV cache that was not filled under these hooks.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import phase_noise
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> def change(noise):
        ...     return (model.run_with_hooks(tokens, fwd_hooks=phase_noise(model, noise)) - model(tokens)).norm().item()
        >>> change(0.0), change(0.01) < change(0.1) < change(1.0)
        (0.0, True)
    """
    check_seed(seed)
    edit = PhaseNoise("phase_noise", _given(noise) if isinstance(noise, Tensor) else _drawn(noise, seed))
    return hooks_for(rotary_heads(model, layers, heads, "phase_noise"), edit)


def _given(angles: Tensor) -> Phases:
    if angles.is_complex() or angles.dtype == torch.bool or not bool(angles.double().isfinite().all()):
        raise ValueError(f"noise must be finite real numbers, got {angles.dtype} of shape {tuple(angles.shape)}")
    if angles.ndim not in (2, 3) or angles.numel() == 0:
        raise ValueError(f"noise must have shape (pos, subspace) or (batch, pos, subspace), got {tuple(angles.shape)}")
    held = angles.detach().double()
    return lambda rotary, own, texts: check_phases(held, rotary, own, texts)


def check_phases(angles: Tensor, rotary: Rotary, own: Tensor, texts: int) -> Tensor:
    """Refuse angles of another text or of other subspaces."""
    shape = own.shape[-1], len(rotary.frequencies)
    if angles.shape[-2:] != shape or (angles.ndim == 3 and len(angles) not in (1, texts)):
        raise ValueError(
            f"noise must have shape (pos, subspace) = {shape} or (batch, pos, subspace) = {(texts, *shape)}, got "
            f"{tuple(angles.shape)}"
        )
    return angles


def _drawn(std: float | int, seed: int) -> Phases:
    check_number("noise", std, least=0)

    def phases(rotary: Rotary, own: Tensor, texts: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)  # anew each time: the next run and layer get the same
        shape, blocks = (_BLOCK, len(rotary.frequencies)), int(own.max()) // _BLOCK + 1
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(blocks)]
        return std * torch.cat(drawn).to(own.device)[own]

    return phases
