"""Features of the keys in which the importances of a static head are linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.additive.attention.systems import Systems, by_system
from tl_posdisent.additive.score_checks import check_finite_tensor
from tl_posdisent.utils.errors import ArgumentError

_RANK_TOLERANCE = 1e-13  # singular values of the features below this times the largest count as 0


@dataclass(frozen=True, eq=False)
class KeyFeatures:
    """Features of the keys, whitened: linear combinations (``values``) of equal size that are uncorrelated.

    ``weights`` converts a direction of combinations to a direction of features.
    """

    values: Float64[Tensor, "system text key combination"]
    weights: Float64[Tensor, "system feature combination"]

    @classmethod
    def of(cls, keys: Any, shape: Sequence[int], systems: Systems, *, pool: bool, sinks: int) -> KeyFeatures:
        """Whiten the features of each head; the last features are indicators of the first keys."""
        check_finite_tensor("keys", keys)
        *batch, _, n_key = shape
        kv = keys.shape[-2] if keys.ndim > 1 else 0
        if not batch or tuple(keys.shape[:-2]) != (*batch[:-1], n_key) or kv == 0 or batch[-1] % kv:
            raise ArgumentError(
                "keys",
                "must have shape (*texts, key, kv_head, feature) for scores of shape (*texts, head, query, "
                f"key), got {tuple(keys.shape)} and {tuple(shape)}",
            )
        per_head = keys.detach().double().transpose(-3, -2).repeat_interleave(batch[-1] // kv, -3)
        by_head = by_system(per_head, 2, pool=pool)
        marks = first_keys(systems.keys, sinks)
        features = torch.cat([by_head, marks.expand(*by_head.shape[:-1], sinks)], -1)
        if features.shape[-1] == 0:
            return cls(features, features.new_zeros(len(features), 0, 0))
        seen = (features * systems.keys[..., None]).flatten(1, 2)
        _, size, combinations = torch.linalg.svd(torch.linalg.qr(seen, mode="r")[1], full_matrices=False)
        kept = size > _RANK_TOLERANCE * size[:, :1].clamp_min(torch.finfo(size.dtype).tiny)
        weights = combinations.mT * torch.where(kept, seen.shape[1] ** 0.5 / size, 0.0)[:, None]
        return cls(features @ weights[:, None], weights)


def first_keys(seen: Bool[Tensor, "*mask key"], n: int) -> Float64[Tensor, "*mask key n"]:
    """Create one indicator feature for each of the first n keys that some query sees."""
    order = torch.arange(1, n + 1, device=seen.device)
    return (seen[..., None] & (seen.cumsum(-1)[..., None] == order)).double()
