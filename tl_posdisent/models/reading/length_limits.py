"""The length of text up to which a layer computes what it computes on a short one, from the model's configuration.

Beyond a length some models rotate by other frequencies, scale queries by their position, or hide keys. Scalings that do
not depend on the length (linear, llama3, YaRN) have no such limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def length_limit(model: Any, layer: int) -> int | None:
    """Return the most tokens of a text for a layer, or None: rotation, scale and mask do not depend on the length.

    A HookedTransformer has no limit: its rotation tables are fixed.
    """
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    if config is None:
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return min(_limits(config, layer), default=None)


def _limits(config: Any, layer: int) -> Iterator[int]:
    kinds, rope = getattr(config, "layer_types", None) or (), getattr(config, "rope_parameters", None) or {}
    kind = kinds[layer] if layer < len(kinds) else None
    rope = rope.get(kind, rope)  # some models have parameters for each kind of layer
    rope_type, original = rope.get("rope_type") or "", rope.get("original_max_position_embeddings")
    if original and (rope_type == "longrope" or rope.get("llama_4_scaling_beta")):  # the second: Ministral 3, Mistral 4
        yield int(original)
    context = getattr(config, "max_position_embeddings", None)
    if "dynamic" in rope_type and context and not rope.get("alpha"):  # HunYuan's alpha fixes the frequencies
        yield int(context)
    floor, rotates = getattr(config, "floor_scale", None), getattr(config, "no_rope_layers", None) or ()
    if getattr(config, "attn_temperature_tuning", False) and floor and layer < len(rotates) and not rotates[layer]:
        yield int(floor) - 1  # layers of Llama 4 without rotation scale queries by their position
    if kind == "chunked_attention" and (chunk := getattr(config, "attention_chunk_size", None)):
        yield int(chunk)  # keys of earlier chunks are hidden
    if chosen := getattr(config, "index_topk", None):
        yield int(chosen)  # a learned index chooses the keys of each query (DeepSeek V3.2, GLM-5)
