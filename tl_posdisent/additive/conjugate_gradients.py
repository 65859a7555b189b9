"""Preconditioned conjugate gradients for many singular but consistent systems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    goal: Tensor,
    *,
    most: int,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve ``product(x) = target`` until the residual of every system is small, or rounding has taken over.

    Args:
        product, precondition: multiplication by a positive semidefinite matrix, and by about its inverse.
        dot: inner product of each system (a leading axis of ``target``), which keeps the last axis.
        goal: the squared norm (of ``precondition``) that a residual should come to, in at most ``most`` products.
        allowed: a residual whose entries are all at most these is small enough, too.

    Returns:
        The solution, and for which systems it is one.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction = precondition(residual)
    rho = least = dot(residual, direction)
    solved = rho <= goal
    active = ~solved
    for _ in range(most):
        if not bool(active.any()):
            break
        image = product(direction)
        curvature = dot(direction, image)
        # A solved system stands still while others go on: what is left of its residual is rounding, part of it in
        # directions that change nothing, where a step has no bound.
        active = active & (curvature > 0)
        alpha = torch.where(active, rho / curvature, 0.0)
        solution.addcmul_(alpha, direction)
        residual.addcmul_(alpha, image, value=-1)
        z = precondition(residual)
        new = dot(residual, z)
        least = least.minimum(new)
        enough = new <= goal
        if allowed is not None:
            enough = enough | (residual.abs() <= allowed).all(-1, keepdim=True)
        solved = solved | (active & enough)
        active = active & ~enough & (new <= 1e6 * least)
        direction = torch.addcmul(z, torch.where(active, new / rho, 0.0), direction)
        rho = new
    return solution, solved
