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
``untouched``       the scores                                    everything
=================== ============================================ ==============================================
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.additive.attention.fit import fit_attention
from tl_posdisent.additive.attention.result import AttentionFit
from tl_posdisent.additive.cells import cell_distances

Rung = Literal["uniform", "first_token", "distance", "distance+sink", "static", "additive", "untouched"]
RUNGS: tuple[Rung, ...] = get_args(Rung)
"""All rungs, lowest first."""

WITHOUT_FIT: tuple[Rung, ...] = ("uniform", "first_token", "untouched")
"""Rungs without parameters."""

PER_HEAD: tuple[Rung, ...] = ("distance", "distance+sink", "static")
"""Rungs whose coefficients belong to the head and not to the tokens of one text: they apply to other texts."""

_UNSEEN_LOGIT = (
    -1e4
)  # logit of keys other than the first; finite, so that queries that do not see the first attend uniformly


def fit_rung(
    rung: Rung,
    scores: Float[Tensor, "*texts head query key"],
    inside: Bool[Tensor, "*mask query key"],
    keys: Float[Tensor, "*texts key kv feature"] | None,
    *,
    pool: bool,
) -> AttentionFit:
    """Fit a rung (not the first two or the last); ``keys`` are needed for ``"static"``."""
    if rung == "additive":
        return fit_attention(scores, mask=inside, pool=pool)
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
) -> Float[Tensor, "*texts head query key"]:
    """Compute a rung's logits, fitted to the attention of each text separately; arbitrary outside the mask."""
    if rung == "untouched":
        return scores
    if rung == "uniform":
        return scores.new_zeros(()).expand(scores.shape)
    if rung == "first_token":
        seen = inside.any(-2, keepdim=True)
        return torch.where(seen & (seen.cumsum(-1) == 1), 0.0, _UNSEEN_LOGIT).to(scores).expand(scores.shape)
    return fit_rung(rung, scores, inside, keys, pool=False).logits()


def n_parameters(rung: Rung, inside: Bool[Tensor, "query key"], n_feature: int) -> int:
    """Count the parameters of a rung for one head and one text (for one head, if the rung is in ``PER_HEAD``)."""
    if rung in WITHOUT_FIT:
        return 0
    n_distance = len(cell_distances(inside.shape[0], inside.shape[1], inside.device)[inside].unique())
    counts: dict[Rung, int] = {
        "distance": n_distance,
        "distance+sink": n_distance + 1,
        "static": n_distance + 1 + n_feature,
        "additive": n_distance + int(inside.any(-2).sum()),
    }
    return counts[rung]
