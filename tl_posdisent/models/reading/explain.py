"""Find out what each attention layer does, by a few short forward passes.

First listen: which hooks fire and what they carry. Of all combinations of rotation, scale and soft cap that the
model's attributes suggest, the one that reproduces the layer's own scores is the answer; if none does, that is said.
Then the same at far positions: up to which length does that hold (``length_checks.py``)? And disturb what was found:
which edits take effect (``edit_checks.py``)?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading import attributes as facts
from tl_posdisent.models.reading.edit_checks import check_tables_and_scores, check_turns
from tl_posdisent.models.reading.forward import Hook, at_rest, check_tokens, device_of, hook_name, hook_points
from tl_posdisent.models.reading.length_checks import check_lengths
from tl_posdisent.models.reading.observe import (
    Seen,
    is_mask,
    listen,
    masked_score,
    misfit,
    mismatch,
    shows_scores,
    visible_cells,
)
from tl_posdisent.models.reading.spec import AttentionSpec, Tap, n_layers
from tl_posdisent.rope.rotary import Rotary


def probe(model: Any, layers: Sequence[int]) -> list[AttentionSpec]:
    """An ``AttentionSpec`` for each of these layers."""
    n_layers(model)
    tokens = check_tokens(model, probe_tokens(model))
    with at_rest(model), torch.no_grad():
        seen = listen(model, tokens, layers)
        own = facts.own_numbers(model)  # after the pass, which may write them over
        specs = [_explain(model, layer, seen[layer], own) for layer in layers]
        edits = [
            edit for layer in layers if not shows_scores(seen[layer]) for edit in _gentle(model, layer, seen[layer])
        ]
        if edits:
            seen = listen(model, tokens, layers, edits)
            again = [_explain(model, layer, seen[layer], own) for layer in layers]
            specs = [s if now.problem else now for s, now in zip(specs, again, strict=True)]
        specs = check_lengths(model, tokens, specs, edits)
        specs = check_turns(model, tokens, specs, edits)
        return check_tables_and_scores(model, tokens, specs, edits)


def _gentle(model: Any, layer: int, seen: Seen) -> list[Hook]:
    """Edits that bring a layer's queries and keys to ordinary size: a pattern alone shows little of scores that are
    very large or all but equal."""
    attn, n = model.blocks[layer].attn, model.cfg.n_heads
    taps = [facts.query_or_key(attn, which, seen, n) for which in "qk"]
    return [(hook_name(layer, tap.name), _to_unit_size) for tap in taps if tap is not None]


def _to_unit_size(x: Tensor, hook: Any) -> Tensor:
    return (x / x.double().square().mean().sqrt().clamp_min(1e-30)).to(x.dtype)


def probe_tokens(model: Any) -> Int[Tensor, "2 pos"]:
    cfg = model.cfg
    heads = {cfg.n_heads, getattr(cfg, "n_key_value_heads", None)}
    length = next(n for n in (11, 10, 13, 12) if n not in heads)  # so that no axis can be taken for another
    length = min(length, getattr(cfg, "n_ctx", None) or length)
    generator = torch.Generator().manual_seed(0)
    tokenizer = getattr(model, "tokenizer", None)
    # Padding would change positions and mask.
    special = {*(getattr(tokenizer, "all_special_ids", None) or ()), getattr(cfg, "pad_id", None)}
    ids = torch.tensor([t for t in range(min(cfg.d_vocab, 4096)) if t not in special])
    return ids[torch.randint(0, len(ids), (2, length), generator=generator)].to(device_of(model))


def _explain(model: Any, layer: int, seen: Seen, own: facts.OwnNumbers) -> AttentionSpec:
    attn, cfg = model.blocks[layer].attn, model.cfg
    n_kv = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    visible, there = visible_cells(seen), hook_points(model)
    causal = visible is None or not bool(visible.triu(1).any())
    window = next((w for w in facts.windows(model, attn) if is_mask(visible, causal, w)), None)
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")

    def named(short: str) -> str | None:
        return hook_name(layer, short) if short in seen else None

    q, k = facts.query_or_key(attn, "q", seen, cfg.n_heads), facts.query_or_key(attn, "k", seen, n_kv)
    spec = AttentionSpec(
        layer=layer,
        architecture=facts.architecture(model),
        n_heads=cfg.n_heads,
        n_kv_heads=n_kv,
        d_head=cfg.d_head,
        causal=causal,
        window=window,
        scores=named("hook_attn_scores") if shows_scores(seen) else None,
        pattern=named("hook_pattern"),
        z=named("hook_z"),
        v=Tap(hook_name(layer, "hook_v"), "pos head", n_kv) if "hook_v" in seen else None,
        masked_below=masked_score(seen),
        points={there[name].name: name for short in seen if (name := hook_name(layer, short)) in there},
    )
    if any(x is not None and bool((x.isnan() | (x == torch.inf)).any()) for x in (scores, pattern)):
        why = "its scores are NaN or infinite: look at the weights, or whether its dtype holds numbers so large"
        return replace(spec, scores=None, problem=why)
    if visible is None:
        return replace(
            spec,
            problem="neither hook_attn_scores nor hook_pattern fires: its attention runs in a fused kernel. "
            'Load the model with attn_implementation="eager"',
        )
    if not is_mask(visible, causal, window):
        return replace(spec, problem="its mask is neither causal nor full nor a sliding window")
    if q is None or k is None:
        return replace(spec, problem="hook_q and hook_k do not fire")
    rotaries = facts.rotaries(model, attn, seen, own)
    return _explain_scores(model, attn, spec, q, k, seen, visible, rotaries)


def _explain_scores(
    model: Any, attn: Any, spec: AttentionSpec, q: Tap, k: Tap, seen: Seen, visible: Tensor, rotaries: Iterable[Rotary]
) -> AttentionSpec:
    """The rotation, scale and soft cap under which queries and keys give the scores that were seen."""
    fits = q.read(seen[q.name]), k.read(seen[k.name])
    if any(x.ndim != 4 or x.shape[1] != len(visible) or spec.n_heads % x.shape[2] for x in fits):
        return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
    spec = replace(spec, n_kv_heads=fits[1].shape[2])  # as many as the hooks show: TransformerLens may ungroup keys
    k = replace(k, n_heads=spec.n_kv_heads)
    positions = torch.arange(len(visible), device=visible.device)
    tried: list[tuple[float, AttentionSpec, tuple[Tensor, Tensor]]] = []
    for candidate, turned in _candidates(model, attn, spec, fits, rotaries, positions):
        tried.append((misfit(candidate, *turned, seen, visible), candidate, turned))
        if tried[-1][0] < _EXACT:
            break
    best = min(error for error, *_ in tried)
    if best > 1:
        return replace(
            spec,
            problem="its scores are not scale * <q, k> under any rotation, scale and soft cap found in the model "
            "(an additive bias such as ALiBi, or an unknown rotation)",
        )
    # Of those that fit equally well (a high soft cap leaves no trace in 16 bits) the first is the most specific.
    _, chosen, turned = next(t for t in tried if t[0] <= 3 * best)
    return _with_taps(chosen, q, k, turned, seen)


_EXACT = 0.02  # of what is taken for rounding: no other candidate can be right where this one is


def _candidates(
    model: Any, attn: Any, spec: AttentionSpec, fits: Sequence[Tensor], rotaries: Iterable[Rotary], positions: Tensor
) -> Iterator[tuple[AttentionSpec, tuple[Tensor, Tensor]]]:
    """Every rotation, scale and soft cap there may be, with the vectors turned; the most specific first."""
    for rotary in [*rotaries, None]:
        rotating = replace(spec, rotary=rotary)
        q_rot, k_rot = (rotating.rotated(x.double(), positions) for x in fits)
        for scale in dict.fromkeys(facts.scales(attn, spec.d_head)):
            for cap in dict.fromkeys(facts.soft_caps(model, attn)):
                yield replace(rotating, scale=scale, soft_cap=cap), (q_rot, k_rot)


_ROTATED_EARLIER = (
    "carries vectors at hook_q and hook_k that are rotated already or not laid out per head "
    "(multi-head latent attention)"
)


def _with_taps(spec: AttentionSpec, q: Tap, k: Tap, turned: Sequence[Tensor], seen: Seen) -> AttentionSpec:
    """Names completed, and the candidates for turning vectors: the rotated ones if they fire, else the unrotated."""
    layer = spec.layer

    def fires(name: str, x: Tensor) -> bool:
        return name in seen and seen[name].shape == x.shape and mismatch(seen[name], x) <= 1

    rotated = dict(zip(("hook_rot_q", "hook_rot_k"), turned, strict=True))
    if spec.rotary is None:
        if any(name in seen and not fires(name, x) for name, x in rotated.items()):
            return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
        return replace(spec, q=_full(layer, q), k=_full(layer, k))
    turn_q, turn_k = (
        Tap(name, "pos head", tap.n_heads) if fires(name, x) else tap
        for (name, x), tap in zip(rotated.items(), (q, k), strict=True)
    )
    tables = "hook_cos" in seen and "hook_sin" in seen
    return replace(
        spec,
        q=_full(layer, q),
        k=_full(layer, k),
        turn_q=None if turn_q.norm is not None else _full(layer, turn_q),  # a norm would have to be undone
        turn_k=None if turn_k.norm is not None else _full(layer, turn_k),
        cos=hook_name(layer, "hook_cos") if tables else None,
        sin=hook_name(layer, "hook_sin") if tables else None,
    )


def _full(layer: int, tap: Tap) -> Tap:
    return replace(tap, name=hook_name(layer, tap.name))
