"""Forward passes that reuse outputs of an unmodified run.

The model still runs its own forward pass, with its own embedding, masks and rotation tables. Only modules whose output
is known return it without recomputing it. This works for any model that calls its blocks one after the other; callers
check that the output is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.models.running.forward_pass import UNSUPPORTED, Hook, running
from tl_posdisent.models.running.model_parts import hook_name, user_hooks
from tl_posdisent.models.running.results import by_heads
from tl_posdisent.utils.precision import mismatch

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Clean:
    """Stored outputs of one unmodified run."""

    output: Any
    after: dict[int, Any]  # outputs of some blocks
    last: Any  # output of the last block


def run_clean(model: Any, tokens: Int[Tensor, "batch pos"], layers: Sequence[int]) -> Clean:
    """Run the model with its present hooks; store the inputs of these layers and the output of the last."""
    n = len(model.blocks)
    numbers = {x - 1 for x in (*layers, n) if x > 0}
    with running(model) as p, p.keeping([model.blocks[x] for x in numbers]) as kept:
        output = p.run(tokens)
    after = {x: kept[model.blocks[x]] for x in numbers if model.blocks[x] in kept}
    return Clean(output, after, after.get(n - 1))


def run_to(module: Any, model: Any, tokens: Tensor, layer: int, before: Any, hooks: list[Hook], **more: Any) -> Any:
    """Run the model from a layer on, given the output of the block before, and return the output of a module."""
    with running(model) as p, p.skipping(model.blocks[:layer], lambda: before), p.keeping([module]) as kept:
        p.run(tokens, hooks, stop=module, **more)
    return kept[module]


def are_separate(model: Any, text: Int[Tensor, "1 pos"]) -> bool:
    """Say whether each block computes its output from the residual stream and the tokens alone.

    A block may also read what an earlier one left behind: keys, or anything that it keeps. So each is run alone, right
    after a pass of another text.
    """
    blocks, other = list(model.blocks), text.flip(1)
    if torch.equal(other, text):
        return False
    clean = run_clean(model, text, range(len(blocks)))
    with running(model) as p:
        p.run(other)
    for layer in reversed(range(len(blocks))):  # so that no earlier block has run since
        alone = run_to(blocks[layer], model, text, layer, clean.after.get(layer - 1), [])
        if mismatch(hidden(alone), hidden(clean.after[layer])) > 1:
            return False
    return True


def changed_results(
    model: Any, tokens: Int[Tensor, "text pos"], layer: int, before: Any, hooks: Sequence[Hook], *, skip: bool = True
) -> Float[Tensor, "text pos head size"] | None:
    """Return a layer's z (``hook_z``) under hooks; None if it does not fire.

    The blocks before return ``before``, the stored output of the last of them; without ``skip`` they run.
    """
    name = hook_name(layer, "hook_z")
    with running(model) as p, p.skipping(model.blocks[: layer if skip else 0], lambda: before):
        z = p.record(tokens, [name], hooks, stop=model.blocks[layer].attn).get(name)
    return None if z is None else by_heads(z, model.cfg.n_heads)


def run_after(model: Any, tokens: Int[Tensor, "row pos"], last: Any, hooks: Sequence[Hook]) -> Any:
    """Run what follows the last block (norm, unembedding, caps), given the output of that block."""
    with running(model) as p, p.skipping(model.blocks, lambda: last):
        return p.run(tokens, hooks)


def attempted(shortcut: Callable[[], _Result]) -> _Result | None:
    """Call a shortcut and return its result, or None if the model does not support it."""
    try:
        return shortcut()
    except torch.OutOfMemoryError:
        raise
    except UNSUPPORTED:  # a full pass shows whether the model itself fails
        return None


def has_hooks(model: Any) -> bool:
    """Say whether the model has hooks of the user, which may rely on every block to run."""
    return bool(user_hooks(model))


def of_texts(output: Any, texts: Any) -> Any:
    """Select some texts of a block's output, which is a tensor, or a tuple or list that begins with one."""
    if isinstance(output, (tuple, list)):
        return type(output)((output[0][texts], *output[1:]))
    return output[texts]


def hidden(output: Any) -> Any:
    """Return the residual stream from a block's output."""
    return output[0] if isinstance(output, (tuple, list)) else output
