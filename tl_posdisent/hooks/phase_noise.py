"""Add noise to the phases of RoPE's subspaces.

RoPE rotates subspace c at position p by ``θ_c · p``. Each subspace is edited separately.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edit import Noise
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import real_tensor
from tl_posdisent.utils.validation import check_number, check_seed


def phase_noise(
    model: Any,
    noise: Float[Tensor, "*batch pos subspace"] | float | int,
    *,
    seed: int = 0,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Add phase noise to the angles of RoPE, the same for the query and the key of a position.

    The score of query i and key j becomes ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c (i - j) + ε_ic - ε_jc)))``
    plus the part that RoPE does not rotate. ``ε_pc = θ_c · δ_p`` is equivalent to ``swap_positions(model, p + δ)``.

    Args:
        model: a model with rotary embeddings.
        noise: angles ε in radians, ``(pos, subspace)`` for all texts or ``(batch, pos, subspace)``; or a standard
            deviation in radians, for normal angles drawn independently for every position and subspace.
        seed: seed of the angles drawn, which are the same for all texts, heads, and layers of equally many subspaces.
        layers, heads: as in ``swap_positions``.

    Raises:
        ValueError: angles of wrong rank or not finite, a negative standard deviation or seed; or what
            ``swap_positions`` refuses. While running: angles that do not fit the text or the subspaces.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.hooks import phase_noise
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> def change(noise):
        ...     return (model.run_with_hooks(tokens, fwd_hooks=phase_noise(model, noise)) - model(tokens)).norm().item()
        >>> change(0.0) < 0.01 < change(0.01) < change(0.1) < change(1.0)
        True
    """
    check_seed(seed)
    if isinstance(noise, Tensor):
        angles = real_tensor("noise", noise)
        if angles.ndim not in (2, 3) or angles.numel() == 0:
            got = tuple(angles.shape)
            raise ArgumentError("noise", f"must have shape (pos, subspace) or (batch, pos, subspace), got {got}")
        call, added = f"phase_noise({'×'.join(map(str, angles.shape))} angles)", Noise(angles)
    else:
        check_number("noise", noise, least=0)
        call, added = f"phase_noise({noise:g}, seed={seed})", Noise(float(noise), seed)
    return hooks_for(any_heads(model, layers, heads, "phase_noise"), call, noise=added)
