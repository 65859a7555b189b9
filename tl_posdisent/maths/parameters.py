"""How many independent parameters the additive model has on a given set of cells.

3 coefficients a token explain something even of noise, so the adjusted R² needs the exact number: the rank of the
design, intercept included.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from .cells import AnyCells, Band, Cells

_NEGLIGIBLE = 1e-9  # an eigenvalue below this times the largest is a gauge direction


def count_parameters(cells: Cells, n_texts: int | None = None) -> Tensor:
    """Rank of the additive design, per mask; over all texts if they are pooled (``n_texts`` given).

    For a band it is the number of coefficients less three gauge directions (two constants and a straight line), but
    never more than the number of cells. An irregular mask can fall into pieces with gauges of their own, so there the
    rank is computed: first of queries and keys, then of what of the distances they cannot express.
    """
    n_d, n_q, n_k = cells.counts("cpu")
    texts = n_texts or 1
    if isinstance(cells, Band):
        coefficients = int((n_d > 0).sum()) + texts * int((n_q > 0).sum() + (n_k > 0).sum())
        return torch.tensor(min(coefficients - texts - 2, texts * int(n_q.sum())))
    two_way, rest = _two_way(cells)
    if n_texts is not None:
        repeats = n_texts if two_way.ndim == 0 else n_texts // two_way.shape[0]
        two_way, rest = two_way * repeats, rest * repeats
        if two_way.ndim:
            two_way, rest = two_way.sum(0), rest.sum(0)
    return two_way.cpu() + _rank(rest).cpu()


def _two_way(cells: AnyCells) -> tuple[Tensor, Float64[Tensor, "*mask distance distance"]]:
    """Rank of the query and key columns, and the distances' normal matrix after both are projected out."""
    _, n_q, n_k = cells.counts(cells.mask.device)
    n_d = cells.query_distance.sum(-2)
    per_query = torch.where(n_q > 0, 1 / n_q, 0.0)[..., None]
    keys = torch.diag_embed(n_k) - cells.query_key.mT @ (per_query * cells.query_key)
    mixed = cells.key_distance - cells.query_key.mT @ (per_query * cells.query_distance)
    values, vectors = torch.linalg.eigh(keys)
    kept = values > _NEGLIGIBLE * n_k.amax(-1, keepdim=True)
    seen = (vectors.mT @ mixed) * torch.where(kept, values, torch.inf).rsqrt()[..., None]
    rest = torch.diag_embed(n_d) - cells.query_distance.mT @ (per_query * cells.query_distance) - seen.mT @ seen
    return (n_q > 0).sum(-1) + kept.sum(-1), rest


def _rank(matrix: Float64[Tensor, "*mask n n"]) -> Tensor:
    values = torch.linalg.eigvalsh(matrix)
    scale = values.amax(-1, keepdim=True).clamp_min(1.0)  # counts: what is far below one cell is rounding
    return (values > _NEGLIGIBLE * scale).sum(-1)
