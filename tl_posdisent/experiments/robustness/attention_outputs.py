"""Read the attention outputs (``hook_z``) of some layers in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.results import at_results


def for_each_output(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[int, Float[Tensor, "batch pos head d_head"]], None],
    hooks: Sequence[Hook] = (),
) -> None:
    """Run the model once with these hooks, and call ``function(layer, z)`` for each of the layers.

    Raises:
        ValueError: a layer without ``hook_z``; outputs that are not finite.
    """
    for spec in specs:
        if spec.taps.z is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture} has no hook_z")
    listeners = [at_results(spec.layer, spec.n_heads, partial(_listen, function, spec.layer)) for spec in specs]
    last = max(spec.layer for spec in specs) + 1
    with applied(model, list(hooks)), running(model) as p:
        p.run(tokens, listeners, stop=None if hooks else last)  # hooks may act later


def _listen(function: Callable[[int, Tensor], None], layer: int, z: Tensor) -> None:
    require_finite(z, layer)
    function(layer, z.detach())


def require_finite(z: Tensor, layer: int) -> None:
    if not bool(torch.isfinite(z).all()):
        raise ValueError(f"the attention outputs of layer {layer} are not finite")
