"""Plan how the edits of one attention layer are done: by rotation tables, by turning vectors, or by scores anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tl_posdisent.hooks.planning.rotation_edits import HeadRotation, RotationEdit, compose
from tl_posdisent.hooks.planning.score_edits import ScoreEdit, score_conflict
from tl_posdisent.models.reading.spec import AttentionSpec, Tap


@dataclass(frozen=True, eq=False)
class ResultEdit:
    """Replacement of what heads gather, at ``hook_z``: from ``[batch, pos, head, d_head]`` to the same."""

    tool: str
    replace: Callable[[Sequence[int], Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LayerEdit:
    """One edit of some heads of one layer; ``spec`` is None for edits of results, which need none."""

    layer: int
    heads: tuple[int, ...]
    edit: RotationEdit | ScoreEdit | ResultEdit
    spec: AttentionSpec | None = None


class LayerPlan:
    """What acts on each head of a layer, and how it is done."""

    def __init__(self, edits: Sequence[LayerEdit]) -> None:
        self.edits = list(edits)
        spec = edits[0].spec
        assert spec is not None
        self.spec = spec
        self.rotations = [self._rotation(head) for head in range(spec.n_heads)]
        self.score_edits = sorted(
            ((each.edit, each.heads) for each in edits if isinstance(each.edit, ScoreEdit)),
            key=lambda pair: (pair[0].order, pair[0].tool),
        )
        for head, rotation in enumerate(self.rotations):
            acting = [edit for edit, heads in self.score_edits if head in heads]
            if problem := rotation.conflict() or score_conflict(acting, rotation):
                raise ValueError(f"layer {spec.layer}, head {head}: {problem}")
        self.table = self._table()
        self.turned_q: dict[HeadRotation, list[int]] = {}
        self.turned_k: dict[HeadRotation, list[int]] = {}
        self.rescored: dict[HeadRotation, list[int]] = {}
        self._choose()
        self.roles = self._roles()
        self.reads_vectors = bool(self.rescored or any(edit.vectors for edit, _ in self.score_edits))
        self._check()

    def _rotation(self, head: int) -> HeadRotation:
        return compose([x.edit for x in self.edits if isinstance(x.edit, RotationEdit) and head in x.heads])

    def _table(self) -> HeadRotation:
        """What the rotation tables can express: edits that all heads share, of queries and keys alike."""
        shared = {rotation.of_positions for rotation in self.rotations}
        first = self.rotations[0].of_positions
        alike = first.position is None or getattr(first.position, "queries", 0) is getattr(first.position, "keys", 1)
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

    def _roles(self) -> dict[str, list[str]]:
        """What is done at each hook. All interventions on a layer share these hooks, whatever they edit."""
        spec = self.spec
        names = [("q", spec.q), ("k", spec.k), ("cos", spec.cos), ("sin", spec.sin)]
        names += [("turn_q", spec.turn_q), ("turn_k", spec.turn_k), ("scores", spec.scores)]
        if not self.editable:
            names += [("v", spec.v), ("z", spec.z), ("pattern", spec.pattern)]
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
