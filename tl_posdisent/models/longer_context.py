"""Texts beyond a model's position tables: temporarily extended tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from tl_posdisent.models.reading import stored_tables
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec, most_limited
from tl_posdisent.models.running.forward_pass import restored, running
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer


@contextlib.contextmanager
def longer_context(model: Any, length: int) -> Iterator[Any]:
    """Extend the position tables of a rotary model to ``length`` tokens within a block.

    Some models store their rotation as a table with a row for each position of their context (HookedTransformer, GPT-J)
    and fail on longer texts. The table is extended with the model's own formula if it has one, otherwise with the
    frequencies and the factor that were read from it, and only if the formula reproduces the existing rows, which are
    kept bit for bit. Models that compute their rotation for any length are left unchanged. On exit every buffer and
    number of the model's modules is again the same object as before.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        length: in tokens. Lengths up to the model's context change nothing.

    Yields:
        The model itself.

    Raises:
        ValueError: a length that is not a positive integer; a model that rotates, scales or masks texts of this length
            in another way than short ones (``holds_to`` of its ``AttentionSpec``); a table that neither formula
            reproduces; a model that still fails beyond its context, as every model with learned (absolute) positions
            does, and those of ``TransformerBridge.boot_native``, which refuse longer texts.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, longer_context
        >>> model, tokens = load_demo_model(), demo_tokens(length=600)  # trained on 512
        >>> with longer_context(model, 600):
        ...     logits = model(tokens)
        >>> logits.shape, bool(torch.allclose(logits[:, :512], model(tokens[:, :512]), atol=1e-3))
        (torch.Size([1, 600, 1024]), True)
    """
    reading = read_model(model)
    model = reading.model
    check_integer("length", length, 1)
    limited = most_limited(reading.attention)
    if limited is not None and limited.limits.holds_to is not None and length > limited.limits.holds_to:
        raise ArgumentError("length", f"must be at most {limited.limits.holds_to}, got {length}: {limited.why_limited}")
    with restored(model):
        grown = [
            (slot, _grown(spec, slot, length))
            for spec in reading.attention
            for slot in stored_tables.table_slots(model, model.blocks[spec.layer].attn)
            if len(slot.table) < length
        ]
        for slot, table in grown:
            setattr(slot.owner, slot.name, table)
        _check_that_it_runs(reading, length)
        yield model


def _grown(spec: AttentionSpec, slot: stored_tables.TableSlot, length: int) -> Tensor:
    """Extend the table by the first formula that reproduces its rows."""
    n = len(slot.table)
    for table in stored_tables.longer_tables(slot, spec.rotary, length):
        table = table.to(slot.table)
        if table.shape != (length, *slot.table.shape[1:]):
            continue
        error = (table[:n].double() - slot.table.double()).abs()
        # Angles are rounded in float32, so the error grows with the position.
        allowed = 4 * (n * torch.finfo(torch.float32).eps + torch.finfo(slot.table.dtype).eps)
        if not error.numel() or float(error.max()) <= allowed:
            return torch.cat([slot.table, table[n:]])
    raise ArgumentError(
        "length",
        f"must be at most {n} for layer {spec.layer} of {spec.architecture}: its table of rotations "
        f"({slot.name}) follows no formula that was found, so it cannot be continued",
    )


_MOST_BYTES = 2**30  # limit for the scores of one layer
_FEW = 8  # number of tokens to run at the last positions


def _check_that_it_runs(reading: ModelReading, length: int) -> None:
    """Run one layer on one token more than the context, so that a model that fails does so on entry.

    If the context is too long for this, run a few tokens at the last positions instead: a table of learned positions
    lacks the last one. HookedTransformer takes no positions, so its configuration is read.
    """
    model, rotates = reading.model, any(spec.rotary is not None for spec in reading.attention)
    context = getattr(model.cfg, "n_ctx", None)
    if not isinstance(context, int) or length <= context:
        return
    special = set(getattr(getattr(model, "tokenizer", None), "all_special_ids", None) or ())
    plain = next(t for t in range(len(special) + 1) if t not in special)  # padding would be masked
    n, more = context + 1, dict[str, Any]()
    if 4 * model.cfg.n_heads * n**2 > _MOST_BYTES:
        if (kind := stored_tables.positions_of_config(model)) is not None:
            if kind not in ("rotary", "alibi"):
                _refuse(context, length, f"positional_embedding_type is {kind!r}", rotates)
            return
        n, more = _FEW, {"position_ids": torch.arange(n - _FEW, n, device=device_of(model))[None]}
    tokens = torch.full((1, n), plain, device=device_of(model))
    try:
        with running(model, bare=True) as p:
            p.run(tokens, stop=1, **more)
    except (ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        _refuse(context, length, error.__cause__ or error, rotates)


def _refuse(context: int, length: int, why: Any, rotates: bool) -> NoReturn:
    reason = (
        "its tables of rotations are not the reason" if rotates else "learned (absolute) positions cannot be continued"
    )
    raise ArgumentError(
        "length",
        f"must be at most {context} for this model, got {length}: it fails beyond its context; {reason} ({why})",
    )
