"""Scores at any pair distances, where rotation of queries and keys cannot express them.

``W[i, j] = scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c D[i, j])) + content-only part`` for any real matrix D: the
layer's scores are recomputed in blocks and put in their place (``edits.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.spec import AttentionSpec

from .score_edits import View, edit_scores

Distances = Callable[[int, torch.device], Tensor]
"""From a length to distances ``[query, key]``, ``[head, query, key]`` or ``[batch, head or 1, query, key]``."""

_CELLS_PER_BLOCK = 2**21


def pair_scores(
    spec: AttentionSpec,
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    distances: Float[Tensor, "*lead query key"],
) -> Float[Tensor, "batch head query key"]:
    """Scores of unrotated queries and keys (one key head per query head) at the given distances.

    Soft cap applied, mask not. Computed in float32 (float64 for float64), a few million cells at a time.
    """
    rotary = spec.require_rotary("pair_scores")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    n, out = rotary.dim // 2, []
    frequencies = rotary.frequencies.to(q.device)
    q_first, q_second, q_rest = _planes(q.to(wide), rotary.pairing, n)
    k_first, k_second, k_rest = _planes(k.to(wide), rotary.pairing, n)
    rows = max(1, _CELLS_PER_BLOCK // (q.shape[0] * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[1], rows):
        some = slice(start, start + rows)
        block = torch.einsum("bqhd,bkhd->bhqk", q_rest[:, some], k_rest)
        here = distances[..., some, :].to(q.device).double().nan_to_num(0.0, 0.0, 0.0)  # hidden cells may hold anything
        for c in range(n):
            angle = here * frequencies[c]  # in float64: it may be many turns
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            qx, qy = (x[:, some, :, c].transpose(1, 2)[..., None] for x in (q_first, q_second))
            kx, ky = (x[..., c].transpose(1, 2)[..., None, :] for x in (k_first, k_second))
            turned = (qx * kx + qy * ky) * cos - (qy * kx - qx * ky) * sin
            block += rotary.attention_factor**2 * turned
        out.append(spec.capped(block * spec.require_scale()))
    return torch.cat(out, 2)


def pair_hooks(spec: AttentionSpec, heads: Sequence[int], distances: Distances) -> list[Hook]:
    """Hooks that give these heads of a layer the scores that they would have at other distances."""
    spec.require_rotary("remapped distances")

    def at_other_distances(view: View) -> Tensor:
        q, k = view.vectors()
        wanted = distances(q.shape[1], q.device)
        _check(wanted, spec, len(q), q.shape[1])
        return pair_scores(spec, q, k, _of_heads(wanted, heads, spec.n_heads))

    return edit_scores(spec, heads, at_other_distances, vectors=True)


def _check(distances: Tensor, spec: AttentionSpec, batch: int, length: int) -> None:
    allowed = [(length, length), *((h, length, length) for h in (1, spec.n_heads))]
    allowed += [(b, *heads) for b in (1, batch) for heads in allowed[1:]]
    if tuple(distances.shape) not in allowed:
        raise ValueError(
            f"distances must have shape (query, key) = ({length}, {length}), (head, query, key) or "
            f"(batch, head, query, key) with {spec.n_heads} heads and {batch} texts (or 1), "
            f"got {tuple(distances.shape)}"
        )
    inside = spec.mask(length, distances.device)
    if not bool((distances.isfinite() | ~inside).all()):
        raise ValueError("distances must be finite inside the mask")


def _of_heads(distances: Tensor, heads: Sequence[int], n_heads: int) -> Tensor:
    """The chosen heads of distances that are given per head."""
    if distances.ndim >= 3 and distances.shape[-3] == n_heads and n_heads > 1:
        return distances[..., torch.tensor(list(heads), device=distances.device), :, :]
    return distances


def _planes(x: Tensor, pairing: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    if pairing == "half":
        return x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return x[..., : 2 * n : 2], x[..., 1 : 2 * n : 2], x[..., 2 * n :]
