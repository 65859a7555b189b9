"""Reading a rotation off a model's table of cosines and sines."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from .rotary import Pairing, Rotary


def rotary_from_table(
    cos: Float[Tensor, "pos columns"], sin: Float[Tensor, "pos columns"], *, pairing: Pairing = "half"
) -> Rotary:
    """Read frequencies and attention factor off a model's table of cosines and sines for positions 0, 1, 2 ….

    The table may have one column per subspace, or two of them in either order (``c0 c1 c0 c1`` or ``c0 c0 c1 c1``).
    The first row after 0 gives each angle up to the rounding of the table; doubling the position again and again
    halves that error without ever losing count of the turns, so long tables give frequencies to float32 precision.

    Args:
        cos, sin: ``[pos, columns]``, as the model multiplies them.
        pairing: kept in the result; no table can tell it.

    Returns:
        A ``Rotary`` whose angles are rounded to float32, as models round them.

    Raises:
        ValueError: fewer than two rows, or rows that are not the cosines and sines of growing angles.

    Example:
        >>> import torch
        >>> from tl_posdisent import rotary_from_table
        >>> angle = torch.arange(64.0)[:, None] * torch.tensor([1.0, 0.1])
        >>> rotary_from_table(1.5 * angle.cos(), 1.5 * angle.sin()).frequencies.tolist()
        [1.0..., 0.1...]
    """
    for name, x in (("cos", cos), ("sin", sin)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating point torch.Tensor, got {what}")
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] < 2:
        raise ValueError(
            "cos and sin must have the same shape (pos, columns) with at least two positions, got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    cos, sin = (_one_column_each(x.double()) for x in (cos, sin))
    radius = torch.hypot(cos, sin)
    measured = torch.atan2(sin, cos)
    theta, position = measured[1].clone(), 2
    while position < cos.shape[0]:
        theta = theta + _wrapped(measured[position] - theta * position) / position
        position *= 2
    error = _wrapped(measured - torch.arange(len(cos), device=cos.device)[:, None].double() * theta).abs()
    if cos.shape[1] and not (float(error.max()) < 0.05 and float((radius / radius.mean() - 1).abs().max()) < 0.05):
        raise ValueError("cos and sin are not a rotary table: its angles do not grow linearly with the position")
    factor = float(radius.mean()) if radius.numel() else 1.0
    factor = 1.0 if abs(factor - 1) < 1e-2 * torch.finfo(torch.bfloat16).eps else factor
    return Rotary(theta, pairing, factor, angle_dtype=torch.float32)


def _one_column_each(table: Float64[Tensor, "pos columns"]) -> Float64[Tensor, "pos subspace"]:
    n = table.shape[1]
    if n % 2 == 0 and n > 0:
        if torch.equal(table[:, : n // 2], table[:, n // 2 :]):
            return table[:, : n // 2]
        if torch.equal(table[:, ::2], table[:, 1::2]):
            return table[:, ::2]
    return table


def _wrapped(angle: Tensor) -> Tensor:
    return torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
