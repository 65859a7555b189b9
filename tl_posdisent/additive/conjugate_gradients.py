"""Preconditioned conjugate gradients for many systems at once, without a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    dot: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    aim: Callable[[Tensor], Tensor],
    *,
    most: int,
    allowed: Tensor | None = None,
    look: int = 1,
) -> tuple[Tensor, Tensor, int]:
    """Solve ``product(x) = target`` until the residual of every system is small, or rounding has taken over.

    Args:
        product, precondition: multiplication by a positive semidefinite matrix, and by about its inverse.
        dot: inner product of each system, which keeps the last axis.
        target: right-hand side; leading axes are systems.
        aim: the squared norm that a residual should come to, for that of the target.
        most: products.
        allowed: a residual whose entries are all at most these is small enough, too.
        look: after how many products to look whether all are solved, which costs a synchronisation on a GPU.

    Returns:
        The solution, for which systems it is one, and the number of products.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction = precondition(residual)
    rho = least = dot(residual, direction)
    goal = aim(rho)
    solved = rho <= goal
    active = ~solved
    n = 0
    while n < most and (n % look or bool(active.any())):
        n += 1
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
    return solution, solved, n
