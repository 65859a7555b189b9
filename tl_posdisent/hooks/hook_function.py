"""The one function of a list of hooks, which TransformerLens calls at each of its hook points."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tl_posdisent.hooks.edit import Edit, Head
from tl_posdisent.hooks.layer_hook import LayerHook
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import head_label


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
            for name, point in layer.spec.points.items():
                if name in layer.names:
                    self.places.setdefault(point.name, []).append((layer, name))
        self.points = {point for layer in self.layers for point in layer.spec.points.values()}
        self.tools = " + ".join(sorted({tool for layer in self.layers for tool in layer.tools}))
        self.names = {*self.places, *(name for layer in self.layers for name in layer.names)}

    def __repr__(self) -> str:  # TransformerLens calls it for every hook
        return f"<hook of {self.tools}>"

    def accepts(self, name: str) -> bool:
        """Say whether the hook of this name is needed; TransformerLens asks when it installs the function."""
        return name in self.names

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        point = getattr(hook, "_target", hook)
        if point.name != hook.name:  # compatibility mode calls once more for each alias
            return None
        if point not in self.points:
            raise ArgumentError(
                "hooks", f"of {self.tools} were made for another model: make them again, for the one that runs"
            )
        self._check_alone(point)
        new: Tensor | None = None
        for layer, name in self.places.get(point.name, []):
            changed = layer(name, x)
            new = changed if new is None else new  # only the layer to which the hook belongs changes the tensor
        return new

    def _check_alone(self, point: Any) -> None:
        """Refuse another list that changes the same heads here: what both do depends on which comes first."""
        changed = self._changed_at(point)
        for other in functions_on(point) if changed else ():
            if other is not self and (both := sorted(changed.keys() & other._changed_at(point).keys())):
                layer, head = both[0]
                calls = " and ".join(function._changed_at(point)[both[0]] for function in (other, self))
                raise ValueError(
                    f"layer {layer}, head {head} ({head_label(layer, head)}): two lists of hooks change it, {calls}: "
                    "add the lists, a + b, and apply their sum"
                )

    def _changed_at(self, point: Any) -> dict[Head, str]:
        """Return the heads that are changed at a hook point, and by which calls."""
        return {
            head: " + ".join(layer.records[head[1]].call_names)
            for layer, name in self.places.get(point.name, [])
            for head in layer.changed_at(name)
        }


def functions_on(point: Any) -> Iterator[HookFunction]:
    """Yield the functions of lists of hooks that are on a hook point."""
    for registered in point._forward_hooks.values():
        yield from _functions_in(registered)


def _functions_in(hook: Any) -> Iterator[HookFunction]:
    """Find them in what is registered: TransformerLens keeps a hook in a closure, this package in a partial."""
    if isinstance(hook, HookFunction):
        yield hook
    elif isinstance(hook, functools.partial):
        for part in hook.args:
            yield from _functions_in(part)
    elif hasattr(hook, "__code__"):
        held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        if "hook" in held:
            yield from _functions_in(held["hook"].cell_contents)
