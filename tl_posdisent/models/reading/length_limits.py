"""The length of text up to which a layer computes what it computes on a short one, from the model's configuration.

Beyond a length some models rotate by other frequencies, scale queries by their position, or hide keys. Scalings that do
not depend on the length (linear, llama3, YaRN) have no such limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class LengthLimit(NamedTuple):
    """The greatest length of text in tokens, and what a layer does with longer texts, for messages.

    ``scaled`` says whether scores of queries at positions from ``length`` on are scaled by the position.
    """

    length: int
    beyond: str
    scaled: bool = False


def length_limit(model: Any, layer: int) -> LengthLimit | None:
    """Return the nearest limit of a layer, or None: rotation, scale and mask do not depend on the length of the text.

    A HookedTransformer has no limit: its rotation tables are fixed.
    """
    config = text_config(model)
    if config is None:
        return None
    limits = [*_rotation_limits(config, layer), *_temperature_limits(config, layer), *_mask_limits(config, layer)]
    return min(limits, key=lambda limit: limit.length, default=None)


def text_config(model: Any) -> Any | None:
    """Return the Hugging Face configuration of a bridge's language model; None for other models."""
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def chunk_size(config: Any | None, layer: int) -> int | None:
    """Return the number of tokens in a chunk, before which keys are hidden (Llama 4); None without chunks."""
    chunked = _kind_of_layer(config, layer) == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if chunked else None


def chosen_keys(config: Any | None) -> int | None:
    """Return the number of keys that a learned index chooses for each query (DeepSeek V3.2, GLM-5); None without it."""
    return getattr(config, "index_topk", None)


def _kind_of_layer(config: Any | None, layer: int) -> str | None:
    kinds = getattr(config, "layer_types", None) or ()
    return kinds[layer] if layer < len(kinds) else None


def _rotation_limits(config: Any, layer: int) -> Iterator[LengthLimit]:
    """Yield the length of the original context of longrope and dynamic NTK, and that of queries scaled by position."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(_kind_of_layer(config, layer), rope)  # some models have parameters for each kind of layer
    context = getattr(config, "max_position_embeddings", None)
    original = rope.get("original_max_position_embeddings")
    rope_type = rope.get("rope_type") or ""
    other = f"rotates by other frequencies ({rope_type})"
    if rope_type == "longrope" and original:
        yield LengthLimit(int(original), other)
    if "dynamic" in rope_type and context and not rope.get("alpha"):  # HunYuan's alpha fixes the frequencies
        yield LengthLimit(int(context), other)
    if rope.get("llama_4_scaling_beta") and original:  # Ministral 3, Mistral 4
        yield LengthLimit(int(original), "scales scores by the position of the query", scaled=True)


def _temperature_limits(config: Any, layer: int) -> Iterator[LengthLimit]:
    """Yield the length up to which queries are not scaled by their position, in layers of Llama 4 without rotation."""
    floor, rotates = getattr(config, "floor_scale", None), getattr(config, "no_rope_layers", None) or ()
    if getattr(config, "attn_temperature_tuning", False) and floor and layer < len(rotates) and not rotates[layer]:
        yield LengthLimit(int(floor) - 1, "scales scores by the position of the query")


def _mask_limits(config: Any, layer: int) -> Iterator[LengthLimit]:
    """Yield the size of a chunk, and the number of keys that a learned index keeps."""
    if (chunk := chunk_size(config, layer)) is not None:
        yield LengthLimit(int(chunk), "hides the keys of earlier chunks")
    if (chosen := chosen_keys(config)) is not None:
        yield LengthLimit(int(chosen), "has a mask that is chosen by the model (a learned index)")
