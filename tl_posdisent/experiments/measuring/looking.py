"""The results of heads under hooks, in a pass that stays unmodified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied_at
from tl_posdisent.models.running.forward_pass import Hook, Pass
from tl_posdisent.models.running.results import at_results

Results = Float[Tensor, "text pos head size"]
"""What the heads of a layer gather (``hook_z``)."""


@torch.no_grad()
def look(
    p: Pass,
    tokens: Int[Tensor, "text pos"],
    hooks: Sequence[Hook],
    unmodified: Mapping[int, Results],
    see: Callable[[int, Results], None],
    before: Any = None,
) -> None:
    """Run texts under hooks, and show what the heads of some layers gather there.

    Each layer hands on its unmodified results, so the pass shows what the hooks change in each layer, given the inputs
    of the unmodified run. Where a pass may begin at any block, one for each layer takes less time than one for all: it
    runs the layer's attention alone.

    Args:
        tokens: texts of equal length.
        hooks: hooks in the attention of these layers.
        unmodified: the results of the heads without hooks, by layer, in ascending order.
        see: called with each layer and the results of its heads under the hooks.
        before: what the block before the first of these layers returns, to begin there; None to run all blocks.
    """

    def visit(layer: int, z: Tensor) -> Tensor:
        see(layer, z)
        return unmodified[layer].to(z)

    first, last = min(unmodified), max(unmodified)
    readers = [at_results(layer, p.model.cfg.n_heads, partial(visit, layer)) for layer in unmodified]
    skipped = p.model.blocks[:first] if before is not None else []
    with applied_at(p.points, hooks), p.skipping(skipped, lambda: before):
        p.run(tokens, readers, stop=p.model.blocks[last].attn)
