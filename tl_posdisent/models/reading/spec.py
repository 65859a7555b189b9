"""Describe one attention layer: rotation, scale, mask, grouping of heads, and the hooks that work.

``read_model`` (``model_reading.py``) measures these by running the model, so that other code need not depend on the
model's class or architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.rope.rotary import Rotary, rotate
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import no_autocast


@dataclass(frozen=True)
class AttentionSpec:
    """Properties of one layer's attention, as measured on the running model.

    Attributes:
        layer: index of the layer.
        architecture: the model's architecture, for messages.
        n_heads, n_kv_heads, d_head: number of query heads, number of key/value heads, head size; query head h reads key
            head ``h // (n_heads // n_kv_heads)``.
        causal: whether keys after the query are hidden.
        window: number of keys that a query sees, including its own; None for all.
        rotary: frequencies and pairing as the layer uses them; None if it does not rotate.
        scale: scores are ``scale * ⟨q, k⟩`` of the rotated vectors, before the soft cap; None if they are not.
        soft_cap: ``c`` in ``c * tanh(scores / c)``; None if there is none.
        q, k: hooks of the vectors before rotation and after any QK-norm; None if none fires.
        q_rot, k_rot: hooks of the rotated vectors; None if there are none.
        cos: the hook of the rotation's table of cosines; None if there is none.
        scores: the hook of the scores; None if it does not fire or does not carry scores.
        scores_editable: whether an edit at ``scores`` reaches the output.
        pattern, z, v: the hooks of pattern, output and values; None if they do not fire, and ``v`` if z is not the sum
            of its values in a layer that shows no scores.
        keys_of: the layer whose keys and values it attends to, if it has none of its own (at ``k`` and ``v``).
        gate: the hook of what multiplies z before the output projection, in a layer that shows no scores; None for
            nothing.
        holds_to: the most tokens of a text for which all this is true, from the model's configuration; None for any.
            Longer texts are refused: the layer rotates them by other frequencies (longrope, dynamic NTK), scales their
            scores by position, or hides the keys of earlier chunks.
        beyond: what the layer does with longer texts, for messages.
        scaled: whether a rotating layer scales scores at positions from ``holds_to`` on by the position.
        masked_below: cells at or below this value are masked (see ``is_masked``).
        shows_mask: whether the scores show which cells are masked; False if the mask is applied behind their hook.
        problem: why scores cannot be recomputed from q and k; None if they can.
        no_rotation: why the layer's rotation cannot be read or changed; None if it can.
        certain: False if all its queries or keys were 0, which fits every rotation and scale: the layer is then read
            again at each use.
        points: the model's hook points, held weakly, with the names above, and the first hook of a pass.
    """

    layer: int
    architecture: str
    n_heads: int
    n_kv_heads: int
    d_head: int
    causal: bool
    window: int | None
    rotary: Rotary | None = None
    scale: float | None = None
    soft_cap: float | None = None
    q: Tap | None = None
    k: Tap | None = None
    q_rot: Tap | None = None
    k_rot: Tap | None = None
    cos: str | None = None
    scores: str | None = None
    scores_editable: bool = False
    pattern: str | None = None
    z: str | None = None
    v: Tap | None = None
    gate: Tap | None = None
    keys_of: int | None = None
    holds_to: int | None = None
    beyond: str = ""
    scaled: bool = False
    masked_below: float = -1e30
    shows_mask: bool = True
    problem: str | None = None
    no_rotation: str | None = None
    certain: bool = True
    points: Mapping[Any, str] = field(default_factory=dict, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionSpec:
        """Return a shallow copy: hook points and norms remain those of the model."""
        fresh = replace(self)
        memo[id(self)] = fresh
        return fresh

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the hook points, which belong to a model in this process."""
        return vars(self) | {"points": {}}

    @property
    def kind(self) -> str:
        """``"local"`` with a sliding window, else ``"global"``."""
        return "global" if self.window is None else "local"

    @property
    def puts_in_result(self) -> bool:
        """Whether the layer shows no scores, and the result of edited ones can be put in at ``hook_z``."""
        return self.scores is None and None not in (self.v, self.z, self.pattern)

    def sees(self, distance: Int[Tensor, "*cells"]) -> Bool[Tensor, "*cells"]:
        """Say whether the layer's mask lets a query see a key at this distance."""
        near = distance.abs() < (self.window or torch.iinfo(torch.int64).max)
        return near & (distance >= 0) if self.causal else near

    def mask(self, length: int, device: torch.device | str = "cpu") -> Bool[Tensor, "query key"]:
        """Return the layer's mask for a text without padding: True where a query sees a key."""
        return self.sees(cell_distances(length, length, device))

    def is_masked(self, scores: Float[Tensor, "*cells"]) -> Bool[Tensor, "*cells"]:
        """Find the cells that are masked in a run of this model, for any reason (including padding)."""
        return scores <= self.masked_below

    def check_mask(self, scores: Float[Tensor, "batch head row key"], rows: Tensor) -> Bool[Tensor, "row key"]:
        """Return the cells inside the layer's mask in some rows; raise if the model masks other cells."""
        inside = self.sees(rows[:, None] - torch.arange(scores.shape[-1], device=rows.device))
        # In float16 a score may be as large as a mask value; only a number beyond all scores is certainly masked.
        half = torch.finfo(torch.float16).min
        hidden = scores <= (half if self.masked_below > half else self.masked_below)
        if bool((hidden & inside).any() | (~self.is_masked(scores) & ~inside).any()):
            raise ValueError(self.other_mask(scores.shape[-1]))
        return inside

    def other_mask(self, length: int) -> str:
        """Return the error message for a mask other than the one read, of a text of this length."""
        if self.holds_to is not None and length > self.holds_to:
            return f"tokens must be at most {self.holds_to} long, got {length}: {self.why_limited}"
        return (
            f"layer {self.layer} of {self.architecture}: the model's mask is not the one that was read from it "
            f"({'causal' if self.causal else 'full'}, window {self.window}): for padded texts pass "
            "attention_mask= (1 at tokens, 0 at padding), and pass packed texts one at a time"
        )

    def key_head(self, head: int) -> int:
        """Return the key head that a query head reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def per_query_head(self, x: Float[Tensor, "batch pos kv d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        """Repeat keys or values so that each query head has its own (a view if there is nothing to repeat)."""
        repeats = self.n_heads // x.shape[2]
        return x if repeats == 1 else repeat(x, "batch pos kv d -> batch pos (kv group) d", group=repeats)

    def rotated(self, x: Float[Tensor, "batch pos h d_head"], positions: Tensor) -> Tensor:
        """Rotate queries or keys to these positions as the model does (unchanged in a layer without rotation)."""
        return x if self.rotary is None else rotate(x, positions, self.rotary)

    @no_autocast()
    def score(
        self, q_rot: Float[Tensor, "batch query head d_head"], k_rot: Float[Tensor, "batch key kv d_head"]
    ) -> Float[Tensor, "batch head query key"]:
        """Compute scores of rotated queries and keys, soft cap applied, mask not.

        Also accepts some heads only, with one key head each.
        """
        # group query heads with the key head that they share
        grouped = rearrange(q_rot, "batch query (kv group) d -> batch query kv group d", kv=k_rot.shape[2])
        scores = torch.einsum("bqghd,bkgd->bghqk", grouped, k_rot).flatten(1, 2)
        return self.capped(scores * self.require_scale())

    @no_autocast()
    def gathered(
        self,
        pattern: Float[Tensor, "batch head query key"],
        v: Float[Tensor, "batch key kv d_value"],
        gate: Float[Tensor, "batch query head d_gate"] | None = None,
    ) -> Float[Tensor, "batch query head d_value"]:
        """Compute z from a pattern, values and the gate, in the wider of their dtypes.

        Also accepts some heads only, with one value head each.
        """
        wide = torch.promote_types(pattern.dtype, v.dtype)
        grouped = rearrange(pattern.to(wide), "batch (kv group) query key -> batch kv group query key", kv=v.shape[2])
        z = torch.einsum("bkgqj,bjkd->bqkgd", grouped, v.to(wide)).flatten(2, 3)
        return z if gate is None else z * gate

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the soft cap, if the layer has one."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def require_scale(self) -> float:
        """Return the scale, or raise a ``ValueError`` that says why there is none."""
        if self.problem is not None or self.scale is None:
            raise ValueError(f"layer {self.layer} of {self.architecture}: {self.problem}")
        return self.scale

    def check_length(self, length: int, tool: str) -> None:
        """Raise if a text is longer than ``holds_to``."""
        if self.holds_to is not None and length > self.holds_to:
            raise ArgumentError(
                "tokens",
                f"must be at most {self.holds_to} long for {tool}, got {length}: {self.why_limited}",
            )

    @property
    def why_limited(self) -> str:
        """Why texts longer than ``holds_to`` are refused, for messages."""
        return f"layer {self.layer} of {self.architecture} {self.beyond} in longer texts; give shorter ones"

    def require_rotary(self, tool: str) -> Rotary:
        """Return the rotary of a layer whose rotation can be changed, or raise an error that says what is missing."""
        if self.rotary is None or self.no_rotation is not None:
            missing = "has no rotary position embedding" + (f": {self.problem}" if self.problem else "")
            raise ValueError(
                f"{tool} needs rotary position embeddings (RoPE) that hooks can reach, but layer {self.layer} of "
                f"{self.architecture} {self.no_rotation or missing}"
            )
        return self.rotary


def most_limited(specs: Iterable[AttentionSpec]) -> AttentionSpec | None:
    """Return the spec with the least ``holds_to``; None if none has a limit."""
    limited = [spec for spec in specs if spec.holds_to is not None]
    return min(limited, key=lambda spec: spec.holds_to or 0, default=None)


def masked_below(*dtypes: torch.dtype) -> float:
    """Return the value at or below which a cell is masked, in a model that computes its scores in these dtypes.

    Models mask with -inf or add the most negative number (or half of it) of their dtype to the score, which in 16 bits
    gives a value slightly above that number.
    """
    return max([-1e30, *(torch.finfo(dtype).min / 4 for dtype in dtypes if dtype.is_floating_point)])
