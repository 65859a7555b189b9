"""KV caches: pass one to a model, check that attention keeps keys in it, and adapt bridges that lose it.

transformers 5.24 renamed the argument with which a decoder layer passes its cache to attention. The attention of a
TransformerBridge (TransformerLens 3.4 to 4.3) looks for the old names, does not find them, and attends only to the new
tokens, without an error: every cached pass then starts a new text.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.models.running.forward_pass import UNSUPPORTED, alter_arguments, output_of, removing, running
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch
from tl_posdisent.utils.restoring import without_gradients

WITHOUT_CACHE = "run the model on whole texts, without a KV cache (generate with use_past_kv_cache=False)"

_PROMPT, _TEXT = 4, 6  # number of tokens in the test of a cache: in the first pass, and in total


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


def cache_of(model: Any, part: Int[Tensor, "batch pos"]) -> dict[str, Any]:
    """Compute keys and values of the beginning of texts, as an argument of a pass over the rest.

    Raises:
        ValueError: a model that does not accept a cache, or has a layer that keeps nothing in it.
    """
    cache = empty_cache(model, part)
    with without_gradients():
        output_of(model, part, **with_mask(cache, part))
    if lost := layers_without_keys(cache):
        raise ValueError(lost_keys(lost[0]))
    return cache


def of_rows(cache: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Copy such a cache for a batch of some of its texts; raise unless it is a transformers cache."""
    some = copy.deepcopy(cache)
    some["past_key_values"].batch_select_indices(rows)
    return some


# --- bridges whose attention loses the cache --------------------------------------------------------------------------


def library_versions() -> str:
    return f"TransformerLens {version('transformer-lens')}, transformers {version('transformers')}"


def lost_keys(layer: int) -> str:
    """Return the error message for a layer that loses its KV cache: the reason, and what to do."""
    return (
        f"the attention of layer {layer} does not keep its keys in the KV cache that this run asks for, so later "
        f"tokens would not see the earlier ones ({library_versions()}; TransformerLens up to 4.3 needs transformers "
        'before 5.24): install "transformers<5.24", or load the model with load_model or bridge_from_hf, which adapt '
        f"it, or {WITHOUT_CACHE}"
    )


def layers_without_keys(cache: dict[str, Any]) -> list[int]:
    """List the layers whose attention kept no keys in a transformers cache that a pass should have filled."""
    if "past_key_values" not in cache:  # HookedTransformer's own, which its attention fills itself
        return []
    held = dict(_key_layers(cache["past_key_values"]))
    return [layer for layer, n_tokens in held.items() if n_tokens == 0] if held else [0]


def _key_layers(cache: Any) -> Iterator[tuple[int, int]]:
    """Yield index and number of tokens of each layer of a transformers cache that holds keys (no linear attention)."""
    from transformers.cache_utils import DynamicLayer, StaticLayer

    for index, layer in enumerate(getattr(cache, "layers", ())):
        if isinstance(layer, (DynamicLayer, StaticLayer)):
            yield index, int(layer.get_seq_length())


def keep_cache(bridge: Any, tokens: Int[Tensor, "batch pos"]) -> None:
    """Adapt a bridge whose attention loses its KV cache: pass the cache under the name that attention looks for.

    Do nothing if attention keeps its keys. The adapter is a torch forward pre-hook on the attention modules; it is
    removed again if the logits with a cache still differ from those without.
    """
    text = tokens[:, :_TEXT]
    try:
        with running(bridge):
            cache_of(bridge, text[:, :_PROMPT])
        return
    except UNSUPPORTED:
        pass  # the bridge accepts no cache, or loses it
    attentions = [block.attn for block in bridge.blocks if hasattr(block, "attn")]
    with removing() as handles:
        alter_arguments(attentions, _renamed, handles)
        try:
            kept = _same_with_cache(bridge, text)
        except UNSUPPORTED:
            kept = False
        if kept:
            handles.clear()  # the adapters stay


def _renamed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of attention with the cache of transformers 5.24 also under its old name."""
    cache = kwargs.get("cache")
    return args, kwargs if cache is None else {"past_key_values": cache, **kwargs}


def _same_with_cache(model: Any, text: Int[Tensor, "batch pos"]) -> bool:
    """Say whether a text run in parts with a KV cache has the same logits as in one pass."""
    with without_gradients(), running(model):
        cache = empty_cache(model, text)
        parts = [text[:, :_PROMPT], *text[:, _PROMPT:].split(1, 1)]
        logits: Float[Tensor, "batch pos vocab"] = torch.cat([model(part, **cache) for part in parts], 1)
        return mismatch(logits, model(text)) <= 1


# --- the cache of a running pass --------------------------------------------------------------------------------------


def running_cache() -> tuple[Any | None, bool]:
    """Return the KV cache of the running pass, of transformers models alone, and whether the caller asked for one.

    A hook function receives a tensor and a hook point, but not the arguments of the pass, so these are read from the
    call stack. transformers makes a cache in every pass; the caller asked for it by passing one, by ``use_cache=True``
    or by ``return_type="logits_and_cache"``.
    """
    from transformers import Cache, PreTrainedModel

    cache, asked, frame = None, False, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward":
            given = frame.f_locals
            more = given.get("kwargs")  # a dictionary, unless it is a forward of the caller's own
            values = [*given.values(), *(more.values() if isinstance(more, dict) else ())]
            caches = [x for x in values if isinstance(x, Cache)]
            if cache is None and caches:
                cache = caches[0]
            if isinstance(given.get("self"), PreTrainedModel):  # the outermost one is seen last
                asked = bool(caches) or given.get("use_cache") is True
            asked = asked or given.get("past_kv_cache") is not None  # a HookedTransformer's
            asked = asked or given.get("return_type") == "logits_and_cache"
        frame = frame.f_back
    return cache, asked


def tokens_before(layer: int) -> int | None:
    """Return the number of cached tokens before this layer's attention adds its own; None if no cache is found."""
    cache, _ = running_cache()
    return None if cache is None else int(cache.get_seq_length(layer))


def check_cache_is_kept(layer: int, n_query: int, n_key: int | None = None, window: int | None = None) -> None:
    """Raise ValueError if the running pass was asked for a KV cache that a layer's attention loses.

    Call this at a hook of the layer's attention, after it has put its keys into the cache.

    Args:
        layer: index of that layer.
        n_query, n_key: number of queries of this pass, and of keys that they see, if known.
        window: size of the window of sliding attention, which drops earlier keys.
    """
    cache, asked = running_cache()
    if cache is None or not asked:
        return
    held = dict(_key_layers(cache))
    n_tokens = max(held.values(), default=0)  # length of the text so far, including this pass
    continued = n_tokens > n_query
    least = n_tokens if window is None else min(n_tokens, n_query + window - 1)
    lost = [index for index, n in held.items() if continued and n == 0]
    if n_tokens < n_query or (n_key is not None and n_key < least):
        lost = [layer]
    if lost:
        raise ValueError(lost_keys(lost[0]))
