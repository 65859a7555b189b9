"""Plan how the edits of one attention layer are done: by rotation tables, by turning vectors, or by scores anew.

A rotation is edited

1. in the model's rotation tables, where all heads get the same positions;
2. by turning queries and keys, where heads that share keys get the same;
3. by recomputing scores, otherwise, and where the running text's table is not the expected one.

Where a model discards edited scores, the attention's result is recomputed from them and put in at ``hook_z``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tl_posdisent.hooks.edits.rotation import Edit, HeadRotation, PositionMap, RotationEdit, compose
from tl_posdisent.hooks.edits.scores import ResultEdit, ScoreEdit, score_conflict
from tl_posdisent.models.reading.forward import hook_name
from tl_posdisent.models.reading.spec import AttentionSpec, Tap
from tl_posdisent.utils.validation import head_label

Placed = tuple[Edit, tuple[int, ...]]
"""An edit, and the heads of the layer on which it acts."""


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
        self.result_heads = [head for _, heads in self.result_edits for head in heads]
        for head in sorted({*self.heads, *self.result_heads}):
            if problem := self._conflict(head):
                raise ValueError(f"layer {spec.layer}, head {head} ({head_label(spec.layer, head)}): {problem}")
        self.table = self._table()
        self.turned_q: dict[HeadRotation, list[int]] = {}
        self.turned_k: dict[HeadRotation, list[int]] = {}
        self.rescored: dict[HeadRotation, list[int]] = {}
        self._choose()
        self.reads_vectors = bool(self.rescored or any(edit.vectors for edit, _ in self.score_edits))
        self._check()
        self.roles = self._roles()

    def _conflict(self, head: int) -> str | None:
        acting = [edit for edit, heads in self.score_edits if head in heads]
        problem = self.rotations[head].conflict() or score_conflict(acting, self.rotations[head])
        results = sorted(edit.tool for edit, heads in self.result_edits if head in heads)
        if problem is None and len(results) > 1:
            return f"{' and '.join(results)} replace what it gathers: replace it once"
        return problem

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
            if len(keys) == 1 and turnable and not any(each.pairwise for each in keys):
                (shared,) = keys
                if shared:
                    self.turned_k.setdefault(shared, []).append(group)
                for head in heads:
                    if self._left(self.rotations[head]):
                        self.turned_q.setdefault(self.rotations[head], []).append(head)
                continue
            for head in heads:
                rotation = self.rotations[head]
                if self._left(rotation.of_keys) or (rotation and spec.turn_q is None and self._left(rotation)):
                    self.rescored.setdefault(rotation, []).append(head)
                elif self._left(rotation):
                    self.turned_q.setdefault(rotation, []).append(head)

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
        """What is done at each hook."""
        spec = self.spec
        names: list[tuple[str, Tap | str | None]] = []
        if self.heads:
            names += [("q", spec.q), ("k", spec.k), ("cos", spec.cos), ("sin", spec.sin)]
            names += [("turn_q", spec.turn_q), ("turn_k", spec.turn_k), ("scores", spec.scores)]
            if not self.editable:
                names += [("v", spec.v), ("z", spec.z), ("pattern", spec.pattern)]
        if self.result_edits:
            names.append(("result", spec.z or hook_name(spec.layer, "hook_z")))
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
        recomputed = self.rescored or (spec.scores is None and any(edit.scores for edit, _ in self.score_edits))
        if (recomputed or self.reads_vectors) and (spec.q is None or spec.k is None):
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
        if recomputed:
            spec.require_scale()
