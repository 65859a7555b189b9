"""Explain a layer's scores: which rotation, scale, soft cap and window give the scores that a pass showed.

A candidate (``candidates.py``) is accepted only if it reproduces what the model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.models.reading.candidates import Candidates, OwnNumbers, Pair, candidates
from tl_posdisent.models.reading.length_limits import length_limit
from tl_posdisent.models.reading.query_key_hooks import LatentLayout, Tap, layouts, read, short_name
from tl_posdisent.models.reading.seen import Seen, is_mask
from tl_posdisent.models.reading.spec import AttentionSpec, Limits, Taps
from tl_posdisent.models.running.forward_pass import Pass
from tl_posdisent.models.running.model_parts import architecture, hook_name, implementation
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.precision import mismatch


def explain(p: Pass, layer: int, seen: Seen, own: OwnNumbers, keys_of: int | None = None) -> AttentionSpec:
    """Describe a layer from one pass: the rotation, scale and cap that reproduce its scores, or why none do.

    ``keys_of`` is the layer to which the keys and values in ``seen`` belong, if not to this one.
    """
    model, cfg = p.model, p.model.cfg
    options = candidates(model, layer, seen, own)
    visible = seen.visible
    causal = visible is None or not bool(visible.triu(1).any())
    window = next((w for w in options.windows if is_mask(visible, causal, w)), None)
    names = [hook_name(layer, short) for short in seen]

    def named(short: str) -> str | None:
        return hook_name(layer, short) if short in seen else None

    n_kv = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    spec = AttentionSpec(
        layer=layer,
        architecture=architecture(model),
        n_heads=cfg.n_heads,
        n_kv_heads=n_kv,
        d_head=cfg.d_head,
        causal=causal,
        window=window,
        taps=Taps(
            scores=named("hook_attn_scores") if seen.shows_scores else None,
            pattern=named("hook_pattern"),
            z=named("hook_z"),
            v=Tap(hook_name(layer, "hook_v"), "pos head", n_kv) if "hook_v" in seen else None,
        ),
        limits=Limits(masked_below=seen.lowest, shows_mask=seen.shows_mask),
        points=_points(p, names),
    )
    if visible is None:
        return spec.with_limits(problem=_no_pattern(model.blocks[layer].attn))
    spec = spec.with_limits(holds_to=length_limit(model, layer))
    if not is_mask(visible, causal, window):
        problem = _other_mask(spec, len(visible))
        return spec.with_limits(problem=problem, no_rotation=f"cannot be read: {problem}")
    if not options.pairs:
        return spec.with_limits(problem="hook_q and hook_k do not fire")
    explanations = itertools.product(options.rotations, options.pairs, options.scales, options.soft_caps)
    spec = _explain_scores(spec, seen, visible, explanations)
    if seen.shows_scores or spec.limits.problem:
        return spec
    spec = _explain_result(spec, seen, options)
    if keys_of is not None:
        spec = _at_lender(spec, p, keys_of)
    return spec


def _points(p: Pass, names: Iterable[str]) -> dict[str, str]:
    """Return the names of those hooks that the model has, by the name of their points."""
    return {p.points[name].name: name for name in names if name in p.points}


def _no_pattern(attn: Any) -> str:
    """Return the reason given for a layer that shows neither scores nor pattern."""
    why = "TransformerLens has no such hooks for this architecture"
    if implementation(attn) != "eager":
        why = 'its attention runs in a fused kernel. Load the model with attn_implementation="eager"'
    return f"neither hook_attn_scores nor hook_pattern fires: {why}"


def _other_mask(spec: AttentionSpec, n: int) -> str:
    """Return the reason given for a mask that is not described, in the pass over ``n`` tokens that reads the model."""
    if spec.limits.holds_to is not None and spec.limits.holds_to < n:
        return f"its mask holds for texts of at most {spec.limits.holds_to} tokens, and a model is read on {n}"
    return "its mask is neither causal nor full nor a sliding window"


def _explain_scores(
    spec: AttentionSpec,
    seen: Seen,
    visible: Tensor,
    explanations: Iterable[tuple[Rotary | None, Pair, float, float | None]],
) -> AttentionSpec:
    """Find the hooks, rotation, scale and soft cap (the most specific first) by which queries and keys give scores."""
    positions = torch.arange(len(visible), device=visible.device)
    known: dict[Pair, tuple[Tensor, Tensor] | None] = {}
    tried: list[tuple[float, AttentionSpec, tuple[Tensor, Tensor]]] = []
    for rotary, pair, scale, cap in explanations:
        if pair not in known:
            known[pair] = _per_head(spec, seen, len(visible), pair)
        vectors = known[pair]
        if vectors is None or (rotary is not None and rotary.dim > vectors[0].shape[-1]):
            continue
        candidate = replace(spec.with_taps(q=pair[0], k=pair[1]), rotary=rotary, scale=scale, soft_cap=cap)
        candidate = _with_sizes(candidate, *vectors)
        turned = candidate.rotated(vectors[0], positions), candidate.rotated(vectors[1], positions)
        if pair[0].latent is not None and not _gives_rotated(candidate, turned, seen):
            continue
        tried.append((misfit(candidate, *turned, seen, visible), candidate, turned))
        if tried[-1][0] < 0.02:  # 2 % of the rounding tolerance: no other candidate can be right
            break
    if not tried:
        return spec.with_limits(problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
    best = min(error for error, *_ in tried)
    if best > 1:
        return replace(spec.with_limits(problem=_unexplained(seen)), n_kv_heads=tried[0][1].n_kv_heads)
    # Among those that fit equally well (a high soft cap leaves no trace in 16 bits), the first is the most specific.
    _, chosen, turned = next(t for t in tried if t[0] <= 3 * best)
    return _with_taps(chosen, turned, seen)


def _per_head(spec: AttentionSpec, seen: Seen, length: int, pair: Pair) -> tuple[Tensor, Tensor] | None:
    """Read queries and keys in float64, or return None if these hooks do not carry one vector for each head."""
    q, k = (read(tap, seen) for tap in pair)
    per_head = all(x.ndim == 4 and x.shape[1] == length and spec.n_heads % x.shape[2] == 0 for x in (q, k))
    return (q.double(), k.double()) if per_head and q.shape[3] == k.shape[3] else None


def _with_sizes(spec: AttentionSpec, q: Tensor, k: Tensor) -> AttentionSpec:
    """Take sizes from the vectors: TransformerLens may ungroup keys, and layers may differ."""
    assert spec.taps.k is not None
    n_kv, d_head = k.shape[2:]
    spec = spec.with_taps(k=replace(spec.taps.k, n_heads=n_kv))
    return replace(spec, n_kv_heads=n_kv, d_head=d_head)


def _explain_result(spec: AttentionSpec, seen: Seen, options: Candidates) -> AttentionSpec:
    """Find the values of which z is the weighted sum, and the gate that multiplies it, if there is one."""
    if "hook_z" in seen and "hook_pattern" in seen:
        for v, gate in itertools.product(options.values, options.gates):
            values, gates = (None if tap is None else read(tap, seen) for tap in (v, gate))
            candidate = spec.with_taps(v=v, gate=gate)
            if values is not None and values.shape[2] == spec.n_kv_heads:
                gathered = candidate.gathered(seen["hook_pattern"], values, gates)
                if gathered.shape == seen["hook_z"].shape and mismatch(seen["hook_z"], gathered) <= 1:
                    return candidate
    return spec.with_taps(v=None)


def _unexplained(seen: Seen) -> str:
    """Return the reason given for scores (or a pattern, if only that is shown) that no candidate reproduces."""
    found = "scale * <q, k> under any rotation, scale and soft cap found in the model"
    if seen.shows_scores:
        return f"its scores are not {found} (an additive bias such as ALiBi, or an unknown rotation)"
    where = "carries the attention pattern instead" if "hook_attn_scores" in seen else "does not fire"
    return (
        f"TransformerLens shows no scores for this architecture (hook_attn_scores {where}), and the pattern is not the "
        f"softmax of {found}"
    )


_ROTATED_EARLIER = (
    "carries vectors at hook_q and hook_k that are rotated already or not laid out per head "
    "(multi-head latent attention)"
)


def _with_taps(spec: AttentionSpec, turned: Sequence[Tensor], seen: Seen) -> AttentionSpec:
    """Add the hooks of rotated vectors."""
    layer = spec.layer
    if spec.rotary is None:
        for name, x in zip(("hook_rot_q", "hook_rot_k"), turned, strict=True):
            if name in seen and not _carries(seen[name], x):
                return spec.with_limits(problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
        return spec

    def rotated(which: str, tap: Tap | None, x: Tensor) -> Tap | None:
        assert tap is not None
        if tap.latent is not None:
            return _rotated_latent(layer, which, tap)
        for name in (f"hook_rot_{which}", f"{which}_norm.hook_out"):
            for layout in layouts(seen, name):
                after = Tap(hook_name(layer, name), layout, tap.n_heads)
                if _carries(after.read(seen[name]), x):
                    return after
        return None

    return spec.with_taps(
        q_rot=rotated("q", spec.taps.q, turned[0]),
        k_rot=rotated("k", spec.taps.k, turned[1]),
    )


def _rotated_latent(layer: int, which: str, tap: Tap) -> Tap:
    """Return the hook of latent attention's vectors after rotation, where each head has its own keys."""
    assert tap.latent is not None
    after = LatentLayout(tap.latent.content, tap.latent.rotated)
    return Tap(hook_name(layer, f"hook_{which}"), "head pos", tap.n_heads, latent=after)


def _gives_rotated(spec: AttentionSpec, turned: Sequence[Tensor], seen: Seen) -> bool:
    """Say whether these are the vectors of latent attention after rotation.

    Scores do not show the order of coordinates: some rotations read pairs of neighbours and write the first of all
    pairs before the second (DeepSeek V3).
    """
    assert spec.taps.q is not None
    assert spec.taps.k is not None
    taps = (_rotated_latent(spec.layer, which, tap) for which, tap in (("q", spec.taps.q), ("k", spec.taps.k)))
    return all(_carries(read(tap, seen), x) for tap, x in zip(taps, turned, strict=True))


def _carries(seen: Tensor, x: Tensor) -> bool:
    """Say whether a hook carried these vectors."""
    return seen.shape == x.shape and mismatch(seen, x) <= 1


# --- layers that attend to the keys and values of another layer
#

_LENT = ("hook_k", "k_norm.hook_in", "k_norm.hook_out", "hook_v", "v_norm.hook_out")


def lenders(p: Pass, layer: int) -> list[int]:
    """Return the layers whose keys a layer may attend to if it has none of its own, the nearest first."""
    if _has_keys(p.points, layer) or hook_name(layer, "q.hook_out") not in p.points:
        return []
    return [earlier for earlier in reversed(range(layer)) if _has_keys(p.points, earlier)]


def _has_keys(points: Mapping[str, Any], layer: int) -> bool:
    return hook_name(layer, "k.hook_out") in points


def with_lent(seen: Seen, lender: Seen) -> Seen:
    """Return what a layer showed, with the keys and values of another layer, which fired before."""
    return Seen({name: lender[name] for name in _LENT if name in lender} | dict(seen))


def _at_lender(spec: AttentionSpec, p: Pass, lender: int) -> AttentionSpec:
    """Return the spec with the hooks of keys and values in the layer to which they belong."""
    k, v = (tap and replace(tap, name=hook_name(lender, short_name(tap.name))) for tap in (spec.taps.k, spec.taps.v))
    points = _points(p, [tap.name for tap in (k, v) if tap])
    return replace(spec.with_taps(k=k, v=v, keys_of=lender), points=points | dict(spec.points))


# --- how well a candidate fits


def misfit(
    spec: AttentionSpec,
    q_rot: Tensor,
    k_rot: Tensor,
    seen: Mapping[str, Tensor],
    visible: Bool[Tensor, "query key"],
) -> float:
    """Return the largest error of the scores predicted from rotated vectors, in units of the rounding error.

    A spec is acceptable up to 1. If only the pattern fires, it is compared instead.
    """
    predicted, dtype = spec.score(q_rot, k_rot), seen["hook_q"].dtype  # scores may have a wider dtype than q and k
    if spec.taps.scores is not None:
        observed = seen["hook_attn_scores"]
        if predicted.shape == observed.shape:
            return mismatch(observed[..., visible], predicted[..., visible], dtype)
    elif "hook_pattern" in seen and seen["hook_pattern"].shape == predicted.shape:
        return mismatch(seen["hook_pattern"], predicted.masked_fill(~visible, -torch.inf).softmax(-1), dtype)
    return float("inf")
