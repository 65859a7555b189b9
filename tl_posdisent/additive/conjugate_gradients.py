"""Preconditioned conjugate gradients for a batch of singular but consistent systems."""

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
    """Solve ``product(x) = target`` until the residual of every system is small, or limited by rounding.

    Args:
        product, precondition: multiplication by a positive semidefinite matrix, and by an approximation of its inverse.
        dot: inner product for each system (the leading axes of ``target``), which keeps the last axis.
        goal: squared norm of the residual, in the norm of ``precondition``, at which a system is solved.
        most: the maximum number of products.
        allowed: bounds on the entries of the residual; a system is also solved if all its entries are within them.

    Returns:
        The solution, and whether each system is solved.
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
        # A solved system is not changed further while others continue: its residual is rounding, some of it in
        # directions of the null space, where a step can be arbitrarily long.
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
