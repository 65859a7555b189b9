"""The list of hooks that interventions return: ``a + b`` merges what two do to each head, and refuses conflicts.

Also how the layers and heads of an intervention are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import pandas as pd
from torch import Tensor

from tl_posdisent.hooks.edit import Edit, Head, NewScores, View, edit, merged
from tl_posdisent.hooks.hook_function import HookFunction
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.labels import from_label
from tl_posdisent.utils.validation import head_label, is_integer, listed, shown
from tl_posdisent.utils.words import plural

Heads = int | str | Iterable[int] | Iterable[tuple[int, int] | str] | None
"""None for all heads of the layers, integers for the same heads in each, or labels ``"L16H0"`` and pairs
``(layer, head)``. A tuple of two integers could be either, and is refused: ``[(16, 0)]`` is one head, ``[16, 0]`` are
two of each layer.
"""

OneHead = str | tuple[int, int]
"""A label such as ``"L8H1"``, or a pair ``(layer, head)``."""

Chosen = list[tuple[AttentionSpec, list[int]]]


class Hooks(list[Any]):
    """Hooks of one model, for ``fwd_hooks``: a list of ``(filter of names, function)`` that knows its interventions.

    ``a + b`` merges what two lists do to each head, or appends your own hooks to one.

    Attributes:
        specs: the layers on which they act.
        records: what is edited in each head ``(layer, head)``.

    Example:
        >>> from tl_posdisent import dummy_distance, limit_frequencies, load_demo_model
        >>> model = load_demo_model()
        >>> hooks = dummy_distance(model, 5) + limit_frequencies(model, 0.01, layers=[0, 1], heads=[2])
        >>> hooks
        dummy_distance(5) on 5 layers × 8 heads + limit_frequencies(low=0.01) on L0H2, L1H2
        >>> hooks.only("L1H2")  # or (1, 2)
        dummy_distance(5) on L1H2 + limit_frequencies(low=0.01) on L1H2
    """

    def __init__(
        self,
        specs: Iterable[AttentionSpec] = (),
        records: Mapping[Head, Edit] | None = None,
        others: Any = (),
        calls: Iterable[str] = (),  # in the order in which they are shown
    ) -> None:
        check_entries(others)
        self._calls = list(calls)
        self._records: dict[Head, Edit] = dict(records or {})
        edited = {layer for layer, _ in self._records}
        self.specs: dict[int, AttentionSpec] = {spec.layer: spec for spec in specs if spec.layer in edited}
        self._function = HookFunction(self.specs, self._records)
        super().__init__([(self._function.accepts, self._function)] if self._records else [])
        super().extend(others)

    @property
    def records(self) -> dict[Head, Edit]:
        """What is edited in each head; nothing if that entry was taken out of the list."""
        return self._records if len(self.others) < len(self) else {}

    @property
    def pairs(self) -> list[Head]:
        """The heads on which an intervention acts, as ``(layer, head)``, in ascending order."""
        return sorted(self.records)

    @property
    def others(self) -> list[Any]:
        """The user's own hooks, including those appended to the list later."""
        return [entry for entry in self if not (isinstance(entry, tuple) and entry[-1] is self._function)]

    @property
    def by_text(self) -> bool:
        """Whether they were made for the texts of one batch, or a text gets what another text of the batch has."""
        return any(record.by_text for record in self.records.values())

    def only(self, *heads: OneHead) -> Hooks:
        """Return the interventions on these heads, labels or pairs ``(layer, head)``, alone, without your own hooks.

        Raises:
            ValueError: neither a label nor a pair of integers; a head that has no intervention.
        """
        for head in heads:
            if not _is_one(head):
                raise ArgumentError("heads", f'must be labels such as "L8H1" or pairs (layer, head), got {shown(head)}')
        kept = [from_label(head) for head in heads]
        if missing := [head_label(*head) for head in kept if head not in self.records]:
            raise ArgumentError("heads", f"must be some of those of {self!r}, got {', '.join(missing)}")
        return self.of_heads(kept)

    def of_heads(self, heads: Iterable[Head]) -> Hooks:
        """Return the interventions on these heads alone, which may have none."""
        kept = {*heads}
        return Hooks(
            self.specs.values(), {head: x for head, x in self.records.items() if head in kept}, calls=self._by_call()
        )

    def __add__(self, other: Any) -> Hooks:
        if isinstance(other, Hooks):
            return joined([self, other])
        return Hooks(self.specs.values(), self.records, [*self.others, *check_entries(other)], self._by_call())

    def __radd__(self, other: Any) -> Hooks:
        return Hooks(self.specs.values(), self.records, [*check_entries(other), *self.others], self._by_call())

    __iadd__ = __add__

    def __mul__(self, times: SupportsIndex) -> Any:
        raise ArgumentError("hooks", "are applied once: they cannot be multiplied")

    __rmul__ = __imul__ = __mul__

    def __repr__(self) -> str:
        calls = [f"{call} on {self._shown(heads)}" for call, heads in self._by_call().items()]
        return " + ".join([*calls, *self._own()]) or "no hooks"

    @property
    def name(self) -> str:
        """The calls that made the hooks, without heads: ``"dummy_distance(5) + limit_frequencies(low=0.01)"``."""
        return " + ".join([*self._by_call(), *self._own()])

    def to_frame(self) -> pd.DataFrame:
        """Return the interventions as a table, one row per head and call: ``layer``, ``head``, ``edit``."""
        rows = [(*head, call) for call, heads in self._by_call().items() for head in heads]
        return pd.DataFrame(rows, columns=["layer", "head", "edit"])

    def _by_call(self) -> dict[str, list[Head]]:
        by_call: dict[str, list[Head]] = {call: [] for call in self._calls}
        for head, record in self.records.items():
            for call in record.call_names:
                by_call.setdefault(call, []).append(head)
        return {call: heads for call, heads in by_call.items() if heads}

    def _own(self) -> list[str]:
        return [f"{len(self.others)} more"] if self.others else []

    def _shown(self, heads: Sequence[Head]) -> str:
        by_layer: dict[int, int] = {}
        for layer, _ in heads:
            by_layer[layer] = by_layer.get(layer, 0) + 1
        layers, widths = plural(len(by_layer), "layer"), set(by_layer.values())
        if len(widths) == 1 and all(n == self.specs[layer].n_heads for layer, n in by_layer.items()):
            return f"{layers} × {plural(min(widths), 'head')}"
        return ", ".join(head_label(*head) for head in heads) if len(heads) <= 4 else f"{len(heads)} heads of {layers}"


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


def joined(hooks: Iterable[Hooks]) -> Hooks:
    """Return the sum of several lists."""
    hooks = list(hooks)
    specs: dict[int, AttentionSpec] = {}
    records: dict[Head, Edit] = {}
    others: list[Any] = []
    for each in hooks:
        for layer, spec in each.specs.items():
            there = specs.setdefault(layer, spec)
            if there != spec or there.points != spec.points:
                raise ValueError(
                    f"hooks of {spec.architecture} were made for different models, or some of them before the model "
                    "was changed: make them again, for one model"
                )
        for head, record in each.records.items():
            records[head] = merged(head, records[head], record) if head in records else record
        others += each.others
    return Hooks(specs.values(), records, others, [call for each in hooks for call in each._by_call()])


def hooks_for(chosen: Iterable[tuple[AttentionSpec, Sequence[int]]], call: str, **given: Any) -> Hooks:
    """Return hooks by which a call sets these fields of the chosen heads."""
    chosen, record = list(chosen), edit(call, **given)
    return Hooks((spec for spec, _ in chosen), {(spec.layer, head): record for spec, some in chosen for head in some})


def replace_scores(spec: AttentionSpec, heads: Sequence[int], scores: Callable[[View], Tensor], tool: str) -> Hooks:
    """Return hooks that replace the scores of these heads by those that a function returns."""
    return hooks_for([(spec, heads)], tool, scores=NewScores(scores, replaces=True))


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


def one_head(model: Any, head: OneHead, tool: str | None = None) -> tuple[AttentionSpec, int]:
    """Return the layer and the number of one head; with a ``tool``, as ``any_heads``."""
    if not _is_one(head):
        raise ArgumentError("head", f'must be a label such as "L8H1" or a pair (layer, head), got {shown(head)}')
    with naming(heads="head"):
        ((spec, (number,)),) = any_heads(model, None, [head], tool)
    return spec, number


def _is_one(head: Any) -> bool:
    pair = isinstance(head, tuple) and len(head) == 2 and all(map(is_integer, head))
    return pair or isinstance(head, str)


def pairs_of(chosen: Chosen) -> list[Head]:
    """Return chosen heads as pairs ``(layer, head)``."""
    return [(spec.layer, head) for spec, some in chosen for head in some]
