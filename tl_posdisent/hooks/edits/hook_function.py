"""The one function of a list of hooks, which TransformerLens calls at each of its hook points.

It hands the tensor to the pass of the layer that is running (``layer_pass.py``). A list acts in one pass at a time, in
the thread that installed it. A pass that is interrupted needs no end: the first hook of the next one begins anew.

Two lists that are installed separately (in nested contexts, for example) must act on different heads, or one on the
attention of a head and the other on its result; otherwise the second to fire raises.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.cached_text import TextSoFar
from tl_posdisent.hooks.edits.edit import Intervention
from tl_posdisent.hooks.edits.layer_pass import take_steps
from tl_posdisent.hooks.edits.layer_plan import at_head, plan_layer
from tl_posdisent.hooks.edits.layer_state import LayerState
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.kv_cache import running_pass
from tl_posdisent.models.running.model_parts import FIRST_HOOK

_FIRED: WeakKeyDictionary[Any, tuple[Any, tuple[weakref.ref[Any], ...]]] = WeakKeyDictionary()
"""For each hook point, the hooks installed there when functions of this class last fired, and these. It is kept
outside the model, which could not be pickled with it."""


@dataclass
class ActivePass:
    """The forward pass in which a list of hooks acts.

    Attributes:
        start: number of tokens of its text in the KV cache that it was given, or 0.
        continues: whether another pass may continue its text, with a KV cache.
        layers: the layers that are running.
        lent: for layers that are to run, by hook, keys and values of earlier layers to which they attend.
        last: the layer that began last.
    """

    start: int
    continues: bool
    layers: dict[int, LayerState] = field(default_factory=dict)
    lent: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    last: int = -1


class HookFunction:
    """The function of a list of hooks, and the filter of names (``accepts``) that says where it is installed."""

    def __init__(self, interventions: tuple[Intervention, ...]) -> None:
        self.interventions = interventions
        specs: dict[int, AttentionSpec] = {}
        same = True
        for each in interventions:
            same = same and specs.setdefault(each.spec.layer, each.spec) is each.spec
        firsts = {point for spec in specs.values() for point, name in spec.points.items() if name == FIRST_HOOK}
        if not same or len(firsts) > 1:
            raise ValueError(
                f"hooks of {interventions[0].spec.architecture} were made for different models, or some of them before "
                "the model was changed: make them again, for one model"
            )
        self.layers = {
            layer: plan_layer(spec, [x for x in interventions if x.spec is spec])
            for layer, spec in sorted(specs.items())
        }
        # A hook point may serve several layers, which share keys; the first of a pass serves none.
        self.places: WeakKeyDictionary[Any, list[tuple[int, str]]] = WeakKeyDictionary({first: [] for first in firsts})
        for layer, plan in self.layers.items():
            for point, name in plan.spec.points.items():
                if name in plan.steps:
                    self.places.setdefault(point, []).append((layer, name))
        self.names = {FIRST_HOOK, *(point.name for point in self.places)}  # a bridge's differ from those in the plan
        self.names.update(name for plan in self.layers.values() for name in plan.steps)
        self.no_cache = next((spec.no_cache for spec in specs.values() if spec.no_cache), None)
        self.tools = sorted({each.edit.tool for each in interventions})
        self.thread = 0  # that installed it last
        self._active: ActivePass | None = None
        self._texts: dict[int, TextSoFar] = {}
        self._first: weakref.ref[Tensor] | None = None  # the tensor at the first hook, until another hook fires

    def __deepcopy__(self, memo: dict[int, Any]) -> HookFunction:
        """Return itself, also in the copy of a model: its hooks call the same function, with the copy's hook points."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "hooks cannot be pickled: they act on the hook points of one model in this process. Pickle what they were "
            "made of (arguments, or the edits of .interventions), and make them again for the model"
        )

    def __repr__(self) -> str:  # TransformerLens calls it for every hook
        return f"<hook of {' + '.join(self.tools)}>"

    def accepts(self, name: str) -> bool:
        """Say whether the hook of this name is needed; TransformerLens asks when it installs the function."""
        self.thread = threading.get_ident()
        self._active = None  # a pass that was interrupted would keep a layer's queries and keys
        return name in self.names

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        point = getattr(hook, "_target", hook)
        if point.name != hook.name:  # compatibility mode calls once more for each alias
            return None
        if point not in self.places:
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} at {hook.name} were made for another model or another hook: make "
                "them for this model, and leave them where they are"
            )
        self._check_thread()
        if not self.places[point]:
            self._begin(x)
            return None
        new: Tensor | None = None
        for layer, name in self.places[point]:
            if name not in self.layers[layer].lent:
                self._meet_others(point, layer)
            try:
                changed = self._see(layer, name, x)
            except BaseException:
                self._active = None
                self._texts.pop(layer, None)
                raise
            new = changed if new is None else new  # only the layer to which the hook belongs changes the tensor
        return new

    def _check_thread(self) -> None:
        """Refuse passes of other threads, in which TransformerLens's hooks act too."""
        # A block that is run again for gradients (checkpointing) may run in a thread of torch's.
        in_backward = torch._C._current_graph_task_id() != -1
        if threading.get_ident() != self.thread and not in_backward:
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} were installed by another thread than the one that runs the "
                "model: install them in the thread that runs it, and give each thread a model of its own"
            )

    def _begin(self, x: Tensor) -> None:
        """Begin a pass at the first hook of the model; one that was interrupted is dropped."""
        if self._first is not None and self._first() is x:
            raise ValueError(f"the same hooks of {' + '.join(self.tools)} are applied twice: apply them once")
        self._first = weakref.ref(x)
        self._active = self._open(min(self.layers))

    def _open(self, layer: int) -> ActivePass:
        """Begin a pass, before this layer adds its keys to a cache."""
        self._active = None
        found = running_pass()
        if found.nested:
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} act in one pass of the model at a time, and the model is run "
                "within one, in a hook: run it before that pass, or run a copy of the model there"
            )
        if found.continues and self.no_cache is not None:
            raise ValueError(self.no_cache)
        keys_of = self.layers[layer].spec.keys_of
        return ActivePass(found.start(layer if keys_of is None else keys_of), found.continues)

    def _see(self, layer: int, name: str, x: Tensor) -> Tensor | None:
        """Handle one hook of one layer."""
        self._first = None
        lent = self.layers[layer].lent
        first = next(each for each in self.layers[layer].steps if each not in lent)
        # A pass may have no first hook: from a later layer on, of given embeddings (as HookedTransformer generates), or
        # of blocks that run again for gradients. Then it begins where a layer is not behind the last one.
        active = self._active
        if active is None or (name == first and layer <= active.last):
            active = self._active = self._open(layer)
        if name in lent:
            active.lent.setdefault(layer, {})[name] = x
            return None
        running = active.layers.get(layer)
        if name != first and (running is None or name in running.fired):
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} do not see layer {layer} from its beginning, or see it twice: "
                "apply them once, run the model outside of its own hooks, and give each thread a model of its own"
            )
        if running is None:
            plan, text = self.layers[layer], self._texts.get(layer, TextSoFar())
            running = active.layers[layer] = LayerState(plan, active.start, active.continues, text, plan.spec)
            active.last = layer
            given = active.lent.pop(layer, {})
            if lent & plan.steps.keys() != given.keys():
                raise ValueError(
                    f"hooks of {' + '.join(self.tools)} act on layer {layer}, which attends to the keys of layer "
                    f"{plan.spec.keys_of}, and do not see these: run the model from its first layer on"
                )
            for each, tensor in given.items():
                take_steps(running, each, tensor)
        new = take_steps(running, name, x)
        self._texts[layer] = running.text
        if running.fired.keys() == running.plan.steps.keys():
            del active.layers[layer]
        return new

    # --- other lists that are installed at the same hook

    def _meet_others(self, point: Any, layer: int) -> None:
        """Refuse other lists that fired here with the same hooks installed, if they act on the same heads."""
        installed = tuple(point._forward_hooks)
        before, fired = _FIRED.get(point, (None, ()))
        lists = [other for ref in fired if (other := ref()) is not None] if before == installed else []
        if self not in lists:
            for other in lists:
                self._refuse(other, layer)
            _FIRED[point] = installed, tuple(weakref.ref(each) for each in (*lists, self))

    def _refuse(self, other: HookFunction, layer: int) -> None:
        mine, theirs = self.layers[layer], other.layers[layer]
        same = (mine.heads & theirs.heads) | (mine.result_heads & theirs.result_heads)
        if mine.writes_result or theirs.writes_result:
            same |= (mine.heads & theirs.result_heads) | (mine.result_heads & theirs.heads)
        if same:
            tools = [" + ".join(each.tools) for each in sorted((self, other), key=lambda each: each.tools)]
            raise ValueError(
                f"{at_head(layer, min(same))}: hooks of {tools[0]} and of {tools[1]} are installed separately: add the "
                "lists, a + b, so that they act together. If one of them is that of an experiment, which cannot be "
                "added: choose other layers or heads for the experiment, or run it without your hooks"
            )
