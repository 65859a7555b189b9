"""The results of heads at ``hook_z``, with an axis of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.model_parts import hook_name


def by_heads(z: Tensor, n_heads: int) -> Float[Tensor, "batch pos head size"]:
    """Return z with an axis of heads.

    TransformerLens splits the results of all heads by the head size of the configuration, which with latent attention
    is not that of values: it shows 8 heads of 16 coordinates as 16 of 8.
    """
    return z if z.ndim == 4 and z.shape[2] == n_heads else z.flatten(2).unflatten(2, (n_heads, -1))


def at_results(layer: int, n_heads: int, function: Callable[[Tensor], Tensor | None]) -> Hook:
    """Return a hook that calls ``function`` with a layer's z by heads, and puts in what it returns, if anything."""

    def call(z: Tensor, hook: Any) -> Tensor | None:
        new = function(by_heads(z, n_heads))
        return None if new is None else new.reshape(z.shape)

    return hook_name(layer, "hook_z"), call
