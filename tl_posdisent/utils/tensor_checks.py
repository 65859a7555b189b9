"""Validate tensors, and numbers that become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

Numbers = Sequence[int | float] | Tensor  # also a range


def described(x: Any) -> str:
    """Describe the dtype and shape of a tensor, or the type of anything else, for errors."""
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def check_floating(name: str, x: Any) -> Tensor:
    """Return ``x``, or raise unless it is a floating point tensor."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise ArgumentError(name, f"must be a floating point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    return x


def real_tensor(name: str, values: Any, *, finite: bool = True) -> Float64[Tensor, "*shape"]:
    """Return a user's numbers of any shape as a float64 tensor without gradients, or raise.

    >>> real_tensor("target", [1, None])
    Traceback (most recent call last):
    tl_posdisent.utils.errors.ArgumentError: target must be finite real numbers, integers below 2**63, got [1, None]
    """
    dtype = f" of {values.dtype}" if hasattr(values, "dtype") else ""
    kind = "finite real" if finite else "real"
    wrong = ArgumentError(name, f"must be {kind} numbers, integers below 2**63, got {shown(values)}{dtype}")
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:  # words, tables of unequal rows, None
        raise wrong from error
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise wrong
    if not isinstance(values, Tensor):  # torch makes Python's numbers float32 unless it is told otherwise
        tensor = torch.as_tensor(values, dtype=torch.float64)
    if finite and not bool(tensor.isfinite().all()):
        raise wrong
    return tensor.detach().double()


def real_numbers(name: str, values: Any, device: torch.device) -> Float64[Tensor, " number"]:
    """Return a user's numbers as a float64 tensor with one axis, at least one of them, or raise."""
    x = real_tensor(name, values)
    if x.ndim != 1 or len(x) == 0:
        raise ArgumentError(name, f"must be one-dimensional and not empty, got shape {tuple(x.shape)}")
    return x.to(device)


def refuse_nan(what: str, x: Tensor) -> None:
    """Raise for what a model computed with NaN or inf, the reason for whatever else is wrong with it; -inf is a mask.

    >>> refuse_nan("scores of layer 2", torch.tensor([0.0, torch.nan]))
    Traceback (most recent call last):
    ValueError: scores of layer 2 contain NaN or inf: the model's weights or its activations do. Check the weights; ...
    """
    if bool((x.isnan() | x.isposinf()).any()):
        raise ValueError(
            f"{what} contain NaN or inf: the model's weights or its activations do. Check the weights; if they are in "
            "float16, load them in bfloat16 or float32"
        )
