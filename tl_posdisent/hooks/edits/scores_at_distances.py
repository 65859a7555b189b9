"""Scores of heads under edits of their rotation, from the model's own scores and its queries and keys.

The model's scores are a product of queries and keys and a rest, the mask and rounding. The edits give another product,
to which the rest is added, so masked cells stay masked. A piecewise linear function of the distance (one distance, a
ceiling) selects among products of turned vectors. All other distances are computed subspace by subspace for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.edits.head_edits import HeadRotation, check_patch
from tl_posdisent.hooks.edits.rotation_edits import Side, mapped
from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import turn
from tl_posdisent.utils.errors import ArgumentError

_CELLS_PER_BLOCK = 2**21
_MOST_PIECES = 8  # more would cost more than arbitrary distances


class Vectors(NamedTuple):
    """Rotated queries and keys: of all heads and key heads, or of some heads, one key head for each query head."""

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]


def rotated_scores(
    layer: RunningLayer,
    rotation: HeadRotation,
    heads: Sequence[int],
    scores: Float[Tensor, "batch head query key"],
    rest: Float[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """Return the scores of some heads under the edits of their rotation.

    Args:
        scores: the model's own.
        rest: these less the product of its queries and keys; overwritten.
    """
    if not rotation.pairwise:
        angles = rotation.angles(layer.rotary, rotation.positions(layer.slots, len(layer.q)))
        return _rounded(add_product(layer.spec, rest, _turned(layer, rotation, heads, angles, angles)), scores)
    distances = None if rotation.distance is None else rotation.distance.distances
    if isinstance(distances, Tensor):
        cells = _matrix(layer, distances, heads)
        values, index = cells.clamp(max=rotation.ceiling).unique(return_inverse=True)
        return _rounded(rest + _of_pairs(layer, rotation, heads, values, index), scores)
    if distances is None or isinstance(distances, (int, float)):
        pieces = _pieces_of_ceiling(distances, rotation.ceiling)
    else:
        needed = torch.where(layer.mask.seen, layer.distances, 0)  # a function may have no values at other distances
        low, high = (int(x) for x in needed.aminmax())
        real = torch.arange(low, max(high, low + 1) + 1, device=needed.device).double()
        values = mapped(distances, real, "distances", "real distances").clamp(max=rotation.ceiling)
        straight = straight_pieces(values, low)
        if straight is None:
            index = (layer.distances - low).clamp(0, len(values) - 1)
            return _rounded(rest + _of_pairs(layer, rotation, heads, values, index), scores)
        pieces = straight
    return _selected(layer, rotation, heads, scores, rest, pieces)


def own_vectors(layer: RunningLayer, heads: Sequence[int]) -> Vectors:
    """Return the rotated queries and keys of some heads, as the model computes them."""
    q, k = layer.rotated
    if len(heads) == q.shape[2]:
        return Vectors(q, k)
    return Vectors(q[:, :, list(heads)], k[:, :, [layer.spec.key_head(head) for head in heads]])


def _turned(
    layer: RunningLayer, rotation: HeadRotation, heads: Sequence[int], of_queries: Tensor, of_keys: Tensor
) -> Vectors:
    """Turn queries and keys of some heads by these angles, or put in those of another run."""
    there = [layer.spec.key_head(head) for head in heads]
    shared = sorted(set(there))

    def side(x: Tensor, which: Side, chosen: Sequence[int], angles: Tensor) -> Tensor:
        patch = rotation.patch(which)
        if patch is not None:
            check_patch(f"{which}_rot", patch, x)
            return patch[:, :, list(chosen)].to(x)
        x = x if len(chosen) == x.shape[2] else x[:, :, list(chosen)]
        return rotation.turned(x, angles, layer.slots, layer.rotary)

    q = rotation.kept(side(layer.wide_q, "q", heads, of_queries), layer.rotary)
    k = side(layer.wide_k, "k", shared, of_keys)
    return Vectors(q, k if len(heads) == layer.spec.n_heads else k[:, :, [shared.index(group) for group in there]])


def add_product(
    spec: AttentionSpec, scores: Float[Tensor, "batch head query key"], vectors: Vectors, sign: int = 1
) -> Float[Tensor, "batch head query key"]:
    """Add the scores of rotated queries and keys to ``scores``, in place, or subtract them.

    In place because a new tensor of this size takes longer than the product does.
    """
    if spec.soft_cap is not None:
        return scores.add_(spec.score(*vectors), alpha=sign)
    q, k = vectors.q.transpose(1, 2), vectors.k.transpose(1, 2)
    batch, n_kv = k.shape[:2]
    # query heads that share a key head are one longer list of queries
    shared, q_shared = (
        rearrange(x, "batch (kv group) query d -> (batch kv) (group query) d", kv=n_kv) for x in (scores, q)
    )
    shared.baddbmm_(q_shared, k.flatten(0, 1).mT, alpha=sign * spec.require_scale())
    return rearrange(
        shared, "(batch kv) (group query) key -> batch (kv group) query key", batch=batch, kv=n_kv, query=q.shape[2]
    )


def _rounded(new: Tensor, scores: Tensor) -> Tensor:
    """Return new scores in the model's dtype; in float16, sums with the most negative number would be -inf."""
    if scores.dtype != torch.float16:
        return new.to(scores.dtype)
    return torch.where(scores < torch.finfo(scores.dtype).min / 2, scores, new.to(scores.dtype))


class Piece(NamedTuple):
    """The function ``slope * distance + shift`` from the real distance ``start`` on."""

    start: float
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


def _pieces_of_ceiling(distance: float | None, ceiling: float) -> list[Piece]:
    """Return one distance for all pairs, or the real ones, below a ceiling."""
    if distance is not None:
        return [Piece(-math.inf, 0.0, min(distance, ceiling))]
    return [Piece(-math.inf, 1.0, 0.0), Piece(ceiling, 0.0, ceiling)]


def _selected(
    layer: RunningLayer,
    rotation: HeadRotation,
    heads: Sequence[int],
    scores: Tensor,
    rest: Tensor,
    pieces: Sequence[Piece],
) -> Float[Tensor, "batch head query key"]:
    """Compute scores from vectors turned for each piece, and select for each pair the piece of its distance."""
    exact, positions = rotation.frequencies(layer.rotary), rotation.positions(layer.slots, len(layer.q))
    real = None
    if len(pieces) > 1:
        real = layer.distances if rotation.position is None else positions[..., :, None] - positions[..., None, :]
        real = real[:, None] if real.ndim == 3 else real
    selected = None
    for n, piece in enumerate(pieces):
        here = None if real is None or selected is None else real >= piece.start
        if here is not None and not bool(here.any()):
            continue
        if piece.slope == 1 and piece.shift == 0:
            angles = of_keys = rotation.angles(layer.rotary, positions)
        else:
            places = piece.slope * positions.double()
            angles, of_keys = exact.angles(places + piece.shift), exact.angles(places)
        if angles is of_keys and rotation.distances_alone:
            new = scores
        else:
            after = _turned(layer, rotation, heads, angles, of_keys)
            new = _rounded(add_product(layer.spec, rest if n == len(pieces) - 1 else rest.clone(), after), scores)
        if selected is None or here is None:
            selected = new
        else:
            kept = new is scores or torch.is_grad_enabled()  # otherwise overwritten, as in ``add_product``
            selected = torch.where(here, new, selected, out=None if kept else new)
    assert selected is not None
    return selected


def _of_pairs(
    layer: RunningLayer,
    rotation: HeadRotation,
    heads: Sequence[int],
    values: Float[Tensor, " distance"],
    index: Int[Tensor, "*lead query key"],
) -> Float[Tensor, "batch head query key"]:
    """Compute scores at the distances ``values[index]``."""
    spec, rotary = layer.spec, layer.rotary
    phases = rotation.phases(rotary, layer.slots, len(layer.q))

    def noisy(x: Tensor) -> Tensor:
        return turn(x, phases[..., None, :], rotary.pairing, 1.0) if isinstance(phases, Tensor) else x

    q = rotation.kept(noisy(layer.wide_q[:, :, list(heads)]), rotary)
    k = noisy(layer.wide_k)[:, :, [spec.key_head(head) for head in heads]]
    ahead = layer.mask.seen.triu(1)  # keys after their query, in the prefix of a prefix LM
    causal = spec.causal and not bool(ahead.any())
    return pair_scores(replace(spec, rotary=rotation.frequencies(rotary), causal=causal), q, k, values, index)


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


def _matrix(
    layer: RunningLayer, distances: Float[Tensor, "*lead query key"], heads: Sequence[int]
) -> Float[Tensor, "*lead query key"]:
    """Return the given distances of some heads, or raise if they do not fit the running text."""
    spec, (batch, length) = layer.spec, layer.q.shape[:2]
    shape = (length, length)
    allowed = [shape, *((h, *shape) for h in (1, spec.n_heads))]
    allowed += [(b, *by_head) for b in (1, batch) for by_head in allowed[1:]]
    if tuple(distances.shape) not in allowed:
        raise ArgumentError(
            "distances",
            f"must have shape (query, key) = {shape}, (head, query, key) or (batch, head, query, key) with "
            f"{spec.n_heads} heads and {batch} texts (or 1), got {tuple(distances.shape)}",
        )
    distances = distances.to(layer.q.device)
    if not bool((distances.isfinite() | ~layer.mask.seen[:, None]).all()):
        raise ArgumentError("distances", "must be finite inside the mask")
    if distances.ndim >= 3 and distances.shape[-3] == spec.n_heads > 1:
        distances = distances[..., torch.tensor(list(heads), device=distances.device), :, :]
    return distances.nan_to_num(0.0, 0.0, 0.0)  # masked cells are arbitrary
