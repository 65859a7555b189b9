"""Tensors in nested tuples, lists and dictionaries: a faster ``tree_map``, for tests that intercept millions of
operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def tensors(x: Any) -> Iterator[Tensor]:
    """Yield all tensors, from left to right."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from tensors(part)
    elif isinstance(x, dict):
        yield from tensors(list(x.values()))


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to every leaf."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([mapped(change, part) for part in x])
    if kind is dict:
        return {name: mapped(change, part) for name, part in x.items()}
    return tree_map(change, x) if isinstance(x, (tuple, list, dict)) else change(x)
