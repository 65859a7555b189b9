"""Forward passes that reuse outputs of an unmodified run.

The model still runs itself: its embedding, masks and rotation tables are its own. Only the ``forward`` of modules whose
output is known is temporarily replaced by one that returns it. This works for any model that calls its blocks one after
the other; callers check that the output is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading.forward import UNSUPPORTED, Ended, Hook, hooked, output_of
from tl_posdisent.utils.restoring import restoring, without_gradients

_Result = TypeVar("_Result")
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Clean:
    """One untouched run."""

    output: Any
    after: dict[int, Any]  # what some blocks returned
    last: Any  # what the last block returned


def run_clean(model: Any, tokens: Int[Tensor, "batch pos"], layers: Sequence[int]) -> Clean:
    """Run the model, with the hooks that it has, and keep what comes into these layers, into the last block and out of
    it."""
    after: dict[int, Any] = {}

    def recording(layer: int, own: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            after[layer] = out = own(*args, **kwargs)
            return out

        return forward

    kept = {x - 1 for x in (*layers, len(model.blocks) - 1, len(model.blocks)) if x > 0}
    with without_gradients(), forwards({model.blocks[x]: recording(x, model.blocks[x].forward) for x in kept}):
        return Clean(output_of(model, tokens), after, after.get(len(model.blocks) - 1))


def result_of(module: Any, model: Any, tokens: Tensor, layer: int, before: Any, hooks: list[Hook], **more: Any) -> Any:
    """What a module returns in a pass that begins at a layer, with what the block before returned, and ends there."""
    own, box = module.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        box.append(own(*args, **kwargs))
        raise Ended

    others = {**dict.fromkeys(model.blocks[:layer], lambda *args, **kwargs: before), module: forward}
    with contextlib.suppress(Ended), without_gradients(), forwards(others), hooked(model, hooks):
        output_of(model, tokens, **more)
    return box[0]


def run_after(model: Any, tokens: Int[Tensor, "row pos"], last: Any, hooks: Sequence[Hook]) -> Any:
    """What the model returns where its last block returns ``last``: its own norm, unembedding and caps."""
    known = dict.fromkeys(model.blocks, lambda *args, **kwargs: last)
    with without_gradients(), forwards(known), hooked(model, hooks):
        return output_of(model, tokens)


@contextlib.contextmanager
def forwards(others: dict[Any, Forward]) -> Iterator[None]:
    """Other ``forward``s than their own for some modules, for the duration."""
    before = {module: vars(module).get("forward") for module in others}

    def restore() -> None:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own

    with restoring(restore):
        for module, forward in others.items():
            vars(module)["forward"] = forward  # past __setattr__, which a bridge passes on to what it wraps
        yield


def attempted(shortcut: Callable[[], _Result]) -> _Result | None:
    """What a shortcut returns; None where it fails, so that this model or change does not support it."""
    try:
        return shortcut()
    except torch.OutOfMemoryError:
        raise
    except UNSUPPORTED:  # a full pass says whether the model is to blame
        return None


def has_hooks(model: Any) -> bool:
    """Whether the model has hooks of the user's, which may count on every block to run."""
    return any(not handle.is_permanent for point in model.hook_dict.values() for handle in point.fwd_hooks)


def of_texts(output: Any, texts: Any) -> Any:
    """A block's output, which is a tensor or a tuple or list that begins with it, for a batch of some of its texts."""
    if isinstance(output, (tuple, list)):
        return type(output)((output[0][texts], *output[1:]))
    return output[texts]


def hidden(output: Any) -> Any:
    """The residual stream in a block's output."""
    return output[0] if isinstance(output, (tuple, list)) else output
