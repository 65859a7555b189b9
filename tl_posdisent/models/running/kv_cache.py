"""KV caches: pass one to a model, find out whether attention keeps its keys, and what a running pass was given.

The attention of some bridges attends only to the new tokens, without an error, so that every cached pass starts a new
text: that of MPT in TransformerLens 3, and that of every architecture with transformers 5.24, which renamed the
argument of the cache.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.running.forward_pass import UNSUPPORTED, Pass
from tl_posdisent.utils.errors import ArgumentError

WITHOUT_CACHE = "run the model on whole texts, without a KV cache (generate with use_past_kv_cache=False)"


def empty_cache(model: Any, tokens: Tensor) -> dict[str, Any]:
    """Make an empty KV cache, as an argument of the model's forward pass."""
    if hasattr(getattr(model, "original_model", None), "config"):
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        cache = DynamicCache(config=model.original_model.config)
        if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            cache = DynamicCache()  # keeps all keys, also outside a sliding window; hybrids keep other states
        return {"use_cache": True, "past_key_values": cache}
    if "past_kv_cache" in inspect.signature(model.forward).parameters:
        try:
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache
        except ImportError:  # TransformerLens 2
            from transformer_lens import HookedTransformerKeyValueCache as Cache

        return {"past_kv_cache": Cache.init_cache(model.cfg, tokens.device, len(tokens))}
    of = getattr(model, "original_model", model)
    raise ArgumentError("model", f"must take a cache of keys and values, got {type(of).__name__}: {WITHOUT_CACHE}")


def with_mask(cache: dict[str, Any], part: Int[Tensor, "batch pos"]) -> dict[str, Any]:
    """Add a mask to a pass over an unpadded part of a text; without one, HookedTransformer would need a tokenizer."""
    return cache | {"attention_mask": torch.ones_like(part)} if "past_kv_cache" in cache else cache


# --- attention that loses its cache -----------------------------------------------------------------------------------


def lost_cache(p: Pass, tokens: Int[Tensor, "batch pos"]) -> str | None:
    """Fill a KV cache in one pass; return why runs with a cache must be refused, or None if all layers keep their keys.

    A model that raises an error when it is given a cache needs no refusal.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    config = getattr(getattr(p.model, "original_model", None), "config", None)
    if config is None:  # HookedTransformer's attention fills its own cache
        return None
    try:
        cache = DynamicCache(config=config)  # which lists the layers that should keep keys
        p.run(tokens, use_cache=True, past_key_values=cache)
    except UNSUPPORTED:
        return None
    for layer, kept in enumerate(cache.layers):
        if isinstance(kept, DynamicLayer) and int(kept.get_seq_length()) == 0:  # others keep states without keys
            return (
                f"the attention of layer {layer} does not keep its keys in the KV cache that this run asks for, so "
                f"later tokens would not see the earlier ones ({library_versions()}; TransformerLens up to 4.3 needs "
                f'transformers before 5.24): install "transformers<5.24", or {WITHOUT_CACHE}'
            )
    return None


def library_versions() -> str:
    return f"TransformerLens {version('transformer-lens')}, transformers {version('transformers')}"


# --- a running pass ---------------------------------------------------------------------------------------------------


class RunningPass(NamedTuple):
    """Arguments of the running forward pass, read from the call stack.

    Attributes:
        cache: the cache that it was given, one of transformers or of a HookedTransformer; None if it was given none.
        continues: whether the caller asked for a KV cache, so that another pass may continue its text.
        nested: whether the model runs within another pass of its own, in a hook.
    """

    cache: Any | None
    continues: bool
    nested: bool

    def start(self, layer: int) -> int:
        """Return the number of tokens in the cache, before the layer adds its own."""
        if self.cache is None:
            return 0
        if hasattr(self.cache, "get_seq_length"):
            return int(self.cache.get_seq_length(layer))
        return int(self.cache[layer].past_keys.shape[1])


def running_pass() -> RunningPass:
    """Look up the pass in which a hook is called, once for each pass.

    A hook function receives a tensor and a hook point, but not the arguments of the pass, so these are read from the
    call stack. transformers makes a cache in every pass; the caller asked for it by passing one, by ``use_cache=True``
    or by ``return_type="logits_and_cache"``.
    """
    from transformers import Cache, PreTrainedModel

    cache, asked, nested, frame = None, False, False, inspect.currentframe()
    models: set[tuple[int, Any]] = set()
    while frame is not None and not nested:
        if frame.f_code.co_name == "forward":
            given = frame.f_locals
            more = given.get("kwargs")  # a dictionary, unless it is a forward of the caller's own
            values = [*given.values(), *(more.values() if isinstance(more, dict) else ())]
            caches = [x for x in values if isinstance(x, Cache)]
            if cache is None and caches:
                cache = caches[0]
            module = given.get("self")
            if isinstance(module, PreTrainedModel):  # the outermost one is seen last
                asked = bool(caches) or given.get("use_cache") is True
            if isinstance(module, PreTrainedModel) or hasattr(type(module), "run_with_hooks"):
                nested = (id(module), frame.f_code) in models  # a subclass may call the forward of its base
                models.add((id(module), frame.f_code))
            if given.get("past_kv_cache") is not None:  # a HookedTransformer's
                cache, asked = given["past_kv_cache"], True
            asked = asked or given.get("return_type") == "logits_and_cache"
        frame = frame.f_back
    return RunningPass(cache, asked, nested)
