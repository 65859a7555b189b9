"""The two-axis model of a text's scores: what a query makes of a distance, and what it makes of a key.

In observed scores the two cannot be told apart, as the distance from a query says which key it is. They are parts of
the table ``W[d, i, j]`` in which each query meets each key at each distance (arXiv 2503.13305, §3). Its means over keys
and over distances are the scores of a mean key and of a mean rotation, so the table is never made.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from tl_posdisent.models.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary, from_complex, rotate, to_complex

from .score_components import Part


class TwoAxisParts(NamedTuple):
    """Parts of scores before a soft cap; they broadcast to ``[batch, head, query, key]`` and add up, but for the
    residual. All but ``mean`` have mean 0 over the table."""

    mean: Float[Tensor, "batch head 1 1"]
    distance: Float[Tensor, "batch head query key"]
    query: Float[Tensor, "batch head query 1"]
    key: Float[Tensor, "batch head query key"]


def keep_two_axis(
    spec: AttentionSpec,
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    inside: Bool[Tensor, "*lead query key"],
    keep: Collection[Part],
) -> Float[Tensor, "batch head query key"]:
    """Scores with the mean and these parts alone, soft cap applied, mask not; in float32 (float64 for float64).

    Args:
        spec: the layer.
        q, k: queries and keys before rotation, one key head per query head.
        inside: as a ``View`` has it; keys that no query sees (padding) are not in the table.
        keep: parts to keep.
    """
    q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k))
    parts = split_two_axis(spec, q, k, inside)
    named = {"distance": parts.distance, "query": parts.query, "key": parts.key}
    if "residual" not in keep:
        out = sum((part for name, part in named.items() if name in keep), parts.mean)
        return spec.capped(out.expand_as(parts.distance))
    positions = torch.arange(q.shape[1], device=q.device)
    own = _dot(spec, spec.rotated(q, positions), spec.rotated(k, positions))
    return spec.capped(sum((-part for name, part in named.items() if name not in keep), own))


def split_two_axis(
    spec: AttentionSpec,
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    inside: Bool[Tensor, "*lead query key"],
) -> TwoAxisParts:
    """The parts at the real distances, in closed form."""
    rotary, positions = spec.require_rotary("two axes"), torch.arange(q.shape[1], device=q.device)
    there = _keys_there(inside)  # of a text on itself: also the queries that are
    weights = (there / there.sum(-1, keepdim=True)).to(q.dtype)
    mean_key = torch.einsum("bkhd,bk->bhd", k, weights.expand(len(k), -1))[:, None]
    turn = _mean_turn(spec, rotary, there)
    alone = torch.einsum("bqhd,bhd->bhq", q, _turned(mean_key, turn, rotary)[:, 0]) * spec.require_scale()
    distance = _dot(spec, rotate(q, positions, rotary), rotate(mean_key.expand_as(k), positions, rotary))
    key = _dot(spec, q, _turned(k, turn, rotary))
    mean = (alone * weights[:, None]).sum(-1)
    at_query = alone[..., None]
    return TwoAxisParts(mean[..., None, None], distance - at_query, at_query - mean[..., None, None], key - at_query)


def _dot(spec: AttentionSpec, q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * spec.require_scale()


def _keys_there(inside: Tensor) -> Bool[Tensor, "one_or_batch key"]:
    """Keys that some query of some head sees."""
    seen = inside.any(-2)
    return seen.any(1) if inside.ndim == 4 else seen[None]


def _mean_turn(spec: AttentionSpec, rotary: Rotary, there: Tensor) -> Complex[Tensor, "one_or_batch subspace"]:
    """The mean of ``exp(i θ d)`` over the distances that the mask leaves in a text of so many tokens, all alike."""
    longest = there.shape[-1]
    distances = torch.arange(1 - longest, longest, device=there.device)
    counts = spec.sees(distances) & (distances.abs() < there.sum(-1, keepdim=True))
    angle = rotary.angles(distances)
    turns = torch.polar(torch.ones_like(angle), angle)
    return counts.to(turns.dtype) @ turns / counts.sum(-1, keepdim=True)


def _turned(k: Tensor, turn: Tensor, rotary: Rotary) -> Tensor:
    """Keys for unrotated queries such that scores are those at the mean rotation."""
    z, rest = to_complex(k, rotary)
    return from_complex(z * (rotary.attention_factor**2 * turn.conj()).to(z.dtype)[:, None, None], rest, rotary)
