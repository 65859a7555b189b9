"""One attention layer under edits: how each is done.

A rotation is edited

1. in the model's rotation tables, where all heads get the same positions;
2. by turning queries and keys, where heads that share keys get the same;
3. by recomputing scores, otherwise, and where the running text's table is not the expected one.

Where a model discards edited scores, the attention's result is recomputed from them and put in at ``hook_z``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tl_posdisent.hooks.edits.rotation_and_score_edits import (
    Edit,
    HeadRotation,
    PositionMap,
    ResultEdit,
    RotationEdit,
    ScoreEdit,
    compose,
    score_conflict,
)
from tl_posdisent.models.reading.model_parts import hook_name
from tl_posdisent.models.reading.spec import AttentionSpec, Tap
from tl_posdisent.utils.validation import head_label

Placed = tuple[Edit, tuple[int, ...]]
"""An edit, and the heads of the layer on which it acts."""

Grouped = dict[HeadRotation, list[int]]
"""Heads, or key heads, by the edits of their rotation."""


def at_head(layer: int, head: int) -> str:
    return f"layer {layer}, head {head} ({head_label(layer, head)})"


def grouped(rotations: Iterable[tuple[int, HeadRotation]]) -> Grouped:
    groups: Grouped = {}
    for head, rotation in rotations:
        groups.setdefault(rotation, []).append(head)
    return groups


class LayerPlan:
    """What acts on each head of a layer, and how it is done."""

    def __init__(self, spec: AttentionSpec, placed: Sequence[Placed]) -> None:
        self.spec = spec
        self.rotations = [
            compose([edit for edit, heads in placed if isinstance(edit, RotationEdit) and head in heads])
            for head in range(spec.n_heads)
        ]
        self.score_edits = sorted(
            ((edit, heads) for edit, heads in placed if isinstance(edit, ScoreEdit)),
            key=lambda pair: (pair[0].order, pair[0].call),
        )
        self.result_edits = [(edit, heads) for edit, heads in placed if isinstance(edit, ResultEdit)]
        self.heads = {h for edit, some in placed if not isinstance(edit, ResultEdit) for h in some}
        self.result_heads = {h for _, some in self.result_edits for h in some}
        for head in sorted(self.heads | self.result_heads):
            acting = [edit for edit, heads in self.score_edits if head in heads]
            results = sorted(edit.tool for edit, heads in self.result_edits if head in heads)
            problem = self.rotations[head].conflict() or score_conflict(acting, self.rotations[head])
            if not problem and len(results) > 1:
                problem = f"{' and '.join(results)} replace what it gathers: replace it once"
            if problem:
                raise ValueError(f"{at_head(spec.layer, head)}: {problem}")
        self.table = self._table()
        self.turned_q: Grouped = {}
        self.turned_k: Grouped = {}
        self.rescored: Grouped = {}
        self._choose()
        self.reads_vectors = bool(self.rescored or any(edit.vectors for edit, _ in self.score_edits))
        self.counts = any(edit.counts for edit, _ in self.score_edits)
        reads_scores = any(edit.scores for edit, _ in self.score_edits)
        self.recomputes = bool(self.rescored or (spec.scores is None and reads_scores))
        self._check()
        self.roles = self._roles()

    def _table(self) -> HeadRotation:
        """What the rotation tables can express: edits that all heads share, of queries and keys alike."""
        shared = {rotation.of_positions for rotation in self.rotations}
        first = self.rotations[0].of_positions
        position = first.position
        alike = position is None or (isinstance(position, PositionMap) and position.queries is position.keys)
        return first if len(shared) == 1 and alike and self.spec.cos and self.spec.sin else HeadRotation()

    def _choose(self) -> None:
        """Turn queries and keys of the heads of a group where all get the same keys; recompute the others' scores."""
        spec, turnable = self.spec, self.spec.turn_q is not None and self.spec.turn_k is not None
        for group in range(spec.n_kv_heads):
            heads = [head for head in range(spec.n_heads) if spec.key_head(head) == group]
            keys = {self._left(self.rotations[head].of_keys) for head in heads}
            together = turnable and len(keys) == 1 and not any(each.pairwise for each in keys)
            if together and (shared := next(iter(keys))):
                self.turned_k.setdefault(shared, []).append(group)
            for head in heads:
                rotation = self.rotations[head]
                if self._left(rotation):
                    turned = together or (spec.turn_q is not None and not self._left(rotation.of_keys))
                    (self.turned_q if turned else self.rescored).setdefault(rotation, []).append(head)

    def _left(self, rotation: HeadRotation) -> HeadRotation:
        """What the tables do not do."""
        return HeadRotation(tuple(edit for edit in rotation.edits if edit not in self.table.edits))

    @property
    def editable(self) -> bool:
        return self.spec.scores_editable and self.spec.scores is not None

    @property
    def writes_result(self) -> bool:
        """Whether an edit of the attention is put in at ``hook_z``."""
        return not self.editable and bool(self.heads)

    def _roles(self) -> dict[str, list[str]]:
        spec = self.spec
        names: list[tuple[str, Tap | str | None]] = []
        if self.heads:
            names += [("q", spec.q), ("k", spec.k), ("cos", spec.cos), ("sin", spec.sin)]
            names += [("turn_q", spec.turn_q), ("turn_k", spec.turn_k), ("scores", spec.scores)]
            if not self.editable:
                names += [("v", spec.v), ("z", spec.z), ("pattern", spec.pattern)]
        if self.result_edits:
            names.append(("result", spec.z or hook_name(spec.layer, "hook_z")))
            names.append(("keys", None if self.heads else spec.pattern))
        roles: dict[str, list[str]] = {}
        for role, where in names:
            if where is not None:
                roles.setdefault(where.name if isinstance(where, Tap) else where, []).append(role)
        return roles

    def _check(self) -> None:
        """Refuse a layer whose hooks do not serve."""
        spec = self.spec
        if not (self.rescored or self.score_edits):
            return
        if not self.editable and (spec.v is None or spec.pattern is None or spec.z is None):
            raise ValueError(
                f"layer {spec.layer} of {spec.architecture} uses neither edited scores nor an edited hook_z: "
                "its scores cannot be changed"
            )
        if (self.recomputes or self.reads_vectors) and (spec.q is None or spec.k is None):
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
        if self.recomputes:
            spec.require_scale()
