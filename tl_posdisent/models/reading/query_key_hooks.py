"""Read and write query, key and value vectors at a model's hooks, whatever the layout of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

Layout = Literal["pos head", "head pos", "flat"]


@dataclass(frozen=True)
class Tap:
    """A hook at which queries, keys, values or gates can be read, and the layout of its tensor.

    Attributes:
        name: the hook's full name.
        layout: ``[batch, pos, head, d_head]``, ``[batch, head, pos, d_head]`` or ``[batch, pos, head * d_head]``.
        n_heads: number of heads at this hook (key heads for keys).
        norm: what the model applies between this hook and its use, if anything: a QK-norm, or the function of a gate.
    """

    name: str
    layout: Layout
    n_heads: int
    norm: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the norm, which belongs to the model."""
        return vars(self) | {"norm": None if self.norm is None else _lost_norm}

    def read(self, x: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        """Convert the hook's tensor to vectors, with QK-norm applied."""
        if self.layout == "flat":
            x = rearrange(x, "... (head d_head) -> ... head d_head", head=self.n_heads)
        elif self.layout == "head pos":
            x = x.transpose(1, 2)
        return x if self.norm is None else self.norm(x)

    def write(self, x: Float[Tensor, "batch pos head d_head"]) -> Tensor:
        """Convert vectors to the hook's tensor; valid only if no norm follows the hook."""
        if self.layout == "flat":
            return x.flatten(-2)
        return x.transpose(1, 2) if self.layout == "head pos" else x


def _lost_norm(x: Tensor) -> NoReturn:
    raise ValueError(
        "the QK-norm of a pickled reading is not known, it is the model's: read the model again (read_model)"
    )
