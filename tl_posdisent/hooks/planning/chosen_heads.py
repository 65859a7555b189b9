"""Select the layers and heads on which an intervention acts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.validation import is_integer, listed

Layers = int | Iterable[int] | None
"""None for all, an integer, or integers; negative ones count from the end."""

Heads = int | str | Iterable[int] | Iterable[tuple[int, int] | str] | None
"""None for all heads of the layers, the same heads in each of them, or labels ``"L16H0"`` and pairs ``(layer, head)``.
"""

Chosen = list[tuple[AttentionSpec, list[int]]]


def rotary_heads(model: Any, layers: Layers, heads: Heads, tool: str) -> Chosen:
    """Layers in which ``tool`` must find a rotation that it can change (default all that rotate), with their heads."""
    return _chosen(model, layers, heads, tool)


def any_heads(model: Any, layers: Layers, heads: Heads) -> Chosen:
    """Layers with attention of any kind, with their heads."""
    return _chosen(model, layers, heads, None)


def _chosen(model: Any, layers: Layers, heads: Heads, tool: str | None) -> Chosen:
    layers, heads = listed(layers), listed(heads)
    reading = read_model(model, layers)
    chosen = reading.heads(layers, heads)
    single = isinstance(heads, str) or (isinstance(heads, list) and not all(map(is_integer, heads)))
    named = list(chosen) if single or layers is not None else None
    specs = reading.specs(named) if tool is None else reading.rotary(named, tool)
    return [(spec, chosen[spec.layer]) for spec in specs]
