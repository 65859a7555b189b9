"""Where, what and neither: the parts of a head's contribution, with errors over texts.

A head is run under two factors, distances kept or not and content kept or not: uniform attention keeps the share u of
its contribution, distances alone p, content alone c, its own attention all of it. The Shapley values of this two-by-two
experiment divide the contribution without remainder::

    where = ½ [(p - u) + (1 - c)]        what = ½ [(c - u) + (1 - p)]        neither = u

so that ``where - what = p - c``; ``joint = 1 - p - c + u`` is above 0 where the two are needed together, and below 0
where either serves. A replacement that does harm keeps nothing, and p and c are at least u, because uniform attention
depends on neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.experiments.where_what.replacements import CONSTANTS, DISTANCE, GATE, MEAN, UNIFORM, content_alone
from tl_posdisent.utils.statistics import jackknife

PARTS: Final = ("where_part", "what_part", "neither_part")
KEPT: Final = {"kept_distance": DISTANCE, "kept_uniform": UNIFORM, "gate": GATE}
"""Shares of the contribution that survive, and the replacement under which they do; ``kept_content`` has several."""
_INTERVAL: Final = 2.0  # standard errors

Values = dict[str, Float64[Tensor, "left_out head"]]
"""Quantities of each head: of all texts, then without each of the texts."""


def kept_shares(
    divergences: Mapping[str, Float64[Tensor, "text head"]], n_predictions: Float64[Tensor, " text"]
) -> Values:
    """Compute the contribution of each head, and the shares of it that survive each replacement, unclipped.

    With K the mean divergence over the predictions of all texts, a share is ``1 - K_replaced / K_contribution``. The
    constant distance behind ``kept_content`` is that of the smallest divergence in the *other* texts, for each text:
    chosen in the same text, the smallest of several would be too small by chance.

    Args:
        divergences: nats per prediction of each text, under each of the ``replacements``.
    """
    n_texts = len(n_predictions)
    weights = torch.cat([torch.ones(1, n_texts), 1 - torch.eye(n_texts)]).double() * n_predictions
    weights = weights / weights.sum(1, keepdim=True)
    contribution = weights @ divergences[MEAN]
    lost = {name: weights @ divergences[replacement] for name, replacement in KEPT.items()}
    lost["kept_content"] = weights @ _best_of_others(divergences, n_predictions)
    return {"contribution": contribution} | {name: 1 - x / contribution for name, x in lost.items()}


def content_distances(
    divergences: Mapping[str, Float64[Tensor, "text head"]], n_predictions: Float64[Tensor, " text"]
) -> list[int]:
    """Return the distance of all other keys under which each head keeps most, of ``CONSTANTS``."""
    sums = torch.einsum("t,cth->ch", n_predictions, _contents(divergences))
    return [CONSTANTS[n] for n in sums.argmin(0).tolist()]


def _best_of_others(
    divergences: Mapping[str, Float64[Tensor, "text head"]], n_predictions: Float64[Tensor, " text"]
) -> Float64[Tensor, "text head"]:
    """Return the divergences under content alone, of each text at the constant that is best in the others."""
    contents = _contents(divergences)
    weighted = n_predictions[:, None] * contents
    best = (weighted.sum(1, keepdim=True) - weighted).argmin(0)
    return contents.gather(0, best[None])[0]


def _contents(divergences: Mapping[str, Float64[Tensor, "text head"]]) -> Float64[Tensor, "constant text head"]:
    return torch.stack([divergences[content_alone(constant)] for constant in CONSTANTS])


def divide(kept: Values, n_predictions: Float64[Tensor, " text"]) -> Values:
    """Divide contributions into ``where_part``, ``what_part`` and ``neither_part``, with ``joint`` and ``difference``.

    Args:
        kept: what ``kept_shares`` returns.
    """
    uniform = _clipped(kept["kept_uniform"], n_predictions)
    distance, content = (
        torch.maximum(_clipped(kept[name], n_predictions), uniform) for name in ("kept_distance", "kept_content")
    )
    return {
        "where_part": (distance - uniform + 1 - content) / 2,
        "what_part": (content - uniform + 1 - distance) / 2,
        "neither_part": uniform,
        "joint": 1 - distance - content + uniform,
        "difference": distance - content,
    }


def _clipped(share: Float64[Tensor, "left_out head"], n_predictions: Tensor) -> Float64[Tensor, "left_out head"]:
    """Clip a share to [0, 1]; one below 0 differs without a text by as much less as its interval has of [0, 1].

    Clipped as well, estimates without a text would be 0 for a share that is just below 0, and have no error, although
    in other texts it may be above. Not clipped, it would have the error of the harm that the replacement does.
    """
    value, error = jackknife(share, n_predictions)
    above = (value + _INTERVAL * error).clamp(0, 1)
    of_interval = torch.where((value < 0) & (error > 0), above / (_INTERVAL * error), 1.0)
    return value.clamp(0, 1) + of_interval * (share - value)
