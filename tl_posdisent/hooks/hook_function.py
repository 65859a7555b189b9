"""The one function of a list of hooks, which TransformerLens calls at each of its hook points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tl_posdisent.hooks.edit import Edit, Head
from tl_posdisent.hooks.layer_hook import LayerHook
from tl_posdisent.models.reading.spec import AttentionSpec


class HookFunction:
    """The function of a list of hooks, and the filter of names (``accepts``) that says where it is installed."""

    def __init__(self, specs: Mapping[int, AttentionSpec], records: Mapping[Head, Edit]) -> None:
        self.layers = [
            LayerHook(spec, {head: record for (layer, head), record in records.items() if layer == spec.layer})
            for spec in specs.values()
        ]
        # By the own name of a hook point, the layers that it serves: several may share keys.
        self.places: dict[str, list[tuple[LayerHook, str]]] = {}
        for layer in self.layers:
            for own, name in layer.spec.points.items():
                if name in layer.names:
                    self.places.setdefault(own, []).append((layer, name))
        self.names = {*self.places, *(name for layer in self.layers for name in layer.names)}

    def __repr__(self) -> str:  # TransformerLens calls it for every hook
        return f"<hook of {' + '.join(sorted({tool for layer in self.layers for tool in layer.tools}))}>"

    def accepts(self, name: str) -> bool:
        """Say whether the hook of this name is needed; TransformerLens asks when it installs the function."""
        return name in self.names

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        point = getattr(hook, "_target", hook)
        if point.name != hook.name:  # compatibility mode calls once more for each alias
            return None
        new: Tensor | None = None
        for layer, name in self.places.get(point.name, []):
            changed = layer(name, x)
            new = changed if new is None else new  # only the layer to which the hook belongs changes the tensor
        return new
