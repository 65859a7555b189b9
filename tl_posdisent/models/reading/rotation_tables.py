"""A model's own tables of cosines and sines: of a running text, and for other positions."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.rope.rotary import Rotary, from_complex, rotary_from_table, to_complex


def table_like(
    seen: Float[Tensor, "one_or_batch pos columns"], rotary: Rotary, positions: Tensor, which: str
) -> Float[Tensor, "texts rows columns"]:
    """The table (``which`` is ``"cos"`` or ``"sin"``) that the model would have made for ``positions``.

    Computed in the precision and laid out in the columns of ``seen``, the table that it made: one column per subspace,
    or two in either order. At the model's own positions the result is that table to the last bit.
    """
    angle = rotary.angles(positions.to(seen.device)).to(rotary.angle_dtype)
    values = (angle.cos() if which == "cos" else angle.sin()) * rotary.attention_factor
    n = values.shape[-1]
    if seen.shape[-1] == 2 * n:
        halves = torch.equal(seen[..., :n], seen[..., n:])
        values = torch.cat([values, values], -1) if halves else values.repeat_interleave(2, -1)
    return (values if values.ndim == 3 else values[None]).to(seen.dtype)


def running_rotary(
    cos: Float[Tensor, "one_or_batch pos columns"], sin: Float[Tensor, "one_or_batch pos columns"], rotary: Rotary
) -> Rotary:
    """The rotation of a running text, from the tables that it passes to the hooks ``spec.cos`` and ``spec.sin``.

    ``rotary``, as it was read, where these are its tables; otherwise what they show (models may rotate long texts by
    other frequencies). Refuses tables of other positions than 0, 1, 2 …
    """
    positions = torch.arange(cos.shape[1], device=cos.device)
    for which, table in (("cos", cos), ("sin", sin)):
        error = (table - table_like(table, rotary, positions, which)).abs()
        if bool((error > 4 * torch.finfo(table.dtype).eps * rotary.attention_factor).any()):
            return rotary_from_table(cos[0], sin[0], pairing=rotary.pairing)
    return rotary


def rotated_by_table(
    x: Float[Tensor, "batch pos head d_head"],
    cos: Float[Tensor, "one_or_batch pos columns"],
    sin: Float[Tensor, "one_or_batch pos columns"],
    rotary: Rotary,
) -> Float64[Tensor, "batch pos head d_head"]:
    """Queries or keys as a model rotates them that passes these tables to the hooks ``spec.cos`` and ``spec.sin``.

    ``rotary`` tells the pairing alone: the tables may be of any positions and frequencies.
    """
    z, rest = to_complex(x.double(), rotary)
    n = len(rotary.frequencies)

    def one_column_each(table: Tensor) -> Tensor:
        if table.shape[-1] != 2 * n:
            return table
        return table[..., :n] if torch.equal(table[..., :n], table[..., n:]) else table[..., ::2]

    turns = torch.complex(*(one_column_each(table.double()) for table in (cos, sin)))
    return from_complex(z * turns[..., None, :], rest, rotary)
