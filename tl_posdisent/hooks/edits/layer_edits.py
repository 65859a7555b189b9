"""Which edits act on which heads of a layer, what they need to see, and which layers and combinations are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tl_posdisent.hooks.edits.conflicts import conflict
from tl_posdisent.hooks.edits.edit import Intervention
from tl_posdisent.hooks.edits.head_edits import HeadRotation, compose
from tl_posdisent.hooks.edits.rotation_edits import RotationEdit
from tl_posdisent.hooks.edits.score_edits import ResultEdit, ScoreEdit
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.utils.validation import head_label


@dataclass(frozen=True, eq=False)
class LayerEdits:
    """The edits of each head of a layer.

    Attributes:
        spec: the layer.
        rotations: the edits of each head's rotation.
        score_edits, result_edits: edits of scores, in the order in which they act, and edits of ``z``, each with its
            heads.
    """

    spec: AttentionSpec
    rotations: tuple[HeadRotation, ...]
    score_edits: tuple[tuple[ScoreEdit, tuple[int, ...]], ...]
    result_edits: tuple[tuple[ResultEdit, tuple[int, ...]], ...]

    @cached_property
    def rotated(self) -> dict[HeadRotation, list[int]]:
        """Heads with edits of their rotation, by these edits."""
        return {rotation: heads for rotation, heads in self.alike(range(self.spec.n_heads)).items() if rotation}

    @cached_property
    def heads(self) -> list[int]:
        """Heads whose scores are edited."""
        rotated = (head for heads in self.rotated.values() for head in heads)
        return sorted({*rotated, *(head for _, heads in self.score_edits for head in heads)})

    @cached_property
    def recomputed(self) -> list[int]:
        """Heads whose scores must be those of queries, keys and rotation."""
        if self.spec.taps.scores is None:
            return self.heads
        rotated = (head for heads in self.rotated.values() for head in heads)
        return sorted({*rotated, *(head for edit, heads in self.score_edits if edit.vectors for head in heads)})

    @cached_property
    def by_place(self) -> list[str]:
        """The tools whose edits depend on where a text begins in its row, not only on distances."""
        of_rotations = {edit.tool for rotation in self.rotated for edit in rotation.edits if edit.by_place}
        return sorted(of_rotations | {edit.tool for edit, _ in self.score_edits if edit.by_place})

    @property
    def by_slot(self) -> bool:
        """Whether results are edited at slots of a whole text."""
        return any(edit.by_slot for edit, _ in self.result_edits)

    def alike(self, heads: Iterable[int]) -> dict[HeadRotation, list[int]]:
        """Group heads by the edits of their rotation."""
        groups: dict[HeadRotation, list[int]] = {}
        for head in heads:
            groups.setdefault(self.rotations[head], []).append(head)
        return groups

    # --- hooks

    @property
    def lent(self) -> frozenset[str]:
        """The hooks of an earlier layer, whose keys and values this layer attends to."""
        taps = (self.spec.taps.k, self.spec.taps.v) if self.heads and self.spec.taps.keys_of is not None else ()
        return frozenset(tap.name for tap in taps if tap is not None)

    @property
    def at_scores(self) -> str | None:
        """The hook at which scores are edited: that of the scores or, in a model that shows none, of the result."""
        return (self.spec.taps.scores or self.spec.taps.z) if self.heads else None

    @property
    def at_result(self) -> str | None:
        return (self.spec.taps.z or hook_name(self.spec.layer, "hook_z")) if self.result_edits else None

    @cached_property
    def names(self) -> list[str]:
        """The hooks that are needed, in the order in which they fire."""
        taps = self.spec.taps
        vectors: list[Tap | None] = []
        names: list[str | None] = [self.at_scores, self.at_result]
        if self.heads:
            vectors += [taps.q, taps.k]
            if taps.scores is None:
                vectors += [taps.v, taps.gate]
                names.append(taps.pattern)
        else:  # so that a list that acts twice is noticed
            names.append(taps.scores or taps.pattern)
        needed = {*names, *(name for tap in vectors if tap for name in tap.names)}
        fired = {name: place for place, name in enumerate(self.spec.points.values())}
        return sorted((name for name in needed if name), key=lambda name: fired.get(name, len(fired)))


def layer_edits(spec: AttentionSpec, interventions: Sequence[Intervention]) -> LayerEdits:
    """Collect the edits of a layer; raise if they conflict or if the layer lacks the hooks for them."""
    acting = [(each.edit, each.heads) for each in interventions]
    rotations = tuple(
        compose([edit for edit, heads in acting if isinstance(edit, RotationEdit) and head in heads])
        for head in range(spec.n_heads)
    )
    score_edits = [(edit, heads) for edit, heads in acting if isinstance(edit, ScoreEdit)]
    score_edits.sort(key=lambda pair: (pair[0].order, pair[0].call))
    result_edits = [(edit, heads) for edit, heads in acting if isinstance(edit, ResultEdit)]
    edits = LayerEdits(spec, rotations, tuple(score_edits), tuple(result_edits))
    _check_conflicts(edits)
    _check_hooks(edits)
    return edits


def _check_conflicts(edits: LayerEdits) -> None:
    """Refuse edits that cannot act on the same head."""
    for head in range(edits.spec.n_heads):
        scores = [edit for edit, heads in edits.score_edits if head in heads]
        results = [edit for edit, heads in edits.result_edits if head in heads]
        if problem := conflict(edits.rotations[head], scores, results):
            layer = edits.spec.layer
            raise ValueError(f"layer {layer}, head {head} ({head_label(layer, head)}): {problem}")


def _check_hooks(edits: LayerEdits) -> None:
    """Refuse a layer that lacks the hooks for its edits."""
    spec = edits.spec
    if not edits.heads:
        return
    if why := spec.why_no_score_edits:
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} {why}: edit its results (ablate_heads), or load the model with "
            "the other backend"
        )
    if edits.rotated or spec.taps.scores is None or any(edit.vectors for edit, _ in edits.score_edits):
        if spec.taps.q is None or spec.taps.k is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.limits.problem}")
        spec.require_scale()
