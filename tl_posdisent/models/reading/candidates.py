"""Candidates for what a layer computes, from the attributes in which model classes keep it.

All names of such attributes are in this file. ``explanation.py`` accepts a candidate only if it reproduces what the
model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.reading.query_key_hooks import LatentLayout, Tap, layouts, short_name
from tl_posdisent.models.reading.seen import Seen
from tl_posdisent.models.running.model_parts import hook_name, modules
from tl_posdisent.rope.rotary import Pairing, Rotary, rotary_from_table
from tl_posdisent.utils.validation import is_number

PAIRINGS: tuple[Pairing, ...] = ("half", "adjacent")


Pair = tuple[Tap, Tap]
"""The hooks of queries and of keys."""


@dataclass(frozen=True)
class Candidates:
    """What one layer may compute, the most specific first in each list.

    Attributes:
        windows: number of keys that a query may see; None for all.
        pairs: hooks of queries and keys before rotation.
        rotations, scales, soft_caps: of scores; None for no rotation and no cap.
        values: hooks of the values that the pattern weights.
        gates: hooks of what multiplies z before the output projection; None for nothing.
    """

    windows: list[int | None]
    pairs: list[Pair]
    rotations: list[Rotary | None]
    scales: list[float]
    soft_caps: list[float | None]
    values: list[Tap]
    gates: list[Tap | None]


def candidates(model: Any, layer: int, seen: Seen, own: OwnNumbers) -> Candidates:
    """Collect what a layer may compute, from the attributes of its modules and from what fired in a pass."""
    attn = model.blocks[layer].attn
    return Candidates(
        windows=list(_windows(model, attn)),
        pairs=list(queries_and_keys(model, layer, seen)),
        rotations=[*_rotaries(model, attn, seen, own), None],
        scales=list(dict.fromkeys(_scales(attn, _d_head(model, seen)))),
        soft_caps=list(dict.fromkeys(_soft_caps(model, attn))),
        values=list(_values(layer, seen)),
        gates=list(_gates(layer, seen, model.cfg.n_heads)),
    )


def _d_head(model: Any, seen: Seen) -> int:
    q = seen.get("hook_q")
    return int(q.shape[-1] if q is not None and q.ndim == 4 else model.cfg.d_head)


def queries_and_keys(model: Any, layer: int, seen: Seen) -> Iterator[Pair]:
    """Yield candidates for the hooks that carry queries and keys before rotation, the last in the pass first.

    Where Hugging Face's code computes the attention, a norm may come before the rotation or after it.
    """
    if is_latent(seen):
        yield from _latent_pairs(layer, seen)
        return
    pair = [_query_or_key(model, layer, which, seen) for which in "qk"]
    if pair[0] is None or pair[1] is None:
        return
    own, plain = getattr(model.blocks[layer].attn, "original_component", None), (pair[0], pair[1])
    if own is not None and not seen.shows_scores:
        names = [f"{which}_norm.hook_out" for which in "qk"]
        for layout in layouts(seen, *names):
            taps = [
                replace(tap, name=hook_name(layer, name), layout=layout) for tap, name in zip(plain, names, strict=True)
            ]
            before = [tap.read(seen[name.replace("out", "in")]) for tap, name in zip(taps, names, strict=True)]
            if all(torch.equal(x, seen[short_name(tap.name)]) for x, tap in zip(before, plain, strict=True)):
                yield taps[0], taps[1]
        # One without weights after the rotation is the same before it, and need not have a hook.
        norms = [getattr(own, f"{which}_norm", getattr(own, "qk_norm", None)) for which in "qk"]
        if all(norm is not None and not any(True for _ in norm.parameters()) for norm in norms):
            q_norm, k_norm = (getattr(norm, "original_component", norm) for norm in norms)  # without its hooks
            yield replace(plain[0], norm=q_norm), replace(plain[1], norm=k_norm)
    yield plain


# Multi-head latent attention: the projections to queries, and to their latent, if they have one; the projection to the
# latent of the keys and to their rotary slice, which all heads share, and that to the content of keys and values.
LATENT_QUERIES = {"q_b_proj.hook_out": "q_a_proj.hook_out", "q_proj.hook_out": None}
LATENT_KEYS = ("kv_a_proj_with_mqa.hook_out", "kv_b_proj.hook_out")


def is_latent(seen: Mapping[str, Tensor]) -> bool:
    """Say whether a layer has multi-head latent attention, whose hook_q and hook_k carry rotated vectors."""
    return all(name in seen for name in ("hook_q", "hook_k", "hook_rot_q", *LATENT_KEYS))


def _latent_pairs(layer: int, seen: Mapping[str, Tensor]) -> Iterator[Pair]:
    """Yield the projections that give queries and keys of latent attention before rotation, in both orders."""
    rotated, n_heads = seen["hook_rot_q"].shape[-1], seen["hook_q"].shape[1]
    content = seen["hook_q"].shape[-1] - rotated
    shared, keys = (hook_name(layer, name) for name in LATENT_KEYS)
    for name, latent in LATENT_QUERIES.items():
        for interleaved in (False, True) if name in seen else ():
            of_q = LatentLayout(content, rotated, None, latent and hook_name(layer, latent), interleaved)
            of_k = LatentLayout(content, rotated, shared, shared, interleaved)
            q = Tap(hook_name(layer, name), "flat", n_heads, latent=of_q)
            yield q, Tap(keys, "flat", n_heads, latent=of_k)


def _query_or_key(model: Any, layer: int, which: str, seen: Mapping[str, Tensor]) -> Tap | None:
    """Return the last hook of TransformerLens's own that carries queries or keys before rotation, or None."""
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
        each_head = own.w.numel() == attn.cfg.d_head  # OLMo 2 normalises all heads together
        norm = _HookedNorm(own, (0, 2) if each_head else (2, 3))
    return Tap(hook_name(layer, f"hook_{which}"), "pos head", n_heads, norm)


@dataclass(frozen=True)
class _HookedNorm:
    """A norm of a HookedTransformer, which the model applies to vectors with some of their axes joined."""

    norm: Any
    joined: tuple[int, int]

    def __call__(self, x: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        normed: Tensor = self.norm(x.flatten(*self.joined))
        return normed.view_as(x)


def _values(layer: int, seen: Seen) -> Iterator[Tap]:
    """Yield candidates for the hook of the values that are weighted, the last in the pass first."""
    for name in ("v_norm.hook_out", "hook_v"):
        if name in seen and seen[name].ndim == 4:
            yield Tap(hook_name(layer, name), "pos head", seen[name].shape[2])


def _gates(layer: int, seen: Seen, n_heads: int) -> Iterator[Tap | None]:
    """Yield candidates for the hook of what multiplies z before the output projection; None for nothing."""
    yield None
    gate = seen.get("gate.hook_out")
    if gate is not None and gate.ndim == 3 and gate.shape[-1] % n_heads == 0:  # of each head or coordinate
        for function in (torch.sigmoid, torch.nn.functional.softplus):
            yield Tap(hook_name(layer, "gate.hook_out"), "flat", n_heads, function)


def _scales(attn: Any, d_head: int) -> Iterator[float]:
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


def _soft_caps(model: Any, attn: Any) -> Iterator[float | None]:
    """Yield candidates for the soft cap, the constant in ``c * tanh(scores / c)``."""
    original = getattr(attn, "original_component", None)
    for value in (getattr(original, "attn_logit_softcapping", None), getattr(model.cfg, "attn_scores_soft_cap", None)):
        number = _number(value)
        if number is not None and number > 0:
            yield number
    yield None


def _windows(model: Any, attn: Any) -> Iterator[int | None]:
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
    pairs: list[tuple[Tensor, float]]  # frequencies with the factor that the same module stores for them


def own_numbers(model: Any) -> OwnNumbers:
    """Collect the model's own frequencies and attention factors."""
    parts = modules(model)
    found = {id(x): (x, part, name) for part in parts for name, x in part._buffers.items() if name.endswith("inv_freq")}
    stored = [(x.detach(), part, name) for x, part, name in found.values() if x is not None and x.is_floating_point()]
    values = [x for part in parts for name, x in vars(part).items() if name.endswith("attention_scaling")]
    factors = [number for x in values if (number := _number(x)) is not None]
    pairs = []
    for x, part, name in stored:
        named = _number(vars(part).get(name.removesuffix("inv_freq") + "attention_scaling"))
        pairs.append((x, 1.0 if named is None else named))
    return OwnNumbers([x for x, *_ in stored], factors, pairs)


def _rotaries(model: Any, attn: Any, seen: Seen, own: OwnNumbers) -> Iterator[Rotary]:
    """Yield a rotation from every table, or stored frequencies, that the layer may be using, in both pairings."""
    for cos, sin in _tables(model, attn, seen):
        if cos.shape[-1] == 0 or cos.shape[0] < 2:
            continue
        try:
            rotary = _exact(rotary_from_table(cos, sin), cos.dtype, own)
        except ValueError:
            continue
        for pairing in PAIRINGS:
            yield replace(rotary, pairing=pairing)
    if not seen.shows_scores or is_latent(seen):  # tables may pass no hook (complex ones, or Hugging Face's code)
        for x, factor in own.pairs:
            for sign, pairing in itertools.product((1.0, -1.0), PAIRINGS):  # nanochat rotates the other way
                yield Rotary(sign * x.double(), pairing, factor, torch.float32, x.dtype)


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


def _tables(model: Any, attn: Any, seen: Seen) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(getattr(attn, "rotary_cos", None), Tensor):  # HookedTransformer
        yield attn.rotary_cos, attn.rotary_sin
    if "hook_cos" in seen and "hook_sin" in seen:
        yield seen["hook_cos"][0], seen["hook_sin"][0]
    base = getattr(getattr(model, "original_model", None), "base_model", None)
    # GPT-J and CodeGen: a layer's own table, or, since transformers 5.24, one for all layers
    for owner in (getattr(attn, "original_component", None), getattr(base, "rotary_emb", None)):
        if isinstance(table := getattr(owner, "embed_positions", None), Tensor):
            sin, cos = table.chunk(2, -1)
            yield cos, sin
    rotary = getattr(getattr(model, "original_model", None), "rotary", None)  # TransformerLens's own models
    if rotary is not None and isinstance(getattr(rotary, "cos_cached", None), Tensor):
        yield rotary.cos_cached, rotary.sin_cached


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if is_number(value) else None
