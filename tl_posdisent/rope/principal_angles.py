"""The principal angles between two subspaces."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from scipy.linalg import orth, subspace_angles
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_devices, check_values, described


def principal_angles(a: Float[Tensor, "d m"], b: Float[Tensor, "d n"]) -> Float64[Tensor, " angle"]:
    """Compute the principal angles between two subspaces, each spanned by the columns of a matrix.

    They are those of ``scipy.linalg.subspace_angles``: to all digits if no angle is above 45°, else to about 1e-8.
    Columns that depend on others, within the precision of their dtype, add no direction.

    Args:
        a, b: ``[d, m]`` and ``[d, n]``. The columns need not be orthogonal or independent.

    Returns:
        As many angles as the smaller of the two ranks, in radians from 0 to π/2, in descending order; float64.

    Raises:
        ValueError: arguments that are not floating point matrices with the same number of rows; columns that are not
            finite, or all 0.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import principal_angles
        >>> x, y, z = torch.eye(3)
        >>> principal_angles(torch.stack([x, y], 1), torch.stack([x, y + z], 1)).rad2deg().round().tolist()
        [45.0, 0.0]
    """
    for name, x in (("a", a), ("b", b)):
        check_values(name, x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 2 or x.shape[0] != a.shape[0]:
            raise ArgumentError(
                name, f"must be floating point of shape (d, columns), with the same d for both, got {described(x)}"
            )
        if not bool(x.isfinite().all()) or not bool((x != 0).any()):
            raise ArgumentError(name, "must be finite and not all 0")
    check_devices(a=a, b=b)
    bases = []
    for x in (a, b):
        precision = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float64).eps)
        bases.append(orth(x.detach().double().cpu().numpy(), rcond=precision * max(x.shape)))
    return torch.from_numpy(subspace_angles(*bases)).to(a.device)
