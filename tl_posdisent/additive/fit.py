"""Least-squares fit of attention scores by a distance, a query and a key component (three-axis additivity)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.identifiability import count_parameters, fix_gauge
from tl_posdisent.additive.marginals import ROUNDING, Marginals, read_marginals
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_scores, refuse_patterns, warn_of_vectors
from tl_posdisent.additive.solver import pooled, solve
from tl_posdisent.utils.own_sums import own_sums
from tl_posdisent.utils.validation import check_flag


@own_sums()
def fit_additive(
    scores: Float[Tensor, "*batch query key"] | Mapping[str, Tensor] | Sequence[Tensor] | Any,
    *,
    mask: MaskKind | Bool[Tensor, "*mask query key"] = "causal",
    window: int | None = None,
    sinks: int = 0,
    pool: bool = False,
    check: bool = True,
) -> AdditiveFit:
    """Fit ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]`` by least squares, for all heads at once.

    The three-axis model of arXiv 2503.13305, §3: position (the distance), a bias of the query and an importance of the
    key. Cells outside the mask may hold anything. Sums run in float64 whatever the dtype.

    Args:
        scores: attention logits before the softmax, ``[*batch, query, key]``, e.g. ``cache["attn_scores", 3]``. The
            last query stands at the last key: with fewer queries than keys, query ``i`` is at ``i + n_key - n_query``.
            Or a list of such tensors, or a cache of ``run_with_cache`` with ``hook_attn_scores``: scores of several
            layers get one more axis, before the heads, and tables a column ``layer``.
        mask: ``"causal"`` (key not after query), ``"full"`` (bidirectional), or a boolean tensor that is True where a
            cell counts, shared ``[query, key]`` or one per matrix (broadcast against the leading axes).
        window: keep only cells with ``|distance| < window`` (Mistral's and Gemma's sliding window).
        sinks: leave this many keys at the beginning (attention sinks) out of the fit; their importance is 0.
        pool: one distance profile for all entries of the first axis (texts), each with its own query and key part.
        check: refuse an attention pattern (rows that are non-negative and sum to 1), and warn of what may be q, k, v
            or z (fewer "queries" than "keys", finite also where a causal mask is).

    Returns:
        An ``AdditiveFit``: components with their gauge fixed, ``r``, shares, ``fitted()``, ``residual()``, tables.

    Raises:
        ValueError: scores that are no floating point matrices; a mask of wrong dtype or size or that leaves nothing; a
            cell inside the mask that is NaN, infinite or a masking value such as -1e9 (says where, and which mask to
            pass; a boolean mask is taken as it is); an attention pattern, unless ``check=False``.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive
        >>> i = torch.arange(6.0)
        >>> scores = -0.5 * (i[:, None] - i) + torch.tensor([3.0, 0, 0, 1, 0, 0])  # a slope and two high keys
        >>> fit = fit_additive(scores)
        >>> round(fit.r.item(), 6), fit.distances.tolist()
        (1.0, [0, 1, 2, 3, 4, 5])
        >>> bool(torch.allclose(fit.fitted(), scores.double().tril()))
        True
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> _, cache = load_demo_model().run_with_cache(demo_tokens(length=32))
        >>> fit_additive(cache).to_frame().groupby("layer")["r"].mean().round(2).tolist()
        [0.55, 0.79, 0.82, 0.84, 0.87]
    """
    layers: tuple[int, ...] | None = None
    if not isinstance(scores, Tensor):
        scores, layers = _stacked(scores)
    scores = check_scores(scores).detach()
    check_flag("pool", pool)
    check_flag("check", check)
    if pool and scores.ndim < 3:
        raise ValueError(f"pool=True needs a leading axis of texts, got scores of shape {tuple(scores.shape)}")
    cells = make_cells(scores.shape, mask, window, sinks=sinks, device=scores.device)
    if check:
        refuse_patterns(scores, 'pass cache["attn_scores", layer], or check=False to fit these values as they are')
        if mask == "causal":
            warn_of_vectors(scores)
    read = read_marginals(scores, cells, suspicious=isinstance(mask, str))
    return replace(fit_marginals(read, cells, pool=pool), layers=layers)


def _stacked(scores: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Scores of several layers as one tensor, with an axis of layers before the heads."""
    if hasattr(scores, "items"):
        named = {re.fullmatch(r"blocks\.(\d+)\.attn\.hook_attn_scores", str(name)): x for name, x in scores.items()}
        by_layer = {int(found[1]): x for found, x in named.items() if found}
        if not by_layer:
            raise ValueError(
                "scores must be a tensor, a list of tensors, or a cache that holds hook_attn_scores, got one without: "
                'run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_attn_scores"))'
            )
    elif isinstance(scores, (list, tuple)) and scores:
        by_layer = dict(enumerate(scores))
    else:
        raise ValueError(f"scores must be a torch.Tensor, a list of them or a cache, got {type(scores).__name__}")
    each = [check_scores(by_layer[layer], f"scores of layer {layer}") for layer in sorted(by_layer)]
    shapes = {tuple(x.shape) for x in each}
    if len(shapes) > 1 or each[0].ndim < 3:
        raise ValueError(
            f"scores of several layers must have one shape (*batch, head, query, key), got {sorted(shapes)}"
        )
    return torch.stack([x.to(each[0].device) for x in each], -4), tuple(sorted(by_layer))


def fit_marginals(
    read: Marginals, cells: Cells, *, pool: bool = False, size: Float64[Tensor, "*batch"] | float = 0.0
) -> AdditiveFit:
    """Fit the scores that have these marginal sums.

    Args:
        size: of the terms that make up a score, where these are larger than the scores. Scores that vary by no more
            than its rounding do not vary.
    """
    weights, n_cells = cells.counts, cells.n_cells
    if pool:
        # One pivot for all texts: every sum and square is then about the same number.
        read = read.about(read.pivot.mean(0, keepdim=True).expand_as(read.pivot), cells)
        weights = pooled(cells, weights.expand_as(read.sums))
        n_cells = n_cells.expand_as(read.pivot).sum(0)
    sums = pooled(cells, read.sums) if pool else read.sums
    squares, pivot = (read.squares.sum(0), read.pivot[0]) if pool else (read.squares, read.pivot)

    solution = solve(cells, sums, pool=pool)
    offset, parts = fix_gauge(cells, weights, solution, pool=pool)

    # Variation about the mean of all cells: in total, explained by the model, and by each axis alone.
    mean = _axis_sums(cells, sums, pool=pool)[0] / n_cells
    total = squares - n_cells * mean**2
    centred = torch.addcmul(sums, weights, mean[..., None], value=-1)
    explained = sum(_axis_sums(cells, solution * centred, pool=pool))
    alone = _axis_sums(cells, torch.where(weights > 0, centred**2 / weights, 0.0), pool=pool)
    size = torch.as_tensor(size, dtype=mean.dtype, device=mean.device)
    size = (mean + pivot).abs().maximum(size.amax(0) if pool and size.ndim else size)
    constant = total <= n_cells * (ROUNDING * size) ** 2
    r2, *shares = (torch.where(constant, torch.nan, (x / total).clamp(0, 1)) for x in (explained, *alone))
    n_cells = n_cells.expand_as(r2)
    n_parameters = count_parameters(cells, len(sums) if pool else None).expand_as(r2)
    spare = n_cells - n_parameters  # residual degrees of freedom; without any, the model fits whatever there is
    r2 = torch.where(spare > 0, r2, torch.nan)
    return AdditiveFit(
        intercept=read.pivot + offset,
        distance=parts.distance[0] if pool else parts.distance,
        query=parts.query,
        key=parts.key,
        distances=cells.distances,
        r=r2.sqrt(),
        r2=r2,
        r2_adjusted=torch.where(spare > 0, 1 - (1 - r2) * (n_cells - 1) / spare, torch.nan),
        share_distance=shares[0],
        share_query=shares[1],
        share_key=shares[2],
        n_cells=n_cells.long(),
        n_parameters=n_parameters,
        cells=cells,
        pooled=pool,
    )


def _axis_sums(cells: Cells, stacked: Tensor, *, pool: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over distances, queries and keys; pooled texts have their own queries and keys, and the same distances."""
    d, q, k = (x.sum(-1) for x in cells.split(stacked))
    return (d[0], q.sum(0), k.sum(0)) if pool else (d, q, k)
