"""The one function of a list of hooks, which TransformerLens calls at each of its hook points.

It keeps what a layer shows until the hook at which the layer is edited (``layer.py``), and forgets it after its last.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tl_posdisent.hooks.edits.edit import Intervention
from tl_posdisent.hooks.edits.layer import (
    check_hidden_attention,
    check_whole_text,
    edit_attention_result,
    edit_results,
    edit_scores,
)
from tl_posdisent.hooks.edits.layer_edits import LayerEdits, layer_edits
from tl_posdisent.hooks.edits.running_layer import RunningLayer


class HookFunction:
    """The function of a list of hooks, and the filter of names (``accepts``) that says where it is installed."""

    def __init__(self, interventions: tuple[Intervention, ...]) -> None:
        self.interventions = interventions
        specs = {x.spec.layer: x.spec for x in interventions}
        if any(x.spec != specs[x.spec.layer] for x in interventions):
            raise ValueError(
                f"hooks of {interventions[0].spec.architecture} were made for different models, or some of them before "
                "the model was changed: make them again, for one model"
            )
        self.layers = {
            layer: layer_edits(spec, [x for x in interventions if x.spec.layer == layer])
            for layer, spec in sorted(specs.items())
        }
        # By the own name of a hook point, the layers that it serves: several may share keys.
        self.places: dict[str, list[tuple[int, str]]] = {}
        for layer, edits in self.layers.items():
            for own, name in edits.spec.points.items():
                if name in edits.names:
                    self.places.setdefault(own, []).append((layer, name))
        self.names = {*self.places, *(name for edits in self.layers.values() for name in edits.names)}
        self.tools = sorted({each.edit.tool for each in interventions})
        self._seen: dict[int, dict[str, Tensor]] = {}  # by layer and hook, in the pass that is running

    def __repr__(self) -> str:  # TransformerLens calls it for every hook
        return f"<hook of {' + '.join(self.tools)}>"

    def accepts(self, name: str) -> bool:
        """Say whether the hook of this name is needed; TransformerLens asks when it installs the function."""
        return name in self.names

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        point = getattr(hook, "_target", hook)
        if point.name != hook.name:  # compatibility mode calls once more for each alias
            return None
        new: Tensor | None = None
        for layer, name in self.places.get(point.name, []):
            changed = self._at(self.layers[layer], name, x)
            new = changed if new is None else new  # only the layer to which the hook belongs changes the tensor
        return new

    def _at(self, edits: LayerEdits, name: str, x: Tensor) -> Tensor | None:
        """Keep what one hook of a layer shows, edit the layer if it is the hook for that, and forget it at the last."""
        seen = self._seen.setdefault(edits.spec.layer, {})
        if name in edits.lent:
            seen[name] = x
            return None
        fired = [each for each in edits.names if each not in edits.lent]
        if name == fired[0]:  # a new pass; of one that was interrupted, only keys of earlier layers may be left
            for each in fired:
                seen.pop(each, None)
        seen[name] = x
        self._check_seen(edits, name, seen)
        layer, new = RunningLayer(edits.spec, seen), None
        if name == edits.at_scores:
            new = edit_scores(edits, layer) if edits.spec.taps.scores else edit_attention_result(edits, layer, x)
        shown = edits.spec.taps.scores or edits.spec.taps.pattern
        if edits.by_slot and shown in seen:  # in some models the pattern fires after the result
            check_whole_text(edits.spec, seen[shown])
        if name == edits.at_result:
            new = edit_results(edits, x if new is None else new)
        if name == fired[-1]:
            if edits.heads and edits.spec.taps.scores is None:
                check_hidden_attention(edits, layer)
            self._seen.pop(edits.spec.layer, None)
        return new

    def _check_seen(self, edits: LayerEdits, name: str, seen: dict[str, Tensor]) -> None:
        """Refuse a layer of which a hook fired before others, or twice."""
        until = [*edits.lent, *(each for each in edits.names if each not in edits.lent)]
        until = until[: until.index(name) + 1]
        if set(until) == set(seen):
            return
        if edits.lent - seen.keys():
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} act on layer {edits.spec.layer}, which attends to the keys of "
                f"layer {edits.spec.taps.keys_of}, and do not see these: run the model from its first layer on"
            )
        raise ValueError(
            f"hooks of {' + '.join(self.tools)} do not see layer {edits.spec.layer} from its beginning, or see it "
            "twice: apply them once, and run the model outside of its own hooks"
        )
