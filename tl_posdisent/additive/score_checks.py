"""Validate attention scores (shape, dtype, finite cells, neither a pattern nor vectors), and queries and keys."""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import check_floating
from tl_posdisent.utils.validation import check_flag

_MIN_PATTERN_KEYS = 6  # with fewer, real scores might by chance be non-negative and sum to less than 1 in every row


def check_scores(scores: Any, name: str = "scores") -> Tensor:
    """Return ``scores``, or raise unless it is a floating point tensor ``(..., query, key)``."""
    x = check_floating(name, scores)
    if x.ndim < 2:
        raise ArgumentError(name, f"must have shape (..., query, key), got {tuple(x.shape)}")
    if x.numel() == 0 or x.shape[-1] < 2:
        raise ArgumentError(name, f"must hold at least one query and two keys, got shape {tuple(x.shape)}")
    return x


def read_scores(scores: Any, mask: Any, pool: bool, name: str = "scores") -> tuple[Tensor, tuple[int, ...] | None]:
    """Return a tensor, a list or a cache of scores as one tensor without its graph, and the layers of several."""
    layers: tuple[int, ...] | None = None
    if not isinstance(scores, Tensor):
        scores, layers = stack_layers(scores, name)
        _refuse_ambiguous(scores, mask, pool)
    return check_scores(scores, name).detach(), layers


def stack_layers(scores: Any, name: str = "scores") -> tuple[Tensor, tuple[int, ...]]:
    """Stack scores (or patterns, by ``name``) of several layers, with an axis of layers before the heads.

    Returns the layers too: those of a cache, or the places in a list.
    """
    if hasattr(scores, "items"):
        hook = "hook_pattern" if name == "pattern" else "hook_attn_scores"
        named = {re.fullmatch(rf"blocks\.(\d+)\.attn\.{hook}", str(name)): x for name, x in scores.items()}
        by_layer = {int(match[1]): x for match, x in named.items() if match}
        if not by_layer:
            raise ArgumentError(
                name,
                f"must be a tensor, a list of tensors, or a cache that holds {hook}, got a cache without it; "
                f'use run_with_cache(tokens, names_filter=lambda name: name.endswith("{hook}"))',
            )
    elif isinstance(scores, (list, tuple)) and scores:
        by_layer = dict(enumerate(scores))
    else:
        raise ArgumentError(name, f"must be a torch.Tensor, a list of them or a cache, got {type(scores).__name__}")
    layer_scores = [check_scores(by_layer[layer], f"{name} of layer {layer}") for layer in sorted(by_layer)]
    shapes = {tuple(x.shape) for x in layer_scores}
    if len(shapes) > 1 or layer_scores[0].ndim < 3:
        raise ValueError(
            f"{name} of several layers must have one shape (*batch, head, query, key), got {sorted(shapes)}"
        )
    return torch.stack([x.to(layer_scores[0].device) for x in layer_scores], -4), tuple(sorted(by_layer))


def _refuse_ambiguous(stacked: Float[Tensor, "*batch layer head query key"], mask: Any, pool: bool) -> None:
    """Raise if the first axis of the layers' scores, or of a mask for them, may be texts, layers or heads."""
    if pool and stacked.ndim < 5:
        shape = tuple(stacked.shape[1:])
        raise ArgumentError(
            "pool",
            f"must be False for layers without an axis of texts, got scores of shape {shape} per layer: pass (text, "
            "head, query, key) for each, as a cache with remove_batch_dim=False has, or torch.stack(scores) if each "
            "item of the list is a text",
        )
    if isinstance(mask, Tensor) and 4 <= mask.ndim < stacked.ndim:
        raise ArgumentError(
            "mask",
            "must have shape (query, key), (head, query, key) or all axes of the scores with that of the layers, "
            f"{tuple(stacked.shape)}, each of that size or 1, got {tuple(mask.shape)}",
        )


def refuse_non_finite(scores: Tensor, cells: Cells, squares: Float64[Tensor, "*matrix"]) -> None:
    """Raise if a cell inside the mask is NaN, infinite or as large as the lowest number of a dtype, a usual mask value.

    Args:
        squares: sums of squares, or larger numbers, of each matrix: the cells are only read if one of them is large.
    """
    if bool((squares < 0.99 * _limit(scores) ** 2).all()):
        return
    bad = ~_is_finite(scores) & cells.to_mask()
    if bool(bad.any()):
        masked = bad & (scores < 0)
        no_masks = bad & ~masked  # NaN and inf, which no mask explains
        first = tuple((no_masks if bool(no_masks.any()) else masked).nonzero()[0].tolist())
        advice = 'pass the mask that the model used: mask="causal", window=, or a boolean tensor'
        if bool(no_masks.any()):
            advice = "the model's weights or activations are not finite: check them, or run it in float32 or bfloat16"
        raise ArgumentError(
            "scores",
            f"must be finite inside the mask, got {scores[first].item():g} at index {first} (query {first[-2]}, key "
            f"{first[-1]}) and {int(bad.sum()) - 1} more such cells; {advice}",
        )


def _is_finite(scores: Tensor) -> Bool[Tensor, "*cells"]:
    return (scores > -_limit(scores)) & (scores < _limit(scores))


def _limit(scores: Tensor) -> float:
    """Return a number that no score reaches; the lowest numbers of all dtypes, half of them too, are beyond it."""
    return -torch.finfo(torch.float16).min if scores.dtype == torch.float16 else 1e30


def check_finite_tensor(name: str, x: Any) -> None:
    """Raise unless ``x`` is a finite floating point tensor."""
    check_floating(name, x)
    if not bool(x.isfinite().all()):
        raise ArgumentError(name, f"must be finite, got {int((~x.isfinite()).sum())} NaN or infinite values")


def check_pool(pool: Any, name: str, x: Tensor, axes: int) -> None:
    """Raise unless ``pool`` is a flag, and False for a tensor without an axis of texts before its last ``axes``."""
    check_flag("pool", pool)
    if pool and x.ndim <= axes:
        raise ArgumentError("pool", f"must be False without a leading axis of texts, got {name} {tuple(x.shape)}")


def check_queries_and_keys(**vectors: Any) -> None:
    """Raise unless the two named tensors are finite queries and at least two keys, with matching shapes."""
    for name, x in vectors.items():
        check_finite_tensor(name, x)
        if x.ndim < 3 or x.numel() == 0:
            raise ArgumentError(name, f"must have shape (*batch, pos, head, d_head), got {tuple(x.shape)}")
    q, k = vectors.values()
    if q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2] or k.shape[-3] < 2:
        raise ValueError(
            f"{' and '.join(vectors)} must have the same batch axes and d_head, at least two keys, and a number of "
            f"query heads that is a multiple of the key heads, got {tuple(q.shape)} and {tuple(k.shape)}"
        )


def is_pattern(scores: Float[Tensor, "*batch query key"]) -> bool:
    """Say whether the tensor is an attention pattern: every row is non-negative and sums to 1.

    Rows of zeros or NaN, which padding leaves, are accepted if some row sums to 1. With learned attention sinks rows
    sum to less than 1: such a pattern is recognised by the zeros of a causal mask, where scores are not 0.
    """
    if not bool(((scores[..., -1, :] >= 0) | scores[..., -1, :].isnan()).all()):
        return False  # the last row already shows that these are scores, so the others need not be read
    rows = torch.nan_to_num(scores.detach(), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    sums = rows.sum(-1, dtype=torch.float64)
    ones = (sums - 1).abs() < 0.01  # bfloat16 rounds each probability to three digits
    if bool((rows >= 0).all() & (ones | (sums == 0)).all() & ones.any()):
        return True
    causal = rows.shape[-2] == rows.shape[-1] >= _MIN_PATTERN_KEYS and bool((rows.triu(1) == 0).all())
    return causal and bool((rows >= 0).all() & ((sums > 0) & (sums < 1.01)).all())


def refuse_patterns(scores: Float[Tensor, "*batch query key"], advice: str) -> None:
    """Raise if ``scores`` is an attention pattern; ``advice`` ends the message."""
    if is_pattern(scores):
        raise ArgumentError(
            "scores",
            "must be attention logits before the softmax, got an attention pattern: its rows are non-negative and sum "
            f"to 1 (or to less, as with attention sinks); {advice}",
        )


def refuse_vectors(scores: Float[Tensor, "*batch query key"], advice: str = "") -> None:
    """Raise if fewer queries than keys are not causally masked, as in q, k, v, z and a residual stream.

    Square matrices of scores are often passed before masking, so vectors of as many coordinates as rows pass.
    ``advice`` ends the message.
    """
    n_query, n_key = scores.shape[-2:]
    if not 1 < n_query < n_key:
        return
    later = torch.ones(n_query, n_key, dtype=torch.bool, device=scores.device).triu(n_key - n_query + 1)
    future = scores[..., later]
    if bool(_is_finite(future).all() & (future != 0).any()):
        raise ArgumentError(
            "scores",
            "must have shape (..., query, key) with the queries at the last keys, and keys after a query masked, got "
            f"{tuple(scores.shape)}, {n_query} queries and {n_key} keys, with finite values after the queries: q, k, v "
            "and z (batch, pos, head, d_head) and a residual stream (batch, pos, d_model) look like this and are not "
            'scores. If these are scores, set keys after a query to -inf, or pass mask="full" if each query sees all '
            f"keys{advice}",
        )
