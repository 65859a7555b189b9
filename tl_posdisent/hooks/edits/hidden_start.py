"""Refuse edits whose result depends on whether the first keys of a text are padding or hidden otherwise.

The model's positions are then the slots of the batch, and no token from a start on sees the keys before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from tl_posdisent.hooks.edits.head_edits import HeadRotation
from tl_posdisent.hooks.edits.running_layer import RunningLayer
from tl_posdisent.hooks.edits.running_mask import other_indices
from tl_posdisent.hooks.edits.score_edits import ScoreEdit, View
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.words import plural


def check_start(layer: RunningLayer, rotations: Iterable[HeadRotation]) -> None:
    """Refuse functions of the position if their result depends on it."""
    mask, positions = layer.mask, layer.positions
    seen = mask.seen.any(1)
    for start in mask.starts.any(0).nonzero()[:, 0].flip(0).tolist():  # the whole block first
        rows = mask.starts[:, start]
        places = positions[start:][seen[rows, start:].any(0)]
        for edit in {edit for rotation in rotations for edit in rotation.edits}:
            if not edit.same_from(places, int(positions[start]), layer.rotary):
                _refuse(layer.spec, edit.tool, int(rows.nonzero()[0]), start)


def check_count(layer: RunningLayer, view: View, edit: ScoreEdit, new: Tensor) -> None:
    """Refuse an edit by the index of tokens in their text if its result, ``new``, depends on it."""
    assert view.index is not None
    for start, index in other_indices(view.index, layer.positions, layer.mask.starts):
        other = edit.edit(replace(view, index=index)).to(new.dtype)
        differs = (view.inside & (other != new)).flatten(1).any(1)
        if bool(differs.any()):
            _refuse(layer.spec, edit.tool, int(differs.nonzero()[0]), start)


def _refuse(spec: AttentionSpec, tool: str, row: int, start: int) -> NoReturn:
    raise ArgumentError(
        "attention_mask",
        f"hides the first {plural(start, 'key')} of row {row} from all later tokens in layer {spec.layer}, and {tool} "
        "depends on whether they are padding or knocked out, which hooks cannot see: for padding, pass position_ids "
        "that begin at 0 behind it, or, if this model does not show its positions, run the text without it; for "
        "keys that are knocked out, give positions or angles for each slot, or sinks=0",
    )
