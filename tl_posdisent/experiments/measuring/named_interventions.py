"""Interventions by name: their hooks for single heads of a layer, and the heads on which they act."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from tl_posdisent import hooks as tools
from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.hooks.edits.hook import HookFunction
from tl_posdisent.hooks.hook_list import Chosen, Hooks
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.partial_forward import has_hooks
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

Call = str | tuple[str, Mapping[str, Any]] | list[Any]
"""A function of ``tl_posdisent.hooks`` by its name, or its name and arguments, of which JSON makes a list."""

Interventions = Mapping[str, Sequence[Hook] | Call] | Hooks
"""Interventions by name, or hooks of one intervention."""

Rows = dict[int, list[int]]
"""By layer, the heads that have a row each."""


@dataclass(frozen=True, eq=False)
class NamedIntervention:
    """One intervention.

    Attributes:
        name: its name in the table.
        hooks: hooks that apply it to all heads: of this package, functions of the user, or both.
        rows: the heads that have a row each.
    """

    name: str
    hooks: Hooks
    rows: Rows

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def places(self) -> list[tuple[int, int]]:
        """Layer and head of each row."""
        return [(layer, head) for layer, heads in self.rows.items() for head in heads]

    @property
    def own(self) -> Sequence[Hook]:
        """Functions of the user, which may change any head."""
        return self.hooks.others

    @property
    def divisible(self) -> bool:
        """Whether hooks for one head can be made: not from functions of the user."""
        return not self.own

    def of(self, layer: int, heads: Sequence[int] | None = None) -> Hooks:
        """Return the package's hooks of some heads of a layer, by default all."""
        here = [x for x in self.hooks.interventions if x.spec.layer == layer]
        kept = [(x, tuple(h for h in x.heads if heads is None or h in heads)) for x in here]
        return Hooks(replace(x, heads=some) for x, some in kept if some)

    def in_layer(self, layer: int) -> Hooks:
        """Return the package's hooks of a layer and those of the user."""
        return self.of(layer) + self.own


def rows_by_layer(reading: ModelReading, chosen: Chosen) -> Rows:
    """Return the chosen heads of each layer; raise if an edit of a layer's results has no effect."""
    check_reach(reading, [spec.layer for spec, _ in chosen])
    return {spec.layer: some for spec, some in chosen}


def named_hooks(model: Any, interventions: Any, texts: Texts) -> dict[str, Sequence[Hook]]:
    """Validate interventions, and make the hooks of those that are given by name.

    Raises:
        ValueError: what is not a mapping from names to hooks, or one list of hooks; an empty list.
    """
    if isinstance(interventions, Hooks):
        interventions = {interventions.name: interventions}
    named = isinstance(interventions, Mapping) and all(isinstance(name, str) for name in interventions)
    if not named or not interventions:
        raise ArgumentError("interventions", f"must be hooks by name, or hooks, got {shown(interventions)}")
    found = {}
    for name, hooks in interventions.items():
        try:
            found[name] = hooks_of(model, hooks, texts)
        except ValueError as error:
            raise ArgumentError("interventions", f"must be hooks by name; {name!r}: {error}") from error
        if not found[name]:
            raise ArgumentError("interventions", f"must have hooks, got {shown(hooks)} for {name!r}")
    return found


def named_interventions(model: Any, interventions: Any, rows: Rows, texts: Texts) -> list[NamedIntervention]:
    """Validate interventions, make the hooks of those that are given by name, and find the rows of each.

    Raises:
        ValueError: what ``named_hooks`` refuses; hooks that act on no chosen head; the user's own hooks before those of
            this package in a list, behind the heads' results, or where nothing fires.
    """
    items = []
    for name, hooks in named_hooks(model, interventions, texts).items():
        item = NamedIntervention(name, _in_order(name, hooks), rows)
        item = replace(item, rows=_rows_changed(item, _layers_of_own_hooks(model, item, texts)))
        if not item.rows:
            raise ArgumentError("interventions", f"must act on the chosen heads, got {shown(hooks)} for {name!r}")
        items.append(item)
    return items


def hooks_of(model: Any, given: Any, texts: Texts) -> Sequence[Hook]:
    """Return hooks as they are, or make those of a function of ``tl_posdisent.hooks``: its name, or name and arguments.

    A mean without a reference is that of the texts.

    Raises:
        ValueError: what is neither hooks nor such a name; arguments that the function does not take or refuses.
    """
    makers = {x for x in dir(tools) if _makes_hooks(getattr(tools, x))}
    name, arguments = given if _is_call(given) else (given, {})
    if not isinstance(name, str):
        if isinstance(given, (list, tuple)) and given and isinstance(given[0], str) and given[0] in makers:
            raise ArgumentError("hooks", f"must be a name, or a name and a dictionary of arguments, got {shown(given)}")
        return given if isinstance(given, Hooks) else check_hooks(model, given)
    if name not in makers:
        by_name = ", ".join(sorted(makers))
        raise ArgumentError("hooks", f"must be a list of hooks, or one of {by_name} by name, got {name!r}")
    options: dict[str, Any] = {"heads": None} if name == "ablate_heads" else {}
    if arguments.get("mode") == "mean" and "reference" not in arguments:
        options["reference"] = texts
    make, options = getattr(tools, name), options | dict(arguments)
    try:
        signature(make).bind(model, **options)
    except TypeError as error:
        raise ArgumentError("hooks", f"must have the arguments of {name}, got {shown(arguments)}: {error}") from error
    return make(model, **options)  # type: ignore[no-any-return]


def _makes_hooks(x: Any) -> bool:
    return callable(x) and signature(x).return_annotation == "Hooks"


def _is_call(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Mapping)


def _rows_changed(item: NamedIntervention, layers: set[int]) -> Rows:
    """Return the rows of the heads on which an intervention acts: all those of layers with the user's own hooks."""
    found: Rows = {}
    for layer, heads in item.rows.items():
        acting = {head for x in item.of(layer).interventions for head in x.heads}
        some = [head for head in heads if layer in layers or head in acting]
        if some:
            found[layer] = some
    return found


def _in_order(name: str, hooks: Sequence[Hook]) -> Hooks:
    """Return hooks as a list that knows its interventions, which act before the user's own hooks."""
    ours = [isinstance(function, HookFunction) for _, function in hooks]
    if ours != sorted(ours, reverse=True):
        raise ArgumentError(
            "interventions", f"must have your own hooks behind those of this package, got some before them in {name!r}"
        )
    return Hooks.of_list(hooks)


def _layers_of_own_hooks(model: Any, item: NamedIntervention, texts: Texts) -> set[int]:
    """Return the layers that hooks of the user may change; their functions do not say which heads.

    Raises:
        ValueError: the model has other hooks; a hook outside attention layers, behind the heads' results, or that does
            not fire.
    """
    if item.own and has_hooks(model):
        raise ArgumentError(
            "interventions",
            f"must be hooks of this package if the model has other hooks, got functions of your own in {item.name!r}: "
            "remove the hooks from the model",
        )
    by_hook = [_points(model, item, accepts) for accepts, _ in item.own]
    layer_of = {point: layer for points in by_hook for point, layer in points.items()}
    fired = _fired(model, texts, layer_of)
    for points in by_hook:
        seen = [point for point in points if point in fired]
        if not seen:
            where = next(iter(points), "no point")
            raise ArgumentError("interventions", f"must have hooks that fire, got one at {where} in {item.name!r}")
        results = {point: hook_name(layer, "hook_z") for point, layer in points.items()}
        if behind := [x for x in seen if results[x] not in fired[fired.index(x) :]]:
            raise ArgumentError(
                "interventions",
                f"must change what heads gather, at hook_z or before it, got a hook at {behind[0]} in {item.name!r}",
            )
    return set(layer_of.values())


def _points(model: Any, item: NamedIntervention, accepts: str | Callable[[str], bool]) -> dict[str, int]:
    """Return the names that a hook of the user's accepts, and their layers; raise for one outside attention."""
    found = {}
    for point in (x for x in model.hook_dict if (x == accepts if isinstance(accepts, str) else accepts(x))):
        layer = re.match(r"blocks\.(\d+)\.attn\.", point)
        if layer is None:
            raise ArgumentError(
                "interventions",
                f"must change attention alone, at hooks blocks.N.attn.…, got a hook at {point} in {item.name!r}",
            )
        found[point] = int(layer[1])
    return found


def _fired(model: Any, texts: Texts, points: Mapping[str, int]) -> list[str]:
    """Return those of some hooks that fire in a pass, and the ``hook_z`` of their layers, in their order."""
    fired: list[str] = []
    if not points:
        return fired

    def listen(name: str) -> Hook:
        return name, lambda x, hook: fired.append(name)

    results = {hook_name(layer, "hook_z") for layer in points.values()}  # last: a bridge has further names for them
    names = [*(point for point in points if point not in results), *results]
    with running(model) as p:
        p.run(texts.groups[0].tokens[:1], [listen(name) for name in names], stop=max(points.values()) + 1)
    return fired
