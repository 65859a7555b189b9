"""Tables of rotations that a model stores, with one row for each position up to its context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_posdisent.rope.rotary import Rotary, table_like


def owner_of_sines(model: Any, attn: Any) -> Any | None:
    """Return the module that holds the table of GPT-J and CodeGen (sines, then cosines), or None.

    It is the layer's own, or, since transformers 5.24, one for all layers.
    """
    base = getattr(getattr(model, "original_model", None), "base_model", None)
    for owner in (getattr(attn, "original_component", None), getattr(base, "rotary_emb", None)):
        if isinstance(getattr(owner, "embed_positions", None), Tensor):
            return owner
    return None


class TableSlot(NamedTuple):
    """Where a model keeps a table of rotations with one row per position: ``owner.name``."""

    owner: Any
    name: str
    holds: tuple[str, ...]  # "cos" or "sin", or both side by side
    formula: Callable[[int], Tensor] | None = None  # the model's own function from a length to a table

    @property
    def table(self) -> Tensor:
        table: Tensor = getattr(self.owner, self.name)
        return table


def table_slots(model: Any, attn: Any) -> Iterator[TableSlot]:
    """Yield the stored tables in which a layer looks up its rotations; they end with the model's context."""

    def hooked_table(which: int, length: int) -> Tensor:
        cfg = attn.cfg
        tables: list[Tensor] = attn.calculate_sin_cos_rotary(
            cfg.rotary_dim, length, base=attn._rotary_base(), dtype=cfg.dtype
        )
        return tables[which]

    for which, name in enumerate(("rotary_sin", "rotary_cos")):  # HookedTransformer
        if isinstance(attn._buffers.get(name), Tensor):
            yield TableSlot(attn, name, (name[-3:],), partial(hooked_table, which))
    if (owner := owner_of_sines(model, attn)) is not None:
        yield TableSlot(owner, "embed_positions", ("sin", "cos"))


def positions_of_config(model: Any) -> str | None:
    """Return the kind of positions in a HookedTransformer's configuration; None for models with ``position_ids``."""
    takes_positions = hasattr(model, "original_model")
    return None if takes_positions else str(model.cfg.positional_embedding_type)


def longer_tables(slot: TableSlot, rotary: Rotary | None, length: int) -> Iterator[Tensor]:
    """Yield candidates for the table with ``length`` rows, the most likely first."""
    if slot.formula is not None:
        yield slot.formula(length)
    if rotary is not None:
        parts = slot.table.chunk(len(slot.holds), -1)
        positions = torch.arange(length, device=slot.table.device)
        layouts = [part[positions % len(part)][None] for part in parts]  # the same columns, ``length`` rows
        tables = [table_like(x, rotary, positions, which) for x, which in zip(layouts, slot.holds, strict=True)]
        yield torch.cat(tables, -1)[0]
