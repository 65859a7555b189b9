"""Describe one attention layer: what it computes, the hooks that work, and where the description ends.

``read_model`` (``model_reading.py``) takes these from the model's configuration and modules, so that other code need
not depend on the model's class or architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posdisent.models.reading.geometry import Geometry
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import refuse_nan


@dataclass(frozen=True)
class Taps:
    """The hooks at which a layer shows what it computes, each None if there is none.

    Attributes:
        q, k: of the vectors before rotation and after any QK-norm.
        q_rot, k_rot: of the rotated vectors.
        scores: of the scores; None if it does not carry scores.
        pattern, z, v: of pattern, output and values; ``v`` is None if z is not the sum of its values in a layer that
            shows no scores.
        gate: of what multiplies z before the output projection, in a layer that shows no scores; None for nothing.
        keys_of: the layer whose keys and values it attends to (at ``k`` and ``v``), if it has none of its own.
    """

    q: Tap | None = None
    k: Tap | None = None
    q_rot: Tap | None = None
    k_rot: Tap | None = None
    scores: str | None = None
    pattern: str | None = None
    z: str | None = None
    v: Tap | None = None
    gate: Tap | None = None
    keys_of: int | None = None


@dataclass(frozen=True)
class Limits:
    """What cannot be read or edited in a layer, and for which texts.

    Attributes:
        problem: why scores cannot be recomputed from q and k; None if they can.
        masked_below: cells at or below this value are masked (see ``is_masked``); it depends on the model's dtype.
        holds_to: the most tokens of a text for which the description holds, from the model's configuration; None for
            any. Longer texts are refused: the layer rotates them by other frequencies (longrope, dynamic NTK), scales
            their scores by position, or hides the keys of earlier chunks.
    """

    problem: str | None = None
    masked_below: float = -1e30
    holds_to: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Geometry):
    """Properties of one layer's attention; those of ``Geometry`` are its own.

    Attributes:
        layer: index of the layer.
        architecture: the model's architecture, for messages.
        taps: its hooks.
        limits: what cannot be read or edited.
        points: the model's hook points by their names in ``taps``, in the order in which they fire. In a bridge a hook
            point has another name of its own.
        sinks: logits of learned attention sinks, one for each head; None without. They are the model's own.
    """

    layer: int
    architecture: str
    taps: Taps = Taps()
    limits: Limits = Limits()
    points: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    sinks: Float[Tensor, " head"] | None = field(default=None, repr=False, compare=False)

    @property
    def why_no_score_edits(self) -> str:
        """Why edited scores do not reach the output, or an empty string if they do: at their hook, or by the result."""
        return "" if self.taps.scores else self.limits.problem or ""

    @property
    def why_no_result_edits(self) -> str:
        """Why heads cannot be ablated at ``hook_z``, or an empty string if they can."""
        return "" if self.taps.z else "hook_z does not fire, so no head can be ablated"

    def is_masked(self, scores: Float[Tensor, "*cells"]) -> Bool[Tensor, "*cells"]:
        """Find the cells that are masked in a run of this model, for any reason (including padding)."""
        return scores <= self.limits.masked_below

    def check_mask(self, scores: Float[Tensor, "batch head row key"], rows: Tensor) -> None:
        """Raise if the model masks other cells in some rows than those outside the layer's mask."""
        inside = self.sees(rows[:, None] - torch.arange(scores.shape[-1], device=rows.device))
        # In float16 a score may be as large as a mask value; only a number beyond all scores is certainly masked.
        half = torch.finfo(torch.float16).min
        hidden = scores <= (half if self.limits.masked_below > half else self.limits.masked_below)
        more = bool((~self.is_masked(scores) & ~inside).any())
        if more or bool((hidden & inside).any()):
            self.refuse_nan(scores)
            raise ValueError(self.other_mask(scores.shape[-1], more=more))

    def refuse_nan(self, scores: Float[Tensor, "*cells"]) -> None:
        """Raise for scores (a pattern) with NaN or inf, the reason for whatever else is wrong with them."""
        refuse_nan(f"scores of layer {self.layer} of {self.architecture}", scores)

    def other_mask(self, length: int, *, more: bool = False) -> str:
        """Return the error message for a mask other than the one read; raise if the text is longer than it holds.

        ``more`` says that queries see keys that the layer's own mask hides.
        """
        self.check_length(length, "its mask")
        if more:
            return (
                f"layer {self.layer} of {self.architecture}: queries see keys that the mask which was read from it "
                f"hides ({'causal' if self.causal else 'full'}, window {self.window}), as in the two-way prefix of a "
                "prefix LM, or from padding on the left: give texts without a prefix, and for padded texts pass "
                "attention_mask="
            )
        return (
            f"layer {self.layer} of {self.architecture}: the model's mask is not the one that was read from it "
            f"({'causal' if self.causal else 'full'}, window {self.window}): for padded texts pass "
            "attention_mask= (1 at tokens, 0 at padding), or both as tokens={'input_ids': …, 'attention_mask': …}, and "
            "pass packed texts one at a time"
        )

    def require_scale(self) -> float:
        """Return the scale, or raise a ``ValueError`` that says why there is none."""
        if self.limits.problem is not None or self.scale is None:
            raise ValueError(f"layer {self.layer} of {self.architecture}: {self.limits.problem}")
        return self.scale

    def check_length(self, length: int, tool: str) -> None:
        """Raise if a text is longer than ``holds_to``."""
        if self.limits.holds_to is not None and length > self.limits.holds_to:
            raise ArgumentError(
                "tokens",
                f"must be at most {self.limits.holds_to} long for {tool}, got {length}: layer {self.layer} of "
                f"{self.architecture} rotates, scales or masks longer texts in another way; give shorter ones",
            )

    def require_rotary(self, tool: str) -> Rotary:
        """Return the rotary of a layer whose rotation can be changed, or raise an error that says what is missing."""
        if self.rotary is None:
            problem = self.limits.problem
            without = "has no rotary position embedding: fits, head_ablation and attention_ladder need none"
            why = f"cannot be edited: {problem}" if problem else without
            raise ValueError(
                f"{tool} needs rotary position embeddings (RoPE) that hooks can reach, and layer {self.layer} of "
                f"{self.architecture} {why}"
            )
        return self.rotary


def most_limited(specs: Iterable[AttentionSpec]) -> AttentionSpec | None:
    """Return the spec with the least ``holds_to``; None if none has a limit."""
    limited = [spec for spec in specs if spec.limits.holds_to is not None]
    return min(limited, key=lambda spec: spec.limits.holds_to or 0, default=None)


def masked_below(*dtypes: torch.dtype) -> float:
    """Return the value at or below which a cell is masked, in a model that computes its scores in these dtypes.

    Models mask with -inf or add the most negative number (or half of it) of their dtype to the score, which in 16 bits
    gives a value slightly above that number.
    """
    return max([-1e30, *(torch.finfo(dtype).min / 4 for dtype in dtypes if dtype.is_floating_point)])
