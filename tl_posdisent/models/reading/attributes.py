"""Candidates for rotation, scale, soft cap and window, from the attributes in which model classes keep them.

``probe.py`` accepts a candidate only if it reproduces what the model computes. All attribute names are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_posdisent.models.reading.model_parts import hook_name, modules
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.rope.rotary import Rotary, rotary_from_table, table_like
from tl_posdisent.utils.validation import is_number


def architecture(model: Any) -> str:
    """Return the architecture's name, for messages."""
    for name in ("original_architecture", "architecture"):
        value = getattr(model.cfg, name, None)
        if isinstance(value, str) and value:
            return value
    return type(model).__name__


def implementation(attn: Any) -> Any:
    """Return the attention implementation of a Hugging Face layer (eager, sdpa …); None for other models."""
    config = getattr(getattr(attn, "original_component", None), "config", None)
    return getattr(config, "_attn_implementation", None)


def lengths_of_note(model: Any) -> tuple[list[int], int]:
    """Return the lengths at which a model's rotation or scale may change, and the greatest that can be tested."""
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [x for x in (rope, *rope.values()) if isinstance(x, dict)]  # some models have one per kind of layer
    values = [x.get("original_max_position_embeddings") for x in kinds]
    names = ("original_max_position_embeddings", "max_position_embeddings", "floor_scale")
    values += [getattr(config, name, None) for name in names] + [getattr(model.cfg, "n_ctx", None)]
    noted = [int(x) for x in values if isinstance(x, (int, float)) and x > 1]
    # Positions looked up in a stored table end with it; computed tables (which pass a hook) have no end.
    if any(name.endswith("attn.hook_cos") for name in model.hook_dict) and not hasattr(model, "pos_embed"):
        return noted, 4 * max(noted, default=0)
    ends = [getattr(config, "max_position_embeddings", None), getattr(model.cfg, "n_ctx", None)]
    return noted, min(filter(None, ends), default=0)


def query_or_key(model: Any, layer: int, which: str, seen: dict[str, Tensor]) -> Tap | None:
    """Return the last hook that carries queries or keys before rotation, or None."""
    attn, n_heads = model.blocks[layer].attn, model.cfg.n_heads
    if which == "k":
        n_heads = getattr(model.cfg, "n_key_value_heads", None) or n_heads
    if f"hook_{which}_normed" in seen:
        flat = seen[f"hook_{which}_normed"].ndim == 3
        return Tap(hook_name(layer, f"hook_{which}_normed"), "flat" if flat else "head pos", n_heads)
    if f"hook_{which}" not in seen:
        return None
    own = getattr(attn, f"{which}_norm", None)
    norm: Any = None
    if hasattr(attn, "_apply_qk_norm") and own is not None:  # HookedTransformer: no hook after the norm
        if own.w.numel() == attn.cfg.d_head:
            norm = partial(attn._apply_qk_norm, norm_module=own)
        else:  # OLMo 2 normalises all heads together
            norm = lambda x: own(x.flatten(2)).view_as(x)  # noqa: E731
    return Tap(hook_name(layer, f"hook_{which}"), "pos head", n_heads, norm)


def scales(attn: Any, d_head: int) -> Iterator[float]:
    """Yield candidates for the scale, by which ``⟨q, k⟩`` is multiplied."""
    original = getattr(attn, "original_component", None)
    if original is None and getattr(attn, "attn_scale", None) is not None:
        yield 1 / float(attn.attn_scale)
    for name in ("scaling", "softmax_scale", "inv_norm_factor", "scale_attn"):
        value = _number(getattr(original, name, None))
        if value:
            yield 1 / value if name == "scale_attn" else value
    yield d_head**-0.5
    yield 1.0


def soft_caps(model: Any, attn: Any) -> Iterator[float | None]:
    """Yield candidates for the soft cap, the constant in ``c * tanh(scores / c)``."""
    original = getattr(attn, "original_component", None)
    for value in (getattr(original, "attn_logit_softcapping", None), getattr(model.cfg, "attn_scores_soft_cap", None)):
        number = _number(value)
        if number is not None and number > 0:
            yield number
    yield None


def windows(model: Any, attn: Any) -> Iterator[int | None]:
    """Yield candidates for the number of keys that a query may see, most specific source first."""
    original = getattr(attn, "original_component", None)
    if original is None:
        local = getattr(attn, "attn_type", None) == "local"
        yield getattr(model.cfg, "window_size", None) if local else None
        return
    config = getattr(original, "config", None)
    if hasattr(original, "sliding_window"):
        yield original.sliding_window
    elif hasattr(original, "attention_type"):  # GPT-Neo
        yield getattr(config, "window_size", None) if original.attention_type == "local" else None
    elif getattr(config, "use_sliding_window", True) and not getattr(config, "layer_types", None):
        yield getattr(config, "sliding_window", None)
    yield None


class OwnNumbers(NamedTuple):
    """Frequencies and factors that a model's modules store, in their own dtypes; collected once, for all layers."""

    frequencies: list[Tensor]
    factors: list[float]


def own_numbers(model: Any) -> OwnNumbers:
    """Collect the model's own frequencies and attention factors."""
    parts = modules(model)
    found = {id(x): x for part in parts for name, x in part._buffers.items() if name.endswith("inv_freq")}
    buffers = [x.detach() for x in found.values() if x is not None and x.is_floating_point()]
    values = [x for part in parts for name, x in vars(part).items() if name.endswith("attention_scaling")]
    return OwnNumbers(buffers, [number for x in values if (number := _number(x)) is not None])


def rotaries(model: Any, attn: Any, seen: dict[str, Tensor], own: OwnNumbers) -> Iterator[Rotary]:
    """Yield a rotation from every table that the layer may be using, in both pairings."""
    for cos, sin in _tables(model, attn, seen):
        if cos.shape[-1] == 0 or cos.shape[0] < 2:
            continue
        try:
            rotary = _exact(rotary_from_table(cos, sin), cos.dtype, own)
        except ValueError:
            continue
        for pairing in ("half", "adjacent"):
            yield replace(rotary, pairing=pairing)


def _tables(model: Any, attn: Any, seen: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(getattr(attn, "rotary_cos", None), Tensor):  # HookedTransformer
        yield attn.rotary_cos, attn.rotary_sin
    if "hook_cos" in seen and "hook_sin" in seen:
        yield seen["hook_cos"][0], seen["hook_sin"][0]
    if (owner := _owner_of_sines(model, attn)) is not None:
        sin, cos = owner.embed_positions.chunk(2, -1)
        yield cos, sin
    rotary = getattr(getattr(model, "original_model", None), "rotary", None)  # TransformerLens's own models
    if rotary is not None and isinstance(getattr(rotary, "cos_cached", None), Tensor):
        yield rotary.cos_cached, rotary.sin_cached


def _owner_of_sines(model: Any, attn: Any) -> Any | None:
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
        base = attn._rotary_base() if hasattr(attn, "_rotary_base") else cfg.rotary_base  # TransformerLens 2: one base
        tables: list[Tensor] = attn.calculate_sin_cos_rotary(cfg.rotary_dim, length, base=base, dtype=cfg.dtype)
        return tables[which]

    for which, name in enumerate(("rotary_sin", "rotary_cos")):  # HookedTransformer
        if isinstance(attn._buffers.get(name), Tensor):
            yield TableSlot(attn, name, (name[-3:],), partial(hooked_table, which))
    if (owner := _owner_of_sines(model, attn)) is not None:
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


def _exact(measured: Rotary, dtype: torch.dtype, own: OwnNumbers) -> Rotary:
    """Replace measured frequencies, which a table rounds, by the model's own if it stores them and the table agrees."""
    close = 4 * torch.finfo(dtype).eps + 1e-5
    frequencies, kept_in, factor = measured.frequencies, measured.frequency_dtype, measured.attention_factor
    nearest = close
    for kept in own.frequencies:
        if kept.shape == measured.frequencies.shape:
            candidate = kept.to(frequencies.device).double()
            error = float(((candidate - measured.frequencies).abs() / measured.frequencies.abs().clamp_min(1e-9)).max())
            if error < nearest:
                frequencies, kept_in, nearest = candidate, kept.dtype, error
    for number in own.factors:
        if abs(number - measured.attention_factor) < close:
            factor = number
    return replace(measured, frequencies=frequencies, frequency_dtype=kept_in, attention_factor=factor)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if is_number(value) else None
