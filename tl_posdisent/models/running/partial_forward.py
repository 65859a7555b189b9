"""Forward passes that reuse outputs of an unmodified run.

The model still runs its own forward pass, with its own embedding, masks and rotation tables. Only modules whose output
is known return it without recomputing it. This is right for a model whose blocks share nothing but the residual stream,
which ``block_facts`` finds out by short passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.running.forward_pass import UNSUPPORTED, Hook, Pass
from tl_posdisent.models.running.model_parts import hook_name, user_hooks
from tl_posdisent.models.running.texts import probe_tokens
from tl_posdisent.utils.precision import mismatch

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BlockFacts:
    """What short passes show about the blocks of a model.

    Attributes:
        separate: whether a pass may begin at any block: each block computes its output from the residual stream and the
            tokens alone, and the model its output from that of the last block.
        heard: the layers in which a change of z (``hook_z``) reaches the output of the block.
        by_token: whether the output is a tensor ``[text, pos, ...]``, so that padding after a text can be cut off.
    """

    separate: bool = False
    heard: frozenset[int] = frozenset()
    by_token: bool = False


def block_facts(p: Pass) -> BlockFacts:
    """Find out by passes of two short texts what the blocks of a model share.

    A block may also read what an earlier one left behind: keys, or anything that it keeps. So each is run alone, right
    after a pass of another text. The user's hooks on the model may rely on every block to run, and on the batch as it
    is: with any, neither is true.
    """
    if user_hooks(p.model):
        return BlockFacts()
    return attempted(partial(_block_facts, p)) or BlockFacts()


def _block_facts(p: Pass) -> BlockFacts:
    blocks, texts = list(p.model.blocks), probe_tokens(p.model)
    text, other = texts[:1], texts[1:]
    with p.keeping(blocks) as kept:
        output = p.run(text)
    after = [kept[block] for block in blocks]
    by_token = isinstance(output, Tensor) and output.ndim == 3 and output.shape[1] == text.shape[1]
    p.run(other)
    try:
        separate = same(run_after(p, text, after[-1]), output)
        alone = {
            layer: hidden(run_from(p, blocks[layer], text, layer, after[layer - 1]))
            for layer in reversed(range(len(blocks)))  # so that no earlier block has run since
        }
        separate = separate and all(same(x, hidden(after[layer])) for layer, x in alone.items())
        heard = frozenset(layer for layer, x in alone.items() if _hears(p, text, layer, after[layer - 1], x))
    except UNSUPPORTED:
        return BlockFacts(by_token=by_token)
    return BlockFacts(separate, heard, by_token)


def _hears(p: Pass, text: Int[Tensor, "1 pos"], layer: int, before: Any, output: Tensor) -> bool:
    """Say whether a block returns something else if z is 0 in its attention."""
    name = hook_name(layer, "hook_z")
    if name not in p.points:
        return False
    without = run_from(p, p.model.blocks[layer], text, layer, before, [(name, lambda z, hook: torch.zeros_like(z))])
    return not torch.equal(hidden(without), output)


def run_from(
    p: Pass,
    module: Any,
    tokens: Int[Tensor, "text pos"],
    layer: int,
    before: Any,
    hooks: Sequence[Hook] = (),
) -> Any:
    """Run the model from a layer on, given the output of the block before, and return the output of a module."""
    with p.skipping(p.model.blocks[:layer], lambda: before), p.keeping([module]) as kept:
        p.run(tokens, hooks, stop=module)
    return kept[module]


def run_after(p: Pass, tokens: Int[Tensor, "text pos"], last: Any) -> Any:
    """Run what follows the last block (norm, unembedding, caps), given the output of that block."""
    with p.skipping(p.model.blocks, lambda: last):
        return p.run(tokens)


def attempted(shortcut: Callable[[], _Result]) -> _Result | None:
    """Call a shortcut and return its result, or None if the model does not support it."""
    try:
        return shortcut()
    except torch.OutOfMemoryError:
        raise
    except UNSUPPORTED:  # a full pass shows whether the model itself fails
        return None


def same(output: Any, expected: Any) -> bool:
    """Say whether two tensors are equal up to rounding; other outputs are not."""
    tensors = isinstance(output, Tensor) and isinstance(expected, Tensor)
    return tensors and output.shape == expected.shape and mismatch(output, expected) <= 1


def of_texts(output: Any, texts: Any) -> Any:
    """Select some texts of a block's output, which is a tensor, or a tuple or list that begins with one."""
    if isinstance(output, (tuple, list)):
        return type(output)((output[0][texts], *output[1:]))
    return output[texts]


def hidden(output: Any) -> Any:
    """Return the residual stream from a block's output."""
    return output[0] if isinstance(output, (tuple, list)) else output
