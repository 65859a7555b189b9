"""Scores that no head of the model computes: baselines for the additivity of the scores of its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.capture import Captured, for_each_layer, for_each_scores
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError

ScoreControl = Literal["foreign keys"]
"""Which scores are fitted beside those of the heads: see ``additivity``."""

_Function = Callable[[str, AttentionSpec, Tensor], None]


def for_each_control(
    controls: Sequence[ScoreControl],
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: _Function,
) -> None:
    """Call ``function`` with ``"own"`` or a control, each layer's spec, and the scores ``[batch, head, query, key]``.

    Own scores and those with foreign keys take one pass together, layer by layer.

    Raises:
        ValueError: a layer whose scores cannot be computed from queries and keys; no other keys for a layer with one
            key head.
    """
    if "foreign keys" in controls:
        with_foreign_keys = _foreign_keys(model, tokens, specs)

        def visit(layer: Captured) -> None:
            function("own", layer.spec, layer.scores)
            function("foreign keys", layer.spec, with_foreign_keys(layer))

        for_each_layer(model, tokens, specs, visit)
    else:  # in layers whose scores cannot be computed from queries and keys, too
        for_each_scores(model, tokens, specs, partial(function, "own"))


def _foreign_keys(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: Sequence[AttentionSpec]
) -> Callable[[Captured], Tensor]:
    """Pair queries with the keys of the layer's next key head, or of the model's next layer if there is none.

    Keys of other layers take a pass of their own.
    """
    keys: dict[int, Tensor] = {}
    others: dict[int, int] = {}
    if alone := [spec for spec in specs if spec.n_kv_heads == 1]:
        reading = read_model(model)
        others = {spec.layer: _other_layer(reading, spec) for spec in alone}
        read = reading.specs(sorted({*others.values()}))
        for_each_layer(model, tokens, read, lambda layer: keys.update({layer.layer: layer.k.clone()}), scores=False)

    def scores(layer: Captured) -> Tensor:
        if layer.layer in others:
            positions = torch.arange(tokens.shape[1], device=layer.k.device)
            k_rot = layer.spec.rotated(keys[others[layer.layer]].to(positions.device), positions)
        else:
            k_rot = layer.k_rot.roll(-1, 2)
        return layer.spec.score(layer.q_rot, k_rot)

    return scores


def _other_layer(reading: ModelReading, spec: AttentionSpec) -> int:
    """Return the model's next layer, in turn, with one key head, and with keys of the size of this one's."""
    single = [x for x in reading.attention if x.n_kv_heads == 1 and x.limits.problem is None]
    alike = [x.layer for x in single if x.d_head == spec.d_head and x.layer != spec.layer]
    if not alike:
        raise ArgumentError(
            "controls",
            f'must not have "foreign keys" for layer {spec.layer} of {spec.architecture}: all of its heads share one '
            f"key head, and no other layer has a single one with {spec.d_head} coordinates",
        )
    return next((layer for layer in alike if layer > spec.layer), alike[0])
