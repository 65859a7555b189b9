"""Plan, before any pass, how the edits of one attention layer are done.

A rotation is edited

1. in the model's rotation tables, if all heads get the same positions;
2. by turning queries and keys, if heads that share keys get the same positions;
3. by recomputing scores, otherwise, and if the running text's table is not the expected one.

Turned vectors could do what tables do, at the same cost, but not to the last bit. Measured on SmolLM2-135M (bridge, 256
tokens, positions reversed on all heads, CPU, median of 9 runs of each in turn): 1.06 passes by tables, 1.07 by vectors.
In bfloat16, logits by tables equal those of ``position_ids``; by vectors, which are rotated and rounded twice, they
differ by up to 0.9 (the reversal itself changes them by up to 15.6).

A model that shows no scores discards edited ones too: its result is computed from them and put in at ``hook_z``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from tl_posdisent.hooks.edits.conflicts import conflict
from tl_posdisent.hooks.edits.edit import Intervention
from tl_posdisent.hooks.edits.rotation_edits import HeadRotation, RotationEdit, compose
from tl_posdisent.hooks.edits.score_edits import ResultEdit, ScoreEdit
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.utils.validation import head_label

Z_OF_VALUES = "the sum of the values at its hooks, weighted by its pattern"

Grouped = dict[HeadRotation, list[int]]
"""Heads, or key heads, grouped by the edits of their rotation."""


class Step(IntEnum):
    """Steps at the hooks of a layer, in the order of the computation (carried out in ``layer_pass.py``)."""

    QUERIES = 1
    SHARED_KEYS = 2
    KEYS = 3
    COSINES = 4
    SINES = 5
    TURN_QUERIES = 6
    TURN_KEYS = 7
    SCORES = 8
    VALUES = 9
    GATE = 10
    PUT_IN = 11
    PATTERN = 12
    RESULT = 13


def at_head(layer: int, head: int) -> str:
    """Name a head in an error."""
    return f"layer {layer}, head {head} ({head_label(layer, head)})"


def grouped(rotations: Iterable[tuple[int, HeadRotation]]) -> Grouped:
    """Group heads by the edits of their rotation."""
    groups: Grouped = {}
    for head, rotation in rotations:
        groups.setdefault(rotation, []).append(head)
    return groups


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The edits of each head of a layer, and how they are carried out.

    Attributes:
        spec: the layer.
        rotations: the edits of each head's rotation.
        score_edits, result_edits: edits of scores, in the order in which they act, and edits of ``z``, each with its
            heads.
        table: edits carried out in the rotation tables, for all heads.
        turned_q, turned_k: heads whose queries are turned, and key heads whose keys are turned.
        rescored: heads whose scores are recomputed.
    """

    spec: AttentionSpec
    rotations: tuple[HeadRotation, ...]
    score_edits: tuple[tuple[ScoreEdit, tuple[int, ...]], ...]
    result_edits: tuple[tuple[ResultEdit, tuple[int, ...]], ...]
    table: HeadRotation
    turned_q: Grouped
    turned_k: Grouped
    rescored: Grouped

    @cached_property
    def heads(self) -> frozenset[int]:
        """Heads whose attention is edited."""
        return frozenset[int]().union(*self.rotated.values(), *(heads for _, heads in self.score_edits))

    @cached_property
    def result_heads(self) -> frozenset[int]:
        """Heads whose result is replaced."""
        return frozenset(head for _, heads in self.result_edits for head in heads)

    @property
    def lent(self) -> frozenset[str]:
        """The hooks of an earlier layer, whose keys and values this layer attends to."""
        taps = (self.spec.k, self.spec.v) if self.spec.keys_of is not None else ()
        return frozenset(tap.name for tap in taps if tap is not None)

    @property
    def writes_result(self) -> bool:
        """Whether an edit of the attention is put in at ``hook_z``."""
        return self.spec.scores is None and bool(self.heads)

    @cached_property
    def rotated(self) -> Grouped:
        """Heads with rotation edits."""
        return grouped((head, rotation) for head, rotation in enumerate(self.rotations) if rotation)

    @cached_property
    def by_place(self) -> bool:
        """Whether an edit depends on the tokens' own positions, not only on the distances between them."""
        return any(edit.by_place for rotation in self.rotations for edit in rotation.edits)

    @property
    def needs_positions(self) -> bool:
        """Whether the running text's positions must be read from its rotation."""
        return bool(self.rotated) or self.reads_vectors

    @cached_property
    def reads_vectors(self) -> bool:
        """Whether queries and keys before rotation are needed."""
        return bool(self.rescored or any(edit.vectors for edit, _ in self.score_edits))

    @cached_property
    def counts(self) -> bool:
        """Whether an edit needs the index of queries and keys in their text."""
        return any(edit.counts for edit, _ in self.score_edits)

    @cached_property
    def recomputes(self) -> bool:
        """Whether scores are computed from queries and keys."""
        reads_scores = any(edit.scores for edit, _ in self.score_edits)
        return bool(self.rescored or (self.spec.scores is None and reads_scores))

    @cached_property
    def turned_before(self) -> bool:
        """Whether vectors are turned at a hook before the rotation, when the running table is not yet known."""
        before = self.spec.turn_q is not None and self.spec.q is not None and self.spec.turn_q.name == self.spec.q.name
        turned = [*self.turned_q, *self.turned_k]
        return before and any(each.of_positions or each.noise or each.patched for each in turned)

    def alike(self, heads: Iterable[int]) -> Grouped:
        """Group heads by the edits of their rotation."""
        return grouped((head, self.rotations[head]) for head in heads)

    @cached_property
    def steps(self) -> dict[str, list[Step]]:
        """The steps at each hook, by its name, in the order in which the hooks fire."""
        spec = self.spec
        places: list[tuple[Step, Tap | str | None]] = []
        if self.heads:
            places += [(Step.QUERIES, spec.q), (Step.SHARED_KEYS, spec.k and spec.k.shared), (Step.KEYS, spec.k)]
            places += [(Step.COSINES, spec.cos), (Step.SINES, spec.sin)]
            places += [(Step.TURN_QUERIES, spec.turn_q), (Step.TURN_KEYS, spec.turn_k), (Step.SCORES, spec.scores)]
            if spec.scores is None:
                places += [
                    (Step.VALUES, spec.v),
                    (Step.GATE, spec.gate),
                    (Step.PUT_IN, spec.z),
                    (Step.PATTERN, spec.pattern),
                ]
        if self.result_edits:
            places.append((Step.RESULT, spec.z or hook_name(spec.layer, "hook_z")))
        steps: dict[str, list[Step]] = {}
        for step, where in places:
            if where is not None:
                steps.setdefault(where.name if isinstance(where, Tap) else where, []).append(step)
        fired = list(spec.points.values())
        return dict(sorted(steps.items(), key=lambda at: fired.index(at[0]) if at[0] in fired else len(fired)))


def can_rescore(spec: AttentionSpec) -> bool:
    """Say whether edited scores reach the output of a layer: at the hook of its scores, or by its result."""
    return spec.puts_in_result if spec.scores is None else spec.scores_editable


def plan_layer(spec: AttentionSpec, interventions: Sequence[Intervention]) -> LayerPlan:
    """Plan the edits of a layer; raise if they conflict or if the layer lacks the hooks for them."""
    acting = [(each.edit, each.heads) for each in interventions]
    rotations = tuple(
        compose([edit for edit, heads in acting if isinstance(edit, RotationEdit) and head in heads])
        for head in range(spec.n_heads)
    )
    score_edits = [(edit, heads) for edit, heads in acting if isinstance(edit, ScoreEdit)]
    score_edits.sort(key=lambda pair: (pair[0].order, pair[0].call))
    result_edits = [(edit, heads) for edit, heads in acting if isinstance(edit, ResultEdit)]
    table = _in_tables(spec, rotations)
    plan = LayerPlan(
        spec, rotations, tuple(score_edits), tuple(result_edits), table, *_turned_and_rescored(spec, rotations, table)
    )
    _check_conflicts(plan)
    _check_hooks(plan)
    return plan


def _in_tables(spec: AttentionSpec, rotations: Sequence[HeadRotation]) -> HeadRotation:
    """Return the edits that the rotation tables can express: those shared by all heads, and by queries and keys."""
    shared = {rotation.of_positions for rotation in rotations}
    first = rotations[0].of_positions
    position = first.position
    alike = position is None or not position.distances_only
    return first if len(shared) == 1 and alike and spec.cos and spec.sin else HeadRotation()


def _turned_and_rescored(
    spec: AttentionSpec, rotations: Sequence[HeadRotation], table: HeadRotation
) -> tuple[Grouped, Grouped, Grouped]:
    """Turn queries and keys of groups whose heads all get the same keys; recompute the scores of the other heads."""
    left = [HeadRotation(tuple(edit for edit in each.edits if edit not in table.edits)) for each in rotations]
    turnable = spec.turn_q is not None and spec.turn_k is not None
    turned_q: Grouped = {}
    turned_k: Grouped = {}
    rescored: Grouped = {}
    for group in range(spec.n_kv_heads):
        heads = [head for head in range(spec.n_heads) if spec.key_head(head) == group]
        keys = {left[head].of_keys for head in heads}
        together = turnable and len(keys) == 1 and not any(each.pairwise for each in keys)
        if together and (shared := next(iter(keys))):
            turned_k.setdefault(shared, []).append(group)
        for head in heads:
            if left[head]:
                turned = together or (spec.turn_q is not None and not left[head].of_keys)
                (turned_q if turned else rescored).setdefault(rotations[head], []).append(head)
    return turned_q, turned_k, rescored


def _check_conflicts(plan: LayerPlan) -> None:
    """Refuse edits that cannot act on the same head."""
    for head in sorted(plan.heads | plan.result_heads):
        scores = [edit for edit, heads in plan.score_edits if head in heads]
        results = [edit for edit, heads in plan.result_edits if head in heads]
        if problem := conflict(plan.rotations[head], scores, results):
            raise ValueError(f"{at_head(plan.spec.layer, head)}: {problem}")


def _check_hooks(plan: LayerPlan) -> None:
    """Refuse a layer that lacks the hooks for its edits."""
    spec = plan.spec
    if not (plan.rescored or plan.score_edits):
        return
    if not can_rescore(spec):
        why = (
            f"shows no scores, and its hook_z is not {Z_OF_VALUES}" if spec.scores is None else "discards edited scores"
        )
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture} {spec.problem or why}: edit its results (ablate_heads) or the "
            "rotation of all heads that share keys, or load the model with the other backend"
        )
    if (plan.recomputes or plan.reads_vectors) and (spec.q is None or spec.k is None):
        raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
    if plan.recomputes:
        spec.require_scale()
