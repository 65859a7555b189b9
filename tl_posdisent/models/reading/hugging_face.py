"""Facts that adapters of a TransformerBridge read from Hugging Face's attention module and configuration."""

from __future__ import annotations

from typing import Any

from tl_posdisent.models.reading.layer import Layer


def kinds_of(layer: Layer) -> set[str]:
    """Return the names of the classes of TransformerLens's module."""
    return {kind.__name__ for kind in type(layer.attn).__mro__}


def causal(layer: Layer) -> bool:
    """Say whether keys after the query are hidden."""
    return bool(getattr(layer.original, "is_causal", True))


def window(layer: Layer) -> int | None:
    """Return the number of keys that a query sees, or None for all."""
    original: Any = layer.original
    config: Any = getattr(original, "config", None)
    if hasattr(original, "sliding_window"):
        return original.sliding_window  # type: ignore[no-any-return]
    if hasattr(original, "attention_type"):  # GPT-Neo
        return config.window_size if original.attention_type == "local" else None
    if getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        return getattr(config, "sliding_window", None)
    return None


def fused(layer: Layer) -> bool:
    """Say whether a kernel computes the attention, so that no hook sees its pattern."""
    config = getattr(layer.original, "config", None)
    return getattr(config, "_attn_implementation", None) not in ("eager", None)
