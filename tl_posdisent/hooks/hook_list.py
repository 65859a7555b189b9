"""The list of hooks that interventions return: ``a + b`` composes two, and refuses interventions that conflict.

Also how the layers and heads of an intervention are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import pandas as pd
from torch import Tensor

from tl_posdisent.hooks.edits.edit import Edit, Intervention
from tl_posdisent.hooks.edits.hook import HookFunction
from tl_posdisent.hooks.edits.rotation_edits import RotationEdit
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import head_label, is_integer, listed, shown
from tl_posdisent.utils.words import plural

Heads = int | str | Iterable[int] | Iterable[tuple[int, int] | str] | None
"""None for all heads of the layers, integers for the same heads in each, or labels ``"L16H0"`` and pairs
``(layer, head)``. A tuple of two integers could be either, and is refused: ``[(16, 0)]`` is one head, ``[16, 0]`` are
two of each layer.
"""

Chosen = list[tuple[AttentionSpec, list[int]]]


class Hooks(list[Any]):
    """Hooks of one model, for ``fwd_hooks``: a list of ``(filter of names, function)`` that knows its interventions.

    ``a + b`` composes two such lists, or appends your own hooks to one.

    Attributes:
        interventions: the edits, each with the layer and the heads on which it acts.
        name: the calls that made them, without heads.
        others: your own hooks in the list.

    Example:
        >>> from tl_posdisent import dummy_distance, limit_frequencies, load_demo_model
        >>> model = load_demo_model()
        >>> dummy_distance(model, 5) + limit_frequencies(model, 0.01, layers=[0, 1], heads=[2])
        dummy_distance(5) on 5 layers × 8 heads + limit_frequencies(low=0.01) on L0H2, L1H2
    """

    def __init__(self, interventions: Iterable[Intervention], others: Sequence[Any] = ()) -> None:
        check_entries(others)
        self._function = HookFunction(tuple(interventions))
        super().__init__([(self._function.accepts, self._function)] if self._function.layers else [])
        super().extend(others)

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        here = any(isinstance(entry, tuple) and entry[-1] is self._function for entry in self)
        return self._function.interventions if here else ()

    @property
    def others(self) -> list[Any]:
        """The user's own hooks, including those appended to the list later."""
        return [entry for entry in self if not (isinstance(entry, tuple) and entry[-1] is self._function)]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The heads on which an intervention acts, as ``(layer, head)``, in ascending order."""
        return sorted({(x.spec.layer, head) for x in self.interventions for head in x.heads})

    def only(self, heads: Iterable[tuple[int, int]]) -> Hooks:
        """Return the interventions on these heads ``(layer, head)`` alone, without your own hooks."""
        kept = set(heads)
        restricted = [
            replace(x, heads=tuple(head for head in x.heads if (x.spec.layer, head) in kept))
            for x in self.interventions
        ]
        return Hooks(x for x in restricted if x.heads)

    @property
    def resamples(self) -> bool:
        """Whether a text gets what another text of the batch has."""
        return any(getattr(x.edit, "of_others", False) for x in self.interventions)

    def __add__(self, other: Any) -> Hooks:
        if isinstance(other, Hooks):
            return joined([self, other])
        return Hooks(self.interventions, [*self.others, *check_entries(other)])

    def __radd__(self, other: Any) -> Hooks:
        return Hooks(self.interventions, [*check_entries(other), *self.others])

    __iadd__ = __add__

    def __mul__(self, times: SupportsIndex) -> Any:
        raise ArgumentError("hooks", "are applied once: they cannot be multiplied")

    __rmul__ = __imul__ = __mul__

    def __repr__(self) -> str:
        calls = [f"{call} on {_shown_heads(some)}" for call, some in _by_call(self.interventions)]
        return " + ".join([*calls, *self._own()]) or "no hooks"

    @property
    def name(self) -> str:
        """The calls that made the hooks, without heads: ``"dummy_distance(5) + limit_frequencies(low=0.01)"``."""
        return " + ".join([*(call for call, _ in _by_call(self.interventions)), *self._own()])

    def _own(self) -> list[str]:
        return [f"{len(self.others)} more"] if self.others else []

    def to_frame(self) -> pd.DataFrame:
        """Return the interventions as a table, one row per head and edit: ``layer``, ``head``, ``edit``."""
        rows = [(x.spec.layer, head, x.edit.call) for x in self.interventions for head in x.heads]
        return pd.DataFrame(rows, columns=["layer", "head", "edit"])


def check_entries(hooks: Any) -> list[Any]:
    """Return the entries of a list of hooks, or raise unless each is ``(hook name or filter, function)``."""
    needed = "must be a list of (hook name or filter, function), got"
    if isinstance(hooks, (str, bytes, Mapping)) or not isinstance(hooks, Iterable):
        raise ArgumentError("hooks", f"{needed} {shown(hooks)}")
    entries = list(hooks)
    for entry in entries:
        if isinstance(entry, list):
            raise ArgumentError("hooks", f"{needed} a list of hooks in it, {shown(entry)}: add the lists, a + b")
        pair = isinstance(entry, tuple) and len(entry) == 2 and callable(entry[1])
        if not pair or not (isinstance(entry[0], str) or callable(entry[0])):
            raise ArgumentError("hooks", f"{needed} {shown(entry)} in it")
    return entries


def _by_call(interventions: Sequence[Intervention]) -> list[tuple[str, list[Intervention]]]:
    """Group interventions by the call that made them, with its short form.

    Calls of one short form are told apart by their edits: other contents, or the same head once more.
    """
    groups: list[tuple[str, list[Intervention]]] = []
    for each in interventions:
        of_call = (some for call, some in groups if call == each.edit.call)
        group = next((some for some in of_call if not any(_of_another_call(each, x) for x in some)), None)
        if group is None:
            groups.append((each.edit.call, [each]))
        else:
            group.append(each)
    return groups


def _of_another_call(a: Intervention, b: Intervention) -> bool:
    if type(a.edit) is not type(b.edit):
        return False  # one call may edit both distances and scores
    same_heads = a.spec.layer == b.spec.layer and not set(a.heads).isdisjoint(b.heads)
    return same_heads or (a.edit is not b.edit and a.edit != b.edit)


def _shown_heads(interventions: Sequence[Intervention]) -> str:
    heads = [head_label(x.spec.layer, head) for x in interventions for head in x.heads]
    n, widths = len({x.spec.layer for x in interventions}), {len(x.heads) for x in interventions}
    layers = plural(n, "layer")
    if len(widths) == 1 and all(len(x.heads) == x.spec.n_heads for x in interventions):
        return f"{layers} × {plural(min(widths), 'head')}"
    return ", ".join(heads) if len(heads) <= 4 else f"{len(heads)} heads of {layers}"


def joined(hooks: Iterable[Hooks]) -> Hooks:
    hooks = list(hooks)
    return Hooks([x for each in hooks for x in each.interventions], [x for each in hooks for x in each.others])


def rotation_hooks(model: Any, layers: Layers, heads: Heads, edit: RotationEdit) -> Hooks:
    """Return hooks that apply one rotation edit to the chosen heads."""
    return hooks_for(any_heads(model, layers, heads, edit.tool), edit)


def hooks_for(chosen: Iterable[tuple[AttentionSpec, Sequence[int]]], edit: Edit) -> Hooks:
    """Return hooks that apply one edit to these heads; raise if a layer lacks the hooks for it."""
    return Hooks(Intervention(edit, spec, tuple(heads)) for spec, heads in chosen)


def replace_scores(spec: AttentionSpec, heads: Sequence[int], scores: Callable[[View], Tensor], tool: str) -> Hooks:
    """Return hooks that replace the scores of these heads by those that a function returns."""
    return hooks_for([(spec, heads)], ScoreEdit(tool, scores, Order.REPLACE))


# --- the layers and heads on which an intervention acts


def any_heads(model: Any, layers: Layers, heads: Heads, tool: str | None = None) -> Chosen:
    """Choose the layers with attention of any kind, and their heads; with a ``tool``, only layers with RoPE.

    Layers and the heads of each are in ascending order. Given a ``tool``, raise if it cannot change the rotation of one
    of these layers.
    """
    layers, heads = listed("layers", layers), listed("heads", heads)
    reading = read_model(model)
    chosen = reading.heads(layers, heads)
    single = isinstance(heads, str) or (isinstance(heads, (list, tuple)) and not all(map(is_integer, heads)))
    named = list(chosen) if single or layers is not None else None
    specs = reading.specs(named) if tool is None else reading.rotary(named, tool)
    return [(spec, sorted(chosen[spec.layer])) for spec in specs]


def pairs_of(chosen: Chosen) -> list[tuple[int, int]]:
    """Return chosen heads as pairs ``(layer, head)``."""
    return [(spec.layer, head) for spec, some in chosen for head in some]
