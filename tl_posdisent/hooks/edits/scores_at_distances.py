"""Scores of a head under edits of its rotation: from turned vectors if they suffice, otherwise at any distances.

A piecewise linear function of the distance (a ceiling, for example) selects among products of turned vectors. All other
distances are computed subspace by subspace for each pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.hooks.edits.rotation_edits import DistanceMap, HeadRotation, Side, check_patch
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError

_CELLS_PER_BLOCK = 2**21
_MOST_PIECES = 8  # more would cost more than arbitrary distances


def rotated_scores(
    spec: AttentionSpec,
    rotation: HeadRotation,
    heads: Sequence[int],
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    own: tuple[Tensor, Tensor],
    seen: Bool[Tensor, "batch query key"],
    before: Float[Tensor, "batch head query key"] | None = None,
    part: tuple[int, int] | None = None,
) -> Float[Tensor, "batch head query key"]:
    """Compute scores of some heads' unrotated queries and keys (one key head per query head) under their edits.

    The soft cap is applied, the mask is not. Computed in float32 (float64 for float64).

    Args:
        own: the positions of queries and of keys.
        seen: cells in which a query sees a key. The scores of others are arbitrary.
        before: the scores without edits, which are kept where distances do not change.
        part: if a text is run in parts, the slots of the first query and the first key in it. A matrix of distances
            is then that of the whole text.
    """
    edit = rotation.position
    if not isinstance(edit, DistanceMap):
        return spec.score(*rotated_vectors(spec, rotation, heads, q, k, own))
    rotary = spec.require_rotary("rotation edits")
    if isinstance(edit.distances, Tensor):
        distances = _of_part(edit.distances, part, (q.shape[1], k.shape[1])).to(q.device)
        _check_matrix(spec, distances, len(q), (q.shape[1], k.shape[1]))
        if distances.ndim >= 3 and distances.shape[-3] == spec.n_heads > 1:
            distances = distances[..., torch.tensor(list(heads), device=distances.device), :, :]
        values, index = distances.nan_to_num(0.0, 0.0, 0.0).unique(return_inverse=True)  # masked cells are arbitrary
    else:
        real = own[0][..., :, None] - own[1][..., None, :]
        needed = torch.where(seen, real, 0)  # a function may have no values at other distances
        low = int(needed.min())
        values = edit.values(low, int(needed.max()), q.device)
        index = (real - low).clamp(0, len(values) - 1)
        index = index if index.ndim == 2 else index[:, None]  # positions differ between texts
        pieces = straight_pieces(values, low)
        if pieces is not None:
            return _selected(spec, rotation, q, k, own, pieces, before if len(rotation.edits) == 1 else None)
    in_place: dict[str, Any] = {"rotary": rotary, "tables": True}  # noise and dropped subspaces
    q = rotation.turned_on(_wide(q), "q", own[0], **in_place)
    k = rotation.turned_on(_wide(k), "k", own[1], **in_place)
    ahead = seen.triu(1 + k.shape[1] - q.shape[1])  # keys after their query, in the prefix of a prefix LM
    causal = spec.causal and not bool(ahead.any())
    return pair_scores(replace(spec, rotary=rotation.frequencies(rotary), causal=causal), q, k, values, index)


def rotated_vectors(
    spec: AttentionSpec,
    rotation: HeadRotation,
    heads: Sequence[int],
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    own: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute the rotated queries and keys of ``rotated_scores``, for edits other than ``DistanceMap``."""
    if not rotation:
        return spec.rotated(_wide(q), own[0]), spec.rotated(_wide(k), own[1])
    rotary = spec.require_rotary("rotation edits")

    def side(x: Tensor, which: Side, at: Tensor, there: list[int]) -> Tensor:
        given = rotation.patch(which)
        if given is not None:
            check_patch(f"{which}_rot", given, x)
            return rotation.kept(given[:, :, there].to(_wide(x)), rotary, which)
        kept = rotation.kept(_wide(x), rotary, which)
        return rotation.turned(kept, rotation.places(which, at, len(x)), at, rotary)

    return side(q, "q", own[0], list(heads)), side(k, "k", own[1], [spec.key_head(h) for h in heads])


class Piece(NamedTuple):
    """The function ``slope * distance + shift`` from the real distance ``start`` on."""

    start: int
    slope: float
    shift: float


def straight_pieces(values: Float[Tensor, " distance"], low: int = 0) -> list[Piece] | None:
    """Split a function, given at ``low``, ``low + 1`` …, into a few linear pieces, or return None if it has many."""
    pieces, start, n = [], 0, len(values)
    steps = values.diff()
    same = (steps[1:] - steps[:-1]).abs() <= 1e-9 * (1 + steps[1:].abs())
    bends = [*(int(x) + 1 for x in (~same).nonzero()[:, 0]), n - 1]  # steps before which the slope changes
    if len(bends) > 2 * _MOST_PIECES:
        return None
    for bend in bends:
        if bend <= start:
            continue
        slope = float(steps[start]) if start < n - 1 else 0.0
        pieces.append(Piece(start + low, slope, float(values[start]) - slope * (start + low)))
        start = bend + 1
    if start < n:
        pieces.append(Piece(start + low, 0.0, float(values[start])))
    return pieces if len(pieces) <= _MOST_PIECES else None


def _selected(
    spec: AttentionSpec,
    rotation: HeadRotation,
    q: Tensor,
    k: Tensor,
    own: tuple[Tensor, Tensor],
    pieces: Sequence[Piece],
    before: Tensor | None,
) -> Float[Tensor, "batch head query key"]:
    """Compute scores from vectors turned for each piece, and select for each pair the piece of its distance."""
    rotary = spec.require_rotary("rotation edits")
    q, k = rotation.kept(_wide(q), rotary), _wide(k)
    real = own[0][..., :, None] - own[1][..., None, :]
    real = real if real.ndim == 2 else real[:, None]
    scores = before
    for n, piece in enumerate(pieces):
        if before is not None and piece.slope == 1 and piece.shift == 0:
            new = before
        else:
            q_at, k_at = (piece.slope * at.double() / rotation.scale for at in own)
            q_rot = rotation.turned(q, q_at + piece.shift / rotation.scale, own[0], rotary)
            new = spec.score(q_rot, rotation.turned(k, k_at, own[1], rotary))
            new = new if before is None else new.to(before.dtype)
        scores = new if n == 0 or scores is None else torch.where(real >= piece.start, new, scores)
    assert scores is not None
    return scores


def pair_scores(
    spec: AttentionSpec,
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    values: Float[Tensor, " distance"],
    index: Int[Tensor, "*lead query key"],
) -> Float[Tensor, "batch head query key"]:
    """Compute scores of unrotated queries and keys (one key head per query head) at the distances ``values[index]``.

    The soft cap is applied, the mask is not. Computed in float32 (float64 for float64), a few million cells at a time;
    in causal layers, keys after a block of queries are skipped (their scores are 0).
    """
    rotary = spec.require_rotary("pair_scores")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    n, (n_query, n_key) = rotary.dim // 2, index.shape[-2:]
    angles = values.double()[:, None] * rotary.frequencies.to(values.device)  # in float64: it may be many turns
    cos, sin = ((rotary.attention_factor**2 * x.T).to(wide).contiguous() for x in (angles.cos(), angles.sin()))
    q_planes, q_rest = _planes(q.to(wide), rotary.pairing, n)
    k_planes, k_rest = _planes(k.to(wide), rotary.pairing, n)
    crossed = torch.stack([k_planes[..., 1], -k_planes[..., 0]], -1)
    scores = q_rest.new_zeros(len(q), q.shape[2], n_query, n_key)
    rows = max(1, min(n_query, 64, _CELLS_PER_BLOCK // (q.shape[0] * q.shape[2] * n_key)))
    for start in range(0, n_query, rows):
        some = slice(start, start + rows)
        seen = slice(0, min(n_key, start + rows + n_key - n_query) if spec.causal else n_key)
        block = q_rest[:, :, some] @ k_rest[:, :, seen].mT
        here = index[..., some, seen]
        for c in range(n):
            one = q_planes[:, :, some, c]
            block = torch.addcmul(block, one @ k_planes[:, :, seen, c].mT, cos[c][here])
            block = torch.addcmul(block, one @ crossed[:, :, seen, c].mT, sin[c][here])
        scores[:, :, some, seen] = block * spec.require_scale()
    return spec.capped(scores)


def _planes(
    x: Float[Tensor, "batch pos head d_head"], pairing: str, n: int
) -> tuple[Float[Tensor, "batch head pos subspace 2"], Float[Tensor, "batch head pos rest"]]:
    """Split vectors into the coordinates of each subspace and those that RoPE does not rotate; heads first."""
    x = x.transpose(1, 2)
    rotated = x[..., : 2 * n].unflatten(-1, (2, n) if pairing == "half" else (n, 2))
    return rotated.mT.contiguous() if pairing == "half" else rotated.contiguous(), x[..., 2 * n :].contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_part(
    distances: Float[Tensor, "*lead whole_query whole_key"], part: tuple[int, int] | None, shape: tuple[int, int]
) -> Float[Tensor, "*lead query key"]:
    """Select the distances of a part of a text from those of the whole text."""
    if part is None:
        return distances
    ends = [start + n for start, n in zip(part, shape, strict=True)]
    if any(n < end for n, end in zip(distances.shape[-2:], ends, strict=True)):
        raise ArgumentError(
            "distances",
            f"must be those of the whole text, at least {ends[0]} queries and {ends[1]} keys so far, got "
            f"{tuple(distances.shape)}: give a larger matrix, or a function of the distance",
        )
    return distances[..., part[0] : ends[0], part[1] : ends[1]]


def _check_matrix(spec: AttentionSpec, distances: Tensor, batch: int, shape: tuple[int, int]) -> None:
    """Refuse distances that do not fit the running text."""
    allowed = [shape, *((h, *shape) for h in (1, spec.n_heads))]
    allowed += [(b, *heads) for b in (1, batch) for heads in allowed[1:]]
    if tuple(distances.shape) not in allowed:
        raise ArgumentError(
            "distances",
            f"must have shape (query, key) = {shape}, (head, query, key) or (batch, head, query, key) with "
            f"{spec.n_heads} heads and {batch} texts (or 1), got {tuple(distances.shape)}",
        )
    at = torch.arange(shape[1], device=distances.device)
    inside = spec.sees(at[shape[1] - shape[0] :, None] - at)
    if not bool((distances.isfinite() | ~inside).all()):
        raise ArgumentError("distances", "must be finite inside the mask")
