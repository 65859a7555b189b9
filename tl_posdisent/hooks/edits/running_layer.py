"""What one forward pass shows in one attention layer: vectors, positions and mask, read when they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.edits.running_mask import RunningMask, running_mask
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec, masked_below
from tl_posdisent.rope.rotary import Rotary

_MARGIN = 0.1  # of the lowest possible score: more than its rounding in any dtype
_NO_BIAS = -500.0  # what users add to a score without masking it is not as low


@dataclass(frozen=True)
class RunningLayer:
    """A layer in one pass.

    Attributes:
        spec: the layer.
        tensors: what its hooks showed in this pass, by name.
    """

    spec: AttentionSpec
    tensors: Mapping[str, Tensor]

    # --- vectors ``[batch, pos, head, d_head]``

    @cached_property
    def q(self) -> Float[Tensor, "batch pos head d_head"]:
        """Queries before rotation."""
        return self._vectors(self.spec.taps.q, self.spec.n_heads)

    @cached_property
    def k(self) -> Float[Tensor, "batch pos kv d_head"]:
        """Keys before rotation."""
        return self._vectors(self.spec.taps.k, self.spec.n_kv_heads)

    @property
    def has_vectors(self) -> bool:
        """Whether scores can be recomputed from queries and keys."""
        return self.spec.limits.problem is None and self.spec.taps.q is not None and self.spec.taps.k is not None

    def _vectors(self, tap: Tap | None, n: int) -> Tensor:
        assert tap is not None
        vectors = tap.read(*(self.tensors[name] for name in tap.names))
        if vectors.shape[2:] != (n, self.spec.d_head):
            heads, size = vectors.shape[2:]
            raise ValueError(
                f"{tap.name} has {heads} heads of size {size}, and {n} of {self.spec.d_head} when the hooks were made: "
                "make the hooks again after changing the model"
            )
        return vectors

    @cached_property
    def wide_q(self) -> Tensor:
        return self.q.to(torch.promote_types(self.q.dtype, torch.float32))

    @cached_property
    def wide_k(self) -> Tensor:
        return self.k.to(torch.promote_types(self.k.dtype, torch.float32))

    @cached_property
    def rotated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as the model rotates them, in float32 (float64 for float64)."""
        both = torch.cat([self.wide_q, self.wide_k], 2)  # angles and tables are computed once
        q, k = self.spec.rotated(both, self.slots).split([self.q.shape[2], self.k.shape[2]], 2)
        return q, k

    def gathered(
        self, pattern: Float[Tensor, "batch head query key"], heads: list[int]
    ) -> Float[Tensor, "batch query head d_value"]:
        """Compute z of some heads from their patterns."""
        spec = self.spec
        assert spec.taps.v is not None
        values = spec.taps.v.read(self.tensors[spec.taps.v.name])[:, :, [spec.key_head(head) for head in heads]]
        tap = spec.taps.gate
        gate = None if tap is None else tap.read(self.tensors[tap.name])[:, :, heads]
        return spec.gathered(pattern, values, gate)

    # --- positions

    @property
    def rotary(self) -> Rotary:
        return self.spec.require_rotary("an edit of the rotation")

    @cached_property
    def slots(self) -> Int[Tensor, " pos"]:
        """Indices in the batch, padding included: the positions of the tokens, but for a constant in each row."""
        shown = self.tensors[self.spec.taps.scores] if self.spec.taps.scores else self.q
        return torch.arange(shown.shape[2 if self.spec.taps.scores else 1], device=shown.device)

    @cached_property
    def distances(self) -> Int[Tensor, "query key"]:
        return self.slots[:, None] - self.slots

    # --- scores and mask

    @cached_property
    def scores(self) -> Float[Tensor, "batch head query key"]:
        """The model's own scores, or, if it does not show them, those of its queries and keys."""
        return self.spec.score(*self.rotated) if self.spec.taps.scores is None else self.tensors[self.spec.taps.scores]

    @cached_property
    def masked_below(self) -> float:
        """The value at or below which a score is masked: no score of these queries and keys is as low, nor any bias.

        Users mask with numbers of any size, such as -1e4 and -1e9, added to a score or in its place.
        """
        spec = self.spec
        if not self.has_vectors:
            return masked_below(self.scores.dtype)
        by_model = masked_below(self.scores.dtype, self.q.dtype)
        q, k = (x.detach().float().norm(dim=-1).amax() for x in (self.q, self.k))
        factor = max(1.0, spec.rotary.attention_factor**2) if spec.rotary else 1.0
        lowest = float(spec.capped(-q * k * abs(spec.require_scale()) * factor))
        return max(by_model, min(_NO_BIAS, lowest - _MARGIN * (1 - lowest)))

    @cached_property
    def mask(self) -> RunningMask:
        if self.spec.taps.scores is None:  # only the pattern shows the mask: it is compared with the layer's afterwards
            return running_mask(self.spec, torch.zeros_like(self.scores[:, :1]), -1.0)
        return running_mask(self.spec, self.scores, self.masked_below)
