"""The arithmetic of the package's own sums, whatever modes of torch the caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_dtypes() -> list[torch.dtype]:
    """Those to which products are now rounded, by the caller's autocast."""
    return [torch.get_autocast_dtype(kind) for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Leave products in the dtypes of their factors, which the caller's autocast would round to bfloat16."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def own_sums() -> Iterator[None]:
    """Neither gradients nor autocast. A context, or a decorator of functions that run no model."""
    with torch.no_grad(), no_autocast():
        yield


@contextlib.contextmanager
def with_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Record gradients, also within the caller's ``no_grad`` or ``inference_mode``."""
    if any(x.is_inference() for x in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "model must be made outside torch.inference_mode(), whose tensors never record gradients: load it outside"
        )
    with torch.inference_mode(False), torch.enable_grad():
        yield
