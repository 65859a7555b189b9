"""Rungs of the attention ladder: models of attention with ever more parameters, from uniform to a head's own attention.

Each rung replaces the attention logits, given the scores, the mask and features of the keys:

=================== ============================================ ==============================================
rung                logits                                        what an attention weight depends on
=================== ============================================ ==============================================
``uniform``         0                                             nothing
``first_token``     0 at the first token, else ``-∞``             whether the key is the first token
``distance``        ``d[i - j]``                                  the distance
``distance+sink``   ``d[i - j] + s · [j is first]``               the distance, and the first token
``static``          ``d[i - j] + s · [j is first] + u · x_j``     the distance, and features of the key
``additive``        ``d[i - j] + k[j]``                           the distance, and one parameter per key
``banded``          ``d[i - j] + k_b[j]``, b the band of i - j    the distance, and one parameter per key and band
``low-rank``        ``d[i - j] + k_b[j] + u_i · v_j``             also the query, by a term of low rank
``untouched``       the scores                                    everything
=================== ============================================ ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from scipy.optimize import minimize
from torch import Tensor

from tl_posdisent.additive.attention.fit import PSEUDO_COUNT, check_bands, fit_attention
from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.validation import check_integer

Rung = Literal[
    "uniform", "first_token", "distance", "distance+sink", "static", "additive", "banded", "low-rank", "untouched"
]
RUNGS: tuple[Rung, ...] = get_args(Rung)
"""All rungs, lowest first."""

WITHOUT_FIT: tuple[Rung, ...] = ("uniform", "first_token", "untouched")
"""Rungs without parameters."""

PER_HEAD: tuple[Rung, ...] = ("distance", "distance+sink", "static")
"""Rungs whose coefficients belong to the head and not to the tokens of one text: they apply to other texts."""

_NEVER = -1e4  # logit of keys other than the first; finite, so that queries that do not see the first attend uniformly


def check_rung_options(bands: Any, rank: Any) -> None:
    """Validate the bands of distances and the rank."""
    if not check_bands(bands):
        raise ArgumentError("bands", "must be distances in ascending order, at least one, got none")
    check_integer("rank", rank, 1)


def fit_rung(
    rung: Rung,
    scores: Float[Tensor, "*texts head query key"],
    inside: Bool[Tensor, "*mask query key"],
    keys: Float[Tensor, "*texts key kv feature"] | None,
    *,
    bands: Sequence[int],
    pool: bool,
) -> AttentionFit:
    """Fit a rung (not the first two or the last two); ``keys`` are needed for ``"static"``."""
    if rung in ("additive", "banded"):
        return fit_attention(scores, mask=inside, bands=bands if rung == "banded" else (), pool=pool)
    if rung != "static":
        keys = scores.new_zeros(*scores.shape[:-3], scores.shape[-1], 1, 0)
    assert keys is not None
    return fit_attention(scores, mask=inside, keys=seen_keys(keys, inside), sinks=int(rung != "distance"), pool=pool)


def seen_keys(
    keys: Float[Tensor, "*texts key kv feature"], inside: Bool[Tensor, "*mask query key"]
) -> Float[Tensor, "*texts key kv feature"]:
    """Set features to 0 at keys that no query sees: padding may hold any values."""
    seen = inside.any(-2)
    if seen.ndim > 1:  # masks for each text and head
        seen = seen.any(-2)
    return torch.where(seen[..., None, None], keys, 0.0)


def rung_logits(
    rung: Rung,
    scores: Float[Tensor, "*texts head query key"],
    inside: Bool[Tensor, "*mask query key"],
    keys: Float[Tensor, "*texts key kv feature"] | None,
    *,
    bands: Sequence[int],
    rank: int,
) -> Float[Tensor, "*texts head query key"]:
    """Compute a rung's logits, fitted to the attention of each text separately; arbitrary outside the mask."""
    if rung == "untouched":
        return scores
    if rung == "uniform":
        return torch.zeros_like(scores)
    if rung == "first_token":
        seen = inside.any(-2, keepdim=True)
        return torch.where(seen & (seen.cumsum(-1) == 1), 0.0, _NEVER).to(scores).expand(scores.shape)
    if rung != "low-rank":
        return fit_rung(rung, scores, inside, keys, bands=bands, pool=False).logits()
    logits = fit_rung("banded", scores, inside, keys, bands=bands, pool=False).logits()
    inside = inside.expand(scores.shape)
    pattern = scores.double().masked_fill(~inside, -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    # A pseudo-count of uniform attention, as in ``fit_attention``.
    pattern = torch.lerp(pattern, inside / inside.sum(-1, keepdim=True).clamp_min(1).double(), PSEUDO_COUNT)
    return logits + fit_query_term(pattern, logits, rank)


def n_parameters(
    rung: Rung, inside: Bool[Tensor, "query key"], n_feature: int, *, bands: Sequence[int], rank: int
) -> int:
    """Count the parameters of a rung for one head and one text (for one head, if the rung is in ``PER_HEAD``)."""
    if rung in WITHOUT_FIT:
        return 0
    d = cell_distances(inside.shape[0], inside.shape[1], inside.device)
    n_distance = len(d[inside].unique())
    band = torch.bucketize(d, d.new_tensor(bands), right=True)
    by_band = sum(int((inside & (band == b)).any(-2).sum()) for b in range(len(bands) + 1))
    n_query, n_key = int(inside.any(-1).sum()), int(inside.any(-2).sum())
    counts: dict[Rung, int] = {
        "distance": n_distance,
        "distance+sink": n_distance + 1,
        "static": n_distance + 1 + n_feature,
        "additive": n_distance + n_key,
        "banded": n_distance + by_band,
        "low-rank": n_distance + by_band + rank * (n_query + n_key),
    }
    return counts[rung]


_STEPS = 200
_PAIRS = 20  # steps that L-BFGS keeps; with its default, 10, it ends at a divergence up to 1 % higher
_PENALTY = 1e-4  # nats per unit of u² or v²; without it, u or v is arbitrary where a query sees one key or a key gets 0

Matrix = Float64[Tensor, "query key"]


@own_sums()
def fit_query_term(
    pattern: Float64[Tensor, "*batch query key"], logits: Float64[Tensor, "*batch query key"], rank: int
) -> Float64[Tensor, "*batch query key"]:
    """Fit a term ``u_i · v_j`` of this rank, added to ``logits``, to a pattern; 0 outside the mask.

    The divergence is convex in ``u`` for given ``v`` and in ``v`` for given ``u``, but not in both, so the result is a
    local optimum. The search (L-BFGS) begins at the leading singular vectors of the residual ``P - Q`` of the additive
    pattern: the direction in which the divergence falls most steeply.

    Args:
        pattern: attention, 0 outside the mask and positive inside it (else ``u`` and ``v`` may have no finite optimum).
        logits: logits of additive attention, ``-inf`` outside the mask.
        rank: number of components of ``u_i`` and ``v_j``.
    """
    ps, bases = (x.reshape(-1, *x.shape[-2:]) for x in (pattern, logits))
    terms = [_fit_one(p, base, rank) for p, base in zip(ps, bases, strict=True)]  # independent of the batch
    return torch.stack(terms).reshape(logits.shape)


def _fit_one(p: Matrix, base: Matrix, rank: int) -> Matrix:
    rows = (base > -torch.inf).any(-1)
    p, base = p[rows], base[rows]
    u, s, v = torch.linalg.svd(p - base.softmax(-1), full_matrices=False)
    size = s[:rank].sqrt()
    start = torch.cat([u[:, :rank] * size, v[:rank].mT * size])

    def factors(x: np.ndarray) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(x).to(p.device).view_as(start)
        return both[: len(u)], both[len(u) :]

    def divergence(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradients = _value_and_gradients(p, base, *factors(x))
        return float(value), torch.cat(gradients).flatten().cpu().numpy()

    options = {"maxiter": _STEPS, "maxcor": _PAIRS, "gtol": 1e-5, "ftol": 1e-10}
    found = minimize(divergence, start.flatten().cpu().numpy(), jac=True, method="L-BFGS-B", options=options)
    of_queries, of_keys = factors(found.x)
    term = p.new_zeros(len(rows), p.shape[-1])
    term[rows] = torch.where(base > -torch.inf, of_queries @ of_keys.mT, 0.0)
    return term


def _value_and_gradients(p: Matrix, base: Matrix, u: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute the divergence (up to a constant) with the penalty, and its gradient.

    The gradient is in closed form, because a model may run where torch records no gradients.
    """
    # One exponential of each cell, in place: passes over all cells dominate the time of the fit.
    left = torch.addmm(base, u, v.mT)
    shift = left.amax(-1, keepdim=True)
    z = left.sub_(shift).exp_().sum(-1, keepdim=True)
    of_u, of_v = p @ v, p.mT @ u
    penalty = _PENALTY / 2 * (u.square().sum() + v.square().sum())
    value = (z.log() + shift).sum() - (u * of_u).sum() + penalty
    return value, (left @ v / z - of_u + _PENALTY * u, left.mT @ (u / z) - of_v + _PENALTY * v)
