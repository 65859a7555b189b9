"""Which edits cannot act on the same head, and why."""

from __future__ import annotations

from collections.abc import Sequence

from tl_posdisent.hooks.edits.head_edits import HeadRotation
from tl_posdisent.hooks.edits.rotation_edits import (
    DistanceCeiling,
    DistanceMap,
    FrequencyLimit,
    PositionMap,
    PositionScale,
    VectorPatch,
)
from tl_posdisent.hooks.edits.score_edits import Order, ResultEdit, ScoreEdit


def conflict(rotation: HeadRotation, scores: Sequence[ScoreEdit], results: Sequence[ResultEdit]) -> str | None:
    """Say why these edits cannot act on the same head, or return None."""
    return _of_rotations(rotation) or _of_scores(scores, rotation) or _of_results(results)


def _of_rotations(rotation: HeadRotation) -> str | None:
    positions = [e for e in rotation.edits if isinstance(e, (PositionMap, DistanceMap))]
    if len(positions) > 1:
        tools = " and ".join(sorted(e.tool for e in positions))
        return f"{tools} each set its positions: apply at most one position intervention per head"
    patches = [e for e in rotation.edits if isinstance(e, VectorPatch)]
    for which in ("q_rot", "k_rot"):
        if sum(getattr(e, which) is not None for e in patches) > 1:
            return f"{which} is patched twice: patch it once"
    distances = [e for e in rotation.edits if isinstance(e, (DistanceMap, DistanceCeiling))]
    if patches and distances:
        return (
            f"{distances[0].tool} sets distances, not positions, and vectors that are patched are already rotated to "
            "positions of their own: leave one out, or use swap_positions"
        )
    return None


def _of_scores(edits: Sequence[ScoreEdit], rotation: HeadRotation) -> str | None:
    for edit in edits:
        foreign = {e.tool for e in rotation.edits if not isinstance(e, (FrequencyLimit, PositionScale))}
        if edit.plain and foreign:
            return f"{edit.tool} needs the real distances, which {', '.join(sorted(foreign))} changes: leave one out"
        if edit.order != Order.REPLACE:
            continue
        lost = sorted(e.tool for e in edits if e is not edit and e.order in (Order.PATCH, Order.REPLACE))
        if lost:
            return f"{edit.tool} replaces the scores, and {', '.join(lost)} would be lost: leave one out"
        fitted = sorted(e.tool for e in edits if e.order == Order.COMPONENT)
        if edit.hides and fitted:
            return f"{edit.call} leaves no finite scores, which {', '.join(fitted)} fits: leave one out"
    patched: list[str] = [name for edit in edits for name in edit.components]
    if len(set(patched)) < len(patched):
        return "one component of the scores is patched twice: patch it once"
    return None


def _of_results(edits: Sequence[ResultEdit]) -> str | None:
    if len(edits) > 1:
        return f"{' and '.join(sorted(e.tool for e in edits))} replace the head's output: replace it once"
    return None
