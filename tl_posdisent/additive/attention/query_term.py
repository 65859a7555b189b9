"""A low-rank term of query and key, ``u_i · v_j``, beside additive attention.

With the additive part held fixed, ``Σ_i KL(P_i ‖ softmax_j(logits[i, j] + u_i · v_j))`` is convex in ``u`` for given
``v`` and in ``v`` for given ``u``, but not in both: what is found is a local optimum. The search (L-BFGS) begins at the
leading singular vectors of what the additive part leaves of the pattern, ``P - Q``: the direction in which the
divergence falls most steeply.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tl_posdisent.utils.own_sums import own_sums

_STEPS = 100
_PENALTY = 1e-4  # nats for a unit of u² or v²: where a query sees one key, or a key gets nothing, all else is arbitrary

Cells = Float64[Tensor, "query key"]


@own_sums()
def fit_query_term(
    pattern: Float64[Tensor, "*batch query key"], logits: Float64[Tensor, "*batch query key"], rank: int
) -> Float64[Tensor, "*batch query key"]:
    """The term ``u_i · v_j`` of this rank that brings ``softmax(logits)`` near to a pattern; 0 outside the mask.

    Args:
        pattern: attention, 0 outside the mask; positive inside it, or ``u`` and ``v`` may have no finite optimum.
        logits: of additive attention, ``-inf`` outside the mask.
        rank: number of components of ``u_i`` and ``v_j``.
    """
    ps, bases = (x.reshape(-1, *x.shape[-2:]) for x in (pattern, logits))
    terms = [_fit_one(p, base, rank) for p, base in zip(ps, bases, strict=True)]  # each as it would be alone
    return torch.stack(terms).reshape(logits.shape)


def _fit_one(p: Cells, base: Cells, rank: int) -> Cells:
    inside = base > -torch.inf
    rows = inside.any(-1)
    p, base, inside = p[rows], base[rows], inside[rows]
    u, s, v = torch.linalg.svd(p - base.softmax(-1), full_matrices=False)
    size = s[:rank].sqrt()
    factors = [(u[:, :rank] * size).contiguous(), (v[:rank].mT * size).contiguous()]
    search = torch.optim.LBFGS(
        factors, max_iter=_STEPS, tolerance_grad=1e-5, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def divergence() -> Tensor:
        value, gradients = _value_and_gradients(p, base, inside, *factors)
        for factor, gradient in zip(factors, gradients, strict=True):
            factor.grad = gradient
        return value

    before = divergence()
    start = [factor.clone() for factor in factors]
    search.step(divergence)
    if not bool(divergence() <= before):
        factors = start
    term = p.new_zeros(len(rows), p.shape[-1])
    term[rows] = torch.where(inside, factors[0] @ factors[1].mT, 0.0)
    return term


def _value_and_gradients(
    p: Cells, base: Cells, inside: Bool[Tensor, "query key"], u: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The divergence less the entropy of the pattern, which is constant, with the penalty; in closed form, as a model
    may run where torch records no gradients."""
    logits = torch.addmm(base, u, v.mT)
    linear = (p * torch.where(inside, logits, 0.0)).sum()
    # One exponential of each cell, in place: these passes are the time of the whole fit.
    shift = logits.amax(-1, keepdim=True)
    left = logits.sub_(shift).exp_()
    z = left.sum(-1, keepdim=True)
    value = (z.log() + shift).sum() - linear
    left.div_(z).sub_(p)
    penalty = _PENALTY / 2 * (u.square().sum() + v.square().sum())
    return value + penalty, (left @ v + _PENALTY * u, left.mT @ u + _PENALTY * v)
