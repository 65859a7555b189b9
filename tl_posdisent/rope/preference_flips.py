"""Preference flips: how often the distance decides which of two keys has the higher score.

A query compares two keys at one distance, and again at another. In an additive head, ``score = distance + query + key``
(also in the two-axis model), the same key wins at every distance. Only the order of scores matters, neither their scale
nor a soft cap.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64, Integer
from torch import Tensor

from tl_posdisent.additive.score_checks import check_queries_and_keys
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import Numbers, real_numbers

from .rotary import Rotary, check_rotary, rotate

_CELLS_AT_ONCE = 2**20
_ROUNDING = {torch.float64: 1e-12}  # scores of A and B that differ by less than this of |q|·(|A| + |B|) do not differ
_ROUNDING_OF_MODELS = 1e-6  # else, as vectors of one token in two places of a text differ


@own_sums()
def preference_flips_qk(
    q: Float[Tensor, "*batch query head d_head"],
    k: Float[Tensor, "*batch key kv d_head"],
    rotary: Rotary,
    near: Numbers,
    far: Numbers,
) -> pd.DataFrame:
    """Count how often two keys change places between two distances, for every query and every pair of keys.

    For query i, keys A ≠ B and distances d ≠ d′ the preference flips if ``W[d, i, A] > W[d, i, B]`` and
    ``W[d′, i, A] < W[d′, i, B]``, with ``W[d, i, j]`` the score that query i would give to key j at distance d. The
    probability is exact, over all queries, pairs of keys and pairs of distances of the kind: ``(1 - τ) / 2`` with
    Kendall's τ of the keys' order at the two distances, averaged. Ties never flip, to rounding: 1e-6 of
    ``|q|·(|A| + |B|)`` for vectors of a model, in less than float64. What is counted for two keys does not depend on
    the others. Time grows with queries · keys² · distances.

    Args:
        q: queries before rotation, ``[*batch, query, head, d_head]``.
        k: keys likewise, ``[*batch, key, kv_head, d_head]``; query head h reads key head ``h // (head // kv_head)``.
            Every query meets every key.
        rotary: the layer's rotation.
        near, far: distances in positions, any finite numbers, none in both and none twice.

    Returns:
        One row per text and head: ``batch``, ``head``; ``near``, ``far`` and ``near_far``, the probability of a flip
        between two near distances, two far ones, and one of each: 0 for an additive head, ½ by chance. NaN for a single
        distance.

    Raises:
        ValueError: shapes that do not fit; fewer than two keys; values that are not finite; invalid distances.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, preference_flips_qk
        >>> rotary = Rotary(torch.tensor([0.5, 0.0], dtype=torch.float64), pairing="adjacent")
        >>> q, k = torch.ones(20, 1, 4), torch.randn(30, 1, 4)
        >>> k[..., :2] = 1.0  # what turns is the same for all keys, so the head is additive
        >>> preference_flips_qk(q, k, rotary, near=range(8), far=range(8, 32))["near_far"].tolist()
        [0.0]
    """
    check_queries_and_keys(q=q, k=k)
    check_rotary(rotary)
    near_at, far_at = check_distance_sets(near, far)
    *batch, _, n_heads, _ = q.shape
    queries, keys = (x.double().reshape(-1, *x.shape[-3:]) for x in (q, k))
    keys = rotate(keys, torch.zeros(keys.shape[1], device=k.device), rotary)
    group, rounding = n_heads // k.shape[-2], _ROUNDING.get(k.dtype, _ROUNDING_OF_MODELS)
    flips = torch.stack(
        [
            _flips_of_head(queries[text, :, head], keys[text, :, head // group], rotary, near_at, far_at, rounding)
            for text in range(len(queries))
            for head in range(n_heads)
        ]
    )
    values = dict(zip(("near", "far", "near_far"), flips.T.tolist(), strict=True))
    return pd.DataFrame({**index_columns((*batch, n_heads)), **values})


def _flips_of_head(
    q: Float64[Tensor, "query d"],
    k: Float64[Tensor, "key d"],
    rotary: Rotary,
    near: Tensor,
    far: Tensor,
    rounding: float,
) -> Float64[Tensor, "3"]:
    """Return the flips among near, among far, and between near and far distances."""
    counts = torch.zeros(3, dtype=torch.float64, device=q.device)
    n, m, n_key = len(near), len(far), len(k)
    sizes = k.norm(dim=-1) * rotary.attention_factor
    for block in q.split(max(1, _CELLS_AT_ONCE // n_key**2)):
        slack = rounding * block.norm(dim=-1)[:, None, None] * sizes
        results = []
        for distances in (near, far):
            positions = distances.repeat(len(block))  # distance by distance for each query
            turned = rotate(block.repeat_interleave(len(distances), 0)[:, None], positions, rotary)[:, 0]
            results.append(_won_and_lost(*_ranks((turned @ k.T).unflatten(0, (len(block), -1)), slack)))
        # With n(A, B) the number of distances at which A beats B, keys A and B flip between n(A, B) · n(B, A) pairs of
        # distances of one kind, and between n(A, B) · m(B, A) + n(B, A) · m(A, B) pairs of two kinds.
        (won, lost), (far_won, far_lost) = results
        counts += torch.stack([won @ lost, far_won @ far_lost, won @ far_lost]).double()
    n_pairs = torch.tensor([n * (n - 1), m * (m - 1), n * m], device=counts.device)  # 0 for a single distance: NaN
    return counts / n_pairs / (len(q) * n_key * (n_key - 1) / 2)


_Ranks = Integer[Tensor, "query distance key"]


def _ranks(
    scores: Float64[Tensor, "query distance key"], slack: Float64[Tensor, "query 1 key"]
) -> tuple[_Ranks, _Ranks]:
    """Rank each score, minus and plus its rounding, among all of these in its row.

    One key beats another if its score minus its rounding is above the other's score plus its rounding, which depends on
    these two keys alone.
    """
    both = torch.cat([scores - slack, scores + slack], -1)
    ordered, order = both.sort(-1)
    steps = torch.nn.functional.pad(ordered[..., 1:] > ordered[..., :-1], (1, 0))
    most = max(both.shape[-1], scores.shape[-2] + 1)  # ranks, and later the number of distances; narrow is fast
    ranks = steps.cumsum(-1).to(torch.uint8 if most <= 256 else torch.int16 if most < 2**15 else torch.int32)
    least, largest = torch.empty_like(ranks).scatter_(-1, order, ranks).tensor_split(2, -1)
    return least, largest


def _won_and_lost(least: _Ranks, largest: _Ranks) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Count the distances at which the first key of each ordered pair scores above the second, and below it."""
    shape = (len(least), least.shape[-1], least.shape[-1])
    beats, won = (torch.zeros(shape, dtype=least.dtype, device=least.device) for _ in range(2))
    for low, high in zip(least.unbind(1), largest.unbind(1), strict=True):
        won += torch.gt(low[:, :, None], high[:, None, :], out=beats)  # twenty times faster than into bool
    return won.float().flatten(), won.mT.contiguous().float().flatten()


def check_distance_sets(near: Any, far: Any) -> tuple[Float64[Tensor, " near"], Float64[Tensor, " far"]]:
    """Return near and far distances as tensors, or raise."""
    near_at, far_at = (real_numbers(name, x, torch.device("cpu")) for name, x in (("near", near), ("far", far)))
    joined = torch.cat([near_at, far_at])
    if len(joined.unique()) < len(joined):
        raise ValueError(
            f"near and far must name no distance twice, got near {near_at.tolist()} and far {far_at.tolist()}"
        )
    return near_at, far_at
