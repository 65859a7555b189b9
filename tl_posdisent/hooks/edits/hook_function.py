"""The one function of a list of hooks, which TransformerLens calls at each of its hook points.

It hands the tensor to the pass of the layer that is running (``layer_pass.py``), and tells passes apart: one after the
other, one within another (within a user's hook), and those of other threads.

Two lists that are installed separately (in nested contexts, for example) must act on different heads, or one on the
attention of a head and the other on its result; otherwise the second to fire raises.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from contextvars import ContextVar
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

from torch import Tensor

from tl_posdisent.hooks.edits.cached_text import CachedText
from tl_posdisent.hooks.edits.edit import Intervention
from tl_posdisent.hooks.edits.layer_pass import LayerPass
from tl_posdisent.hooks.edits.layer_plan import at_head, plan_layer
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.kv_cache import running_cache
from tl_posdisent.models.running.model_parts import FIRST_HOOK

_FIRED: WeakKeyDictionary[Any, tuple[Any, tuple[weakref.ref[Any], ...]]] = WeakKeyDictionary()
"""For each hook point, the hooks installed there when functions of this class last fired, and these. It is kept
outside the model, which could not be pickled with it."""

_INSTALLER: ContextVar[object] = ContextVar("stands for a thread that has installed hooks", default=None)


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
        self.places: WeakKeyDictionary[Any, tuple[int, str] | None] = WeakKeyDictionary(dict.fromkeys(firsts))
        for layer, plan in self.layers.items():
            self.places.update({point: (layer, x) for point, x in plan.spec.points.items() if x in plan.steps})
        self.names = {FIRST_HOOK, *(point.name for point in self.places)}  # a bridge's differ from those in the plan
        self.names.update(name for plan in self.layers.values() for name in plan.steps)
        self.no_cache = next((spec.no_cache for spec in specs.values() if spec.no_cache), None)
        self.tools = sorted({each.edit.tool for each in interventions})
        self.installer: object = None  # the thread that installed it last
        self._state = threading.local()

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
        if _INSTALLER.get() is None:
            _INSTALLER.set(object())
        self.installer = _INSTALLER.get()
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
        place = self.places[point]
        if place is None:  # the first hook of a pass shows which model runs, and whether within another pass
            self._begin()
            return None
        layer, name = place
        self._meet_others(point, layer)
        state = self._in_thread()
        try:
            new = self._see(state, layer, name, x)
        except BaseException:
            state.passes.pop(layer, None)
            state.memories.pop(layer, None)
            raise
        state.returned[name] = None if new is None else weakref.ref(new)
        return new

    def _begin(self) -> None:
        """Begin a pass, which may run inside another one (within a user's hook) or follow an interrupted one."""
        if self.no_cache is not None and running_cache()[1]:
            raise ValueError(self.no_cache)
        state = self._state
        if getattr(state, "passes", None) or getattr(state, "held_up", None):
            level = running_passes()
            state.held_up = {n: kept for n, kept in state.held_up.items() if n < level}
            if level > 1 and state.level < level:
                state.held_up[state.level] = state.passes, state.returned
            state.level, state.passes, state.returned = level, {}, {}

    def _in_thread(self) -> Any:
        """Return the state of the pass that runs in this thread; after an inner pass has ended, that of the outer."""
        state = self._state
        if not hasattr(state, "passes"):
            state.passes, state.memories, state.returned, state.held_up, state.level = {}, {}, {}, {}, 1
        if state.held_up and (level := running_passes()) < state.level and level in state.held_up:
            state.level, (state.passes, state.returned) = level, state.held_up.pop(level)
        return state

    def _see(self, state: Any, layer: int, name: str, x: Tensor) -> Tensor | None:
        """Handle one hook of one layer; a hook that fires again begins a new pass of the layer."""
        running = state.passes.get(layer)
        returned = state.returned.get(name) or (lambda: None)
        if _same_storage(returned(), x) or (
            running is not None and name in running.fired and name != next(iter(running.fired))
        ):
            raise ValueError(f"the same hooks of {' + '.join(self.tools)} are applied twice: apply them once")
        if running is None or name in running.fired:
            if not state.passes:
                state.level = running_passes()
            memory = state.memories.setdefault(layer, CachedText())
            running = state.passes[layer] = LayerPass(self.layers[layer], memory)
        new: Tensor | None = running.at(name, x)
        if running.fired.keys() == running.plan.steps.keys():
            del state.passes[layer]
        return new

    # --- other lists that are installed at the same hook

    def _meet_others(self, point: Any, layer: int) -> None:
        """Refuse other lists that fired here with the same hooks installed, if they act on the same heads."""
        here = _INSTALLER.get()
        if None not in (self.installer, here) and self.installer is not here:
            raise ValueError(
                f"hooks of {' + '.join(self.tools)} were installed by one thread while another thread installs hooks "
                "on a model: TransformerLens's hooks act in every thread, so give each thread a model of its own"
            )
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


def running_passes() -> int:
    """Count the nested forward passes of models with hooks that are running in this thread."""
    n, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and hasattr(type(frame.f_locals.get("self")), "run_with_hooks"):
            n += 1
        frame = frame.f_back
    return n


def _same_storage(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.device.type == "meta" or a.device != b.device:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
