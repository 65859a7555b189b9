"""Apply all interventions on one attention layer together, in the way that is most exact for that layer.

Every tool of this folder returns ``LayerHook`` functions, one for each hook of the layer. The first of them at a hook
looks up the others that are registered there and acts for all, so that nothing depends on the order of lists, of
nested ``model.hooks`` or of firing. A rotation is edited

1. in the model's rotation tables, where all heads get the same positions;
2. by turning queries and keys, where heads that share keys get the same;
3. by recomputing scores, otherwise, and where the running text's table is not the expected one.

Where a model discards edited scores, the attention's result is recomputed from them and put in at ``hook_z``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.planning.layer_pass import CachedText, LayerPass
from tl_posdisent.hooks.planning.layer_plan import LayerEdit, LayerPlan, ResultEdit
from tl_posdisent.hooks.planning.rotation_edits import RotationEdit
from tl_posdisent.hooks.planning.score_edits import Order, ScoreEdit, View
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Intervention(LayerEdit):
    """The edit of a hook, and the state of the pass that it leads (one for each thread)."""

    passes: dict[int, LayerPass] = field(default_factory=dict, repr=False)
    memories: dict[int, CachedText] = field(default_factory=dict, repr=False)

    def see(self, others: Sequence[Intervention], name: str, x: Tensor) -> Tensor | None:
        """One hook of a pass under these interventions, of which this is the first."""
        thread = threading.get_ident()
        running = self.passes.get(thread)
        if running is None or name in running.seen or running.plan.edits != list(others):
            plan = LayerPlan(others)
            running = self.passes[thread] = LayerPass(plan, self.memories.setdefault(thread, CachedText()))
        try:
            new = running.see(name, x)
        except BaseException:
            del self.passes[thread]
            self.memories.pop(thread, None)
            raise
        if running.seen == set(running.plan.roles):
            del self.passes[thread]
        return new


@dataclass(frozen=True, eq=False)
class LayerHook:
    """A hook function of one intervention, for ``model.hooks(fwd_hooks=[(name, function)])``."""

    intervention: Intervention
    name: str

    def __call__(self, x: Tensor, hook: Any) -> Tensor | None:
        point = getattr(hook, "_target", hook)
        if point.name != hook.name:  # compatibility mode calls once more for each alias
            return None
        here = registered(point)
        if self not in here:
            raise ValueError(
                f"a hook of {self.intervention.edit.tool} is called by a function that hides it: give the hooks to "
                "model.hooks, run_with_hooks or add_hook as they are"
            )
        if here[0] is not self:
            return None
        if len(set(map(id, here))) < len(here):
            raise ValueError(f"the same hooks of {self.intervention.edit.tool} are applied twice: apply them once")
        acting = [other.intervention for other in here]
        attention = [each for each in acting if not isinstance(each.edit, ResultEdit)]
        new = attention[0].see(attention, self.name, x) if attention else None
        return _results([each for each in acting if isinstance(each.edit, ResultEdit)], x, new)


def registered(point: Any) -> list[LayerHook]:
    """The ``LayerHook`` functions among the hooks of a hook point that will run, in their order."""
    thread = threading.get_ident()
    here = [x for x in point._forward_hooks.values() if getattr(x, "thread", thread) == thread]
    return [found for function in here for found in _within(function)]


def _within(function: Any, depth: int = 6) -> list[LayerHook]:
    """TransformerLens and ``applied`` wrap hook functions in others, which hold them."""
    if isinstance(function, LayerHook):
        return [function]
    if depth == 0:
        return []
    inner: list[Any] = []
    if isinstance(function, functools.partial):
        inner = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, FunctionType):
        inner = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *_cells(function)]
    elif not isinstance(function, (type, torch.nn.Module)):
        inner = list(getattr(function, "__dict__", {}).values())
    found = [hook for each in inner if callable(each) for hook in _within(each, depth - 1)]
    return list(dict.fromkeys(found))


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _results(edits: Sequence[Intervention], x: Tensor, new: Tensor | None) -> Tensor | None:
    """Heads replaced at ``hook_z``, each once, whatever was recomputed there before."""
    replaced: dict[int, str] = {}
    for each in edits:
        assert isinstance(each.edit, ResultEdit)
        for head in each.heads:
            if head in replaced:
                tools = " and ".join(sorted((replaced[head], each.edit.tool)))
                raise ValueError(f"layer {each.layer}, head {head}: {tools} replace what it gathers: replace it once")
            replaced[head] = each.edit.tool
        now = x if new is None else new
        heads = torch.tensor(each.heads, device=now.device)
        new = now.index_copy(2, heads, each.edit.replace(each.heads, now[:, :, heads]).to(now.dtype))
    return new


def layer_hooks(spec: AttentionSpec, heads: Sequence[int], edit: RotationEdit | ScoreEdit) -> list[Hook]:
    """Hooks under which one edit acts on these heads of a layer; refuses a layer that lacks the hooks for it."""
    intervention = Intervention(spec.layer, tuple(heads), edit, spec)
    return [(name, LayerHook(intervention, name)) for name in LayerPlan([intervention]).roles]


def hooks_for(chosen: Iterable[tuple[AttentionSpec, Sequence[int]]], edit: RotationEdit | ScoreEdit) -> list[Hook]:
    """``layer_hooks`` for one edit of several layers."""
    return [hook for spec, heads in chosen for hook in layer_hooks(spec, heads, edit)]


def replace_scores(
    spec: AttentionSpec, heads: Sequence[int], scores: Callable[[View], Tensor], tool: str, *, vectors: bool = False
) -> list[Hook]:
    """Hooks under which these heads attend by the scores that a function returns, whatever their own are."""
    return layer_hooks(spec, heads, ScoreEdit(tool, scores, Order.REPLACE, vectors=vectors))


def result_hook(layer: int, name: str, heads: Sequence[int], edit: ResultEdit) -> Hook:
    """The hook that replaces what these heads gather."""
    return name, LayerHook(Intervention(layer, tuple(heads), edit), name)
