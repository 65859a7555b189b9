"""Scores of a long text, a block of queries at a time: keys and values stay in a cache, score matrices are never whole.

With eager attention a model's own forward pass holds all scores of a layer several times over. Block by block it holds
``[batch, head, block, pos]``, whatever the length, and the keys and values of all layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook, run
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.reading.tolerance import score_tolerance, spread_rows

Rows = Callable[[AttentionSpec, int, Float[Tensor, "batch head row seen"]], None]
"""Takes a layer's scores of some queries: ``(spec, first query, scores)``."""

_TRIED = 24  # tokens on which blocks must give what one pass gives


def read_blocks(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec], block: int, rows: Rows
) -> None:
    """Run the model on ``block`` queries at a time, and call ``rows`` with every layer's scores.

    Raises:
        ValueError: a model that shows no scores or takes no cache, in which queries see later keys, or that has hooks
            (which may assume a whole text); one whose scores in blocks are not those of one pass, which is tried on a
            few tokens.
    """
    for spec in specs:
        spec.check_length(tokens.shape[1], "block")  # blocks within the length would be rotated as short texts are
    check_blocks(model, tokens[:, :_TRIED], specs)
    _run_blocks(model, tokens, specs, block, rows)


def _run_blocks(model: Any, tokens: Tensor, specs: list[AttentionSpec], block: int, rows: Rows) -> None:
    cache = empty_cache(model, tokens)

    def listen(scores: Tensor, hook: Any, spec: AttentionSpec, first: int) -> None:
        n_row, n_seen = scores.shape[-2:]
        some = spread_rows(n_row, 4, scores.device)  # a few rows show which keys they see
        distance = (some + first)[:, None] - torch.arange(n_seen, device=scores.device)
        if n_seen != first + n_row or bool((spec.is_masked(scores[:, :, some]) == spec.sees(distance)).any()):
            raise ValueError(
                f"block must be None: with a cache, layer {spec.layer} of {spec.architecture} gives queries {first} … "
                f"{n_row + first - 1} other keys or another mask than without; padded texts are not supported either"
            )
        rows(spec, first, scores.detach())

    for first in range(0, tokens.shape[1], block):
        _run_heard(model, tokens[:, first : first + block], specs, partial(listen, first=first), cache)


def _run_heard(
    model: Any, tokens: Tensor, specs: list[AttentionSpec], listen: Callable[..., None], cache: dict[str, Any]
) -> None:
    """Run the model and call ``listen(scores, hook, spec=spec)`` at each layer."""
    hooks: list[Hook] = [(spec.scores or "", partial(listen, spec=spec)) for spec in specs]
    run(model, tokens, hooks, stop=max(spec.layer for spec in specs) + 1, **with_mask(cache, tokens))


def check_blocks(model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec]) -> None:
    """Refuse a model that cannot be run in blocks; compares scores of these tokens in blocks with those of one pass."""
    for spec in specs:
        if spec.scores is None or not spec.causal:
            what = "does not show its scores" if spec.causal else "lets queries see later keys"
            raise ValueError(f"block must be None: layer {spec.layer} of {spec.architecture} {what}")
    hooked = sorted(name for name, point in model.hook_dict.items() if point.fwd_hooks)
    if hooked:
        raise ValueError(f"block must be None, or the model without hooks, which would see parts of the text: {hooked}")
    n = tokens.shape[1]
    once: dict[int, Tensor] = {}
    parts: dict[int, list[Tensor]] = {spec.layer: [] for spec in specs}
    _run_heard(model, tokens, specs, lambda x, hook, spec: once.update({spec.layer: x.detach()}), {})
    _run_blocks(model, tokens, specs, -(-n // 3), lambda spec, first, x: parts[spec.layer].append(x.double()))
    for spec in specs:
        full = once[spec.layer].double()
        inside = spec.mask(n, full.device)
        found = torch.cat([torch.nn.functional.pad(x, (0, n - x.shape[-1])) for x in parts[spec.layer]], -2)
        error, largest = (torch.where(inside, x, 0.0).abs().amax() for x in (found - full, full))
        if not bool(error <= (allowed := score_tolerance(once[spec.layer].dtype) * largest)):
            raise ValueError(
                f"block must be None: with a cache, scores of layer {spec.layer} of {spec.architecture} differ from "
                f"those of one pass by {error.item():.1e}, where {allowed.item():.1e} is rounding"
            )


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
    raise ValueError(f"block must be None: {type(model).__name__} takes no cache of keys and values")


def with_mask(cache: dict[str, Any], part: Int[Tensor, "batch pos"]) -> dict[str, Any]:
    """Arguments of the pass over a part of a text without padding: HookedTransformer would ask a tokenizer for it."""
    return cache | {"attention_mask": torch.ones_like(part)} if "past_kv_cache" in cache else cache
