"""Attention that loses its KV cache, as in bridges with transformers 5.24, whichever versions are installed.

Each fault is a forward pre-hook of torch on an attention module, and returns its handle.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache


def lost(attention: Any) -> Any:
    """Attention is called without a cache."""

    def without(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: x for name, x in kwargs.items() if not isinstance(x, Cache)}

    return attention.register_forward_pre_hook(without, with_kwargs=True)


def renamed(attention: Any) -> Any:
    """Attention is called with its cache under the name of transformers 5.24."""

    def rename(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {"cache" if isinstance(x, Cache) else name: x for name, x in kwargs.items()}

    return attention.register_forward_pre_hook(rename, with_kwargs=True)
