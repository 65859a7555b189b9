"""Tolerances that follow from the precision of a computation, not from the results of one processor.

Another processor, another number of threads or another library adds in another order, so two float32 results of one
quantity differ by as much as each differs from float64. The tolerance is `TIMES` that error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

TIMES = 10


def rounding(x: Tensor | float, steps: float = 1, dtype: torch.dtype = torch.float32) -> float:
    """`TIMES` as much as `steps` roundings to `dtype` change the largest number of `x`: a bound without a reference."""
    return TIMES * steps * torch.finfo(dtype).eps * _largest(torch.as_tensor(x))


def of_float32(single: Tensor, double: Tensor) -> float:
    """`TIMES` the error of an unedited model in float32; no less than `rounding`, as the error may be small by luck."""
    return max(TIMES * _largest(single.double() - double), rounding(double))


def of_rounded_weights(model: nn.Module, compute: Callable[[], Tensor], draws: int = 3) -> float:
    """`TIMES` the most by which `compute()` changes when float64 weights are rounded at random, as if to float32.

    An edit may amplify rounding: a small vector is divided by its norm. Then the error of the unedited model says
    little, and that of one computation in float32 is small by luck on some processors. This number is the same on all.
    """
    expected, weights = compute(), {name: x.clone() for name, x in model.state_dict().items()}
    generator, eps = torch.Generator().manual_seed(0), torch.finfo(torch.float32).eps
    largest = 0.0
    for _ in range(draws):
        with torch.no_grad():
            for name, x in model.named_parameters():
                noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
                x.copy_(weights[name] * (1 + eps * noise))  # what is computed from it is rounded too
        largest = max(largest, _largest(compute() - expected))
    model.load_state_dict(weights)
    return max(TIMES * largest, rounding(expected))


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().nan_to_num(0, 0, 0).max())
