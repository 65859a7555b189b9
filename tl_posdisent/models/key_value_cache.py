"""Empty caches of keys and values, for running a text in parts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def empty_cache(model: Any, tokens: Tensor) -> dict[str, Any]:
    """An empty cache of keys and values, as an argument of the model's forward pass."""
    if hasattr(model, "original_model"):
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        cache = DynamicCache(config=model.original_model.config)
        if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            cache = DynamicCache()  # of all keys, also behind a sliding window; hybrids keep other states
        return {"use_cache": True, "past_key_values": cache}
    if "past_kv_cache" in inspect.signature(model.forward).parameters:
        try:
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache
        except ImportError:  # TransformerLens 2
            from transformer_lens import HookedTransformerKeyValueCache as Cache

        return {"past_kv_cache": Cache.init_cache(model.cfg, tokens.device, len(tokens))}
    raise ValueError(f"model must take a cache of keys and values, got {type(model).__name__}")


def with_mask(cache: dict[str, Any], part: Int[Tensor, "batch pos"]) -> dict[str, Any]:
    """Arguments of the pass over a part of a text without padding: HookedTransformer would ask a tokenizer for it."""
    return cache | {"attention_mask": torch.ones_like(part)} if "past_kv_cache" in cache else cache
