"""Attention knock-out: chosen queries do not see chosen keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.hooks.edit import Hidden
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.slots import ChosenSlots, Slots, checked_slots, slot_mask, slots_text
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown


def knock_out(
    model: Any,
    queries: Slots = None,
    keys: Slots = None,
    *,
    cells: Bool[Tensor, "*batch query key"] | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> Hooks:
    """Hide chosen keys from chosen queries (attention knock-out).

    The scores of these cells become -∞, so that their keys get no attention and the others share it, as with a mask in
    the model itself (arXiv 2304.14767). A knock-out composes with every other intervention; edits that fit a head's
    scores leave hidden cells out.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, with or without rotary embeddings.
        queries, keys: slots of the batch, padding included: an index (negative from the end), a range, a slice, several
            indices or booleans ``(pos,)``; None for all.
        cells: instead of both: True at each query and key to be hidden, ``[query, key]`` or ``[batch, query, key]``.
        layers, heads: query heads of layers, default all with attention.

    Raises:
        ValueError: no argument that says what is hidden, or ``cells`` beside others; slots that are not integers; a
            layer whose scores cannot be changed; layers or heads out of range. While running: slots beyond the text,
            cells of another shape, a query that would see no key, a KV cache.

    Example:
        >>> from tl_posdisent import demo_tokens, knock_out, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> hooks = knock_out(model, queries=-1, keys=range(8), layers=[1])
        >>> hooks
        knock_out(queries=-1, keys=0…7) on 1 layer × 8 heads
        >>> with model.hooks(fwd_hooks=hooks):
        ...     _, cache = model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")
        >>> last, before = cache["pattern", 1][0, :, -1], cache["pattern", 1][0, :, -2]
        >>> float(last[:, :8].max()), round(float(last.sum(-1).min()), 5), bool(before[:, :8].all())
        (0.0, 1.0, True)
    """
    if cells is not None and (queries is not None or keys is not None):
        raise ArgumentError("cells", "must not be given beside queries or keys, which say the same: give one of them")
    if cells is None and queries is None and keys is None:
        raise ArgumentError(
            "keys", "or queries or cells must be given, or no query would see any key, got None for all"
        )
    if cells is not None:
        if not isinstance(cells, Tensor) or cells.dtype != torch.bool or cells.ndim not in (2, 3):
            got = f"{cells.dtype} {tuple(cells.shape)}" if isinstance(cells, Tensor) else shown(cells)
            raise ArgumentError("cells", f"must be booleans [query, key] or [batch, query, key], got {got}")
        call = f"knock_out({'×'.join(map(str, cells.shape))} cells)"
        hidden = partial(_given_cells, cells.clone())
    else:
        chosen = {"queries": checked_slots("queries", queries), "keys": checked_slots("keys", keys)}
        shown_slots = [f"{name}={slots_text(x)}" for name, x in chosen.items() if x is not None]
        call = f"knock_out({', '.join(shown_slots)})"
        hidden = partial(_cells_of, chosen["queries"], chosen["keys"])
    by_text = cells is not None and cells.ndim == 3 and len(cells) > 1
    return hooks_for(any_heads(model, layers, heads), call, hide=(Hidden(call, hidden, by_text=by_text),))


def _cells_of(
    queries: ChosenSlots, keys: ChosenSlots, texts: int, length: int, device: torch.device
) -> Bool[Tensor, "query key"]:
    return slot_mask("queries", queries, length, device)[:, None] & slot_mask("keys", keys, length, device)


def _given_cells(cells: Tensor, texts: int, length: int, device: torch.device) -> Bool[Tensor, "*batch query key"]:
    shape = (length, length)
    if tuple(cells.shape) not in (shape, (1, *shape), (texts, *shape)):
        raise ArgumentError(
            "cells",
            f"must have shape (query, key) = {shape} or (batch, query, key) = {(texts, *shape)} of the running text, "
            f"got {tuple(cells.shape)}",
        )
    return cells.to(device)
