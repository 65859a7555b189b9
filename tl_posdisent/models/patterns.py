"""Attention patterns of a forward pass, one layer at a time, of any model that shows them or its scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running

Pattern = Float[Tensor, "batch head query key"]


def for_each_pattern(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[AttentionSpec, Pattern], None],
    *,
    whole: bool = False,
) -> None:
    """Run the model, to its end or up to the last of these layers, and call ``function`` with each spec and pattern.

    The pattern is the model's own, in its dtype; where it is not shown, the softmax of the scores. NaN is refused, at
    the scores where they are shown: in its pattern HookedTransformer puts 0 in the place of NaN.
    """
    hooks: list[Hook] = []
    for spec in specs:

        def refuse(x: Tensor, hook: Any, spec: AttentionSpec = spec) -> None:
            spec.refuse_nan(x)

        def listen(x: Tensor, hook: Any, spec: AttentionSpec = spec) -> None:
            x = x.detach()
            function(spec, x if spec.taps.pattern else masked_softmax(x, ~spec.is_masked(x)))

        read = pattern_or_scores(spec)
        hooks += [(spec.taps.scores or read, refuse), (read, listen)]
    with running(model) as p:
        p.run(tokens, hooks, stop=None if whole else max(spec.layer for spec in specs) + 1)


def pattern_or_scores(spec: AttentionSpec) -> str:
    """Return the hook point of a layer's pattern or, if it shows none, of its scores; raise if it shows neither."""
    name = spec.taps.pattern or spec.taps.scores
    if name is None:
        raise ValueError(f"layer {spec.layer} of {spec.architecture} shows neither its pattern nor its scores")
    return name


def masked_softmax(
    scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"]
) -> Float[Tensor, "batch head query key"]:
    """Compute attention weights under a mask, in float32 (float64 for float64)."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return wide.masked_fill(~inside, -torch.inf).softmax(-1)
