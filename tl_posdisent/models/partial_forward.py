"""Forward passes that reuse outputs of an unmodified run.

The model still runs itself: its embedding, masks and rotation tables are its own. Only modules whose output is known
return it without computing it again. This works for any model that calls its blocks one after the other; callers check
that the output is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading.forward_pass import UNSUPPORTED, Hook, running

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Clean:
    """One untouched run."""

    output: Any
    after: dict[int, Any]  # what some blocks returned
    last: Any  # what the last block returned


def run_clean(model: Any, tokens: Int[Tensor, "batch pos"], layers: Sequence[int]) -> Clean:
    """Run the model, with the hooks that it has, and keep the inputs of these layers and the input and output of the
    last."""
    n = len(model.blocks)
    numbers = {x - 1 for x in (*layers, n - 1, n) if x > 0}
    with running(model) as p, p.keeping([model.blocks[x] for x in numbers]) as kept:
        output = p.run(tokens)
    after = {x: kept[model.blocks[x]] for x in numbers if model.blocks[x] in kept}
    return Clean(output, after, after.get(n - 1))


def result_of(module: Any, model: Any, tokens: Tensor, layer: int, before: Any, hooks: list[Hook], **more: Any) -> Any:
    """Run the model from a layer on, given what the block before returned, and return what a module returns."""
    with running(model) as p, p.skipping(model.blocks[:layer], lambda: before), p.keeping([module]) as kept:
        p.run(tokens, hooks, stop=module, **more)
    return kept[module]


def run_after(model: Any, tokens: Int[Tensor, "row pos"], last: Any, hooks: Sequence[Hook]) -> Any:
    """Run what follows the last block (norm, unembedding, caps), given what that block returned."""
    with running(model) as p, p.skipping(model.blocks, lambda: last):
        return p.run(tokens, hooks)


def attempted(shortcut: Callable[[], _Result]) -> _Result | None:
    """Return what a shortcut returns, or None if the model does not support it."""
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
