"""Read query, key and value vectors at a model's hooks, whatever the layout of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

Layout = Literal["pos head", "head pos", "flat"]


@dataclass(frozen=True)
class LatentLayout:
    """How multi-head latent attention lays out queries and keys, of which RoPE rotates a slice.

    Attributes:
        content: number of coordinates without rotation, which come first at the hook. ``Tap.read`` puts the rotated
            ones first, as in all other models.
        rotated: number of rotated coordinates.
        shared: the hook whose last coordinates are the rotated slice of the keys, which all heads share; None if the
            slice follows the content of each head.
        latent: the hook of the latent before its norm, which begins with it; None if there is no such latent.
        interleaved: whether the rotation reads pairs of neighbours and writes the first of all pairs before the second
            (DeepSeek V3); ``Tap.read`` then arranges vectors before rotation as those after it.
    """

    content: int
    rotated: int
    shared: str | None = None
    latent: str | None = None
    interleaved: bool = False

    def read(self, x: Float[Tensor, "batch pos head size"], shared: Tensor | None) -> Tensor:
        """Return vectors with the rotated slice first."""
        if self.shared is None:
            turning = x[..., self.content : self.content + self.rotated]
        else:
            assert shared is not None
            turning = shared[:, :, None, -self.rotated :].expand(*x.shape[:3], self.rotated)
        if self.interleaved:
            turning = torch.cat([turning[..., ::2], turning[..., 1::2]], -1)
        return torch.cat([turning, x[..., : self.content]], -1)


@dataclass(frozen=True)
class Tap:
    """A hook at which queries, keys, values or gates can be read, and the layout of its tensor.

    Attributes:
        name: the hook's full name.
        layout: ``[batch, pos, head, d_head]``, ``[batch, head, pos, d_head]`` or ``[batch, pos, head * d_head]``.
        n_heads: number of heads at this hook (key heads for keys).
        norm: what the model applies between this hook and its use, if anything: a QK-norm, or the function of a gate.
        latent: the layout of the vectors of multi-head latent attention.
    """

    name: str
    layout: Layout
    n_heads: int
    norm: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    latent: LatentLayout | None = None

    @property
    def shared(self) -> str | None:
        """The hook of a slice that all heads share, if there is one."""
        return None if self.latent is None else self.latent.shared

    @property
    def names(self) -> tuple[str, ...]:
        """The hooks whose tensors ``read`` takes: its own, and that of the shared slice."""
        return (self.name,) if self.shared is None else (self.name, self.shared)

    def read(self, x: Tensor, shared: Tensor | None = None) -> Float[Tensor, "batch pos head d_head"]:
        """Convert the hook's tensor to vectors, with QK-norm applied.

        ``shared`` is the tensor of the shared slice.
        """
        if self.layout == "flat":
            x = rearrange(x, "... (head d_head) -> ... head d_head", head=self.n_heads)
        elif self.layout == "head pos":
            x = x.transpose(1, 2)
        if self.latent is not None:
            x = self.latent.read(x, shared)
        return x if self.norm is None else self.norm(x)
