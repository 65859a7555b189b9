"""What the attention of one layer computes from rotated queries and keys: grouping of heads, mask, rotation, scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.rope.rotary import Rotary, rotate


@dataclass(frozen=True)
class Geometry:
    """The attention of one layer.

    Attributes:
        n_heads, n_kv_heads, d_head: number of query heads, number of key/value heads, head size; query head h reads key
            head ``h // (n_heads // n_kv_heads)``.
        causal: whether keys after the query are hidden.
        window: number of keys that a query sees, including its own; None for all.
        rotary: frequencies and pairing as the layer uses them; None if it does not rotate.
        scale: scores are ``scale * ⟨q, k⟩`` of the rotated vectors, before the soft cap; None if they are not.
        soft_cap: ``c`` in ``c * tanh(scores / c)``; None if there is none.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    causal: bool
    window: int | None
    rotary: Rotary | None = None
    scale: float | None = None
    soft_cap: float | None = None

    @property
    def kind(self) -> str:
        """``"local"`` with a sliding window, else ``"global"``."""
        return "global" if self.window is None else "local"

    def sees(self, distance: Int[Tensor, "*cells"]) -> Bool[Tensor, "*cells"]:
        """Say whether the layer's mask lets a query see a key at this distance."""
        near = distance.abs() < (self.window or torch.iinfo(torch.int64).max)
        return near & (distance >= 0) if self.causal else near

    def mask(self, length: int, device: torch.device | str = "cpu") -> Bool[Tensor, "query key"]:
        """Return the layer's mask for a text without padding: True where a query sees a key."""
        return self.sees(cell_distances(length, length, device))

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
        """Return the scale, or raise a ``ValueError`` if there is none."""
        if self.scale is None:
            raise ValueError("scores are not scale * <q, k> under any rotation, scale and soft cap of this layer")
        return self.scale
