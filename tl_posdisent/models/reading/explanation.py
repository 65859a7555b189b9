"""Explain a layer's scores: which rotation, scale, soft cap and window give the scores that a pass showed.

The candidates come from the attributes in which model classes keep them, and all names of such attributes are in this
file. A candidate is accepted only if it reproduces what the model computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posdisent.additive.score_checks import is_pattern
from tl_posdisent.models.reading.query_key_hooks import LatentLayout, Layout, Tap
from tl_posdisent.models.reading.spec import AttentionSpec, masked_below
from tl_posdisent.models.running.forward_pass import Pass
from tl_posdisent.models.running.model_parts import FIRST_HOOK, architecture, hook_name, implementation, modules
from tl_posdisent.rope.rotary import Pairing, Rotary, rotary_from_table, table_like
from tl_posdisent.utils.precision import mismatch
from tl_posdisent.utils.validation import is_number

PAIRINGS: tuple[Pairing, ...] = ("half", "adjacent")

Seen = dict[str, Tensor]
"""Tensors recorded in one layer during one pass, by short hook name."""


def explain(p: Pass, layer: int, seen: Seen, own: OwnNumbers, keys_of: int | None = None) -> AttentionSpec:
    """Describe a layer from one pass: the rotation, scale and cap that reproduce its scores, or why none do.

    ``keys_of`` is the layer to which the keys and values in ``seen`` belong, if not to this one.
    """
    model = p.model
    attn, cfg = model.blocks[layer].attn, model.cfg
    visible = visible_cells(seen)
    causal = visible is None or not bool(visible.triu(1).any())
    window = next((w for w in windows(model, attn) if is_mask(visible, causal, w)), None)
    names = [FIRST_HOOK, *(hook_name(layer, short) for short in seen)]

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
        scores=named("hook_attn_scores") if shows_scores(seen) else None,
        pattern=named("hook_pattern"),
        z=named("hook_z"),
        v=Tap(hook_name(layer, "hook_v"), "pos head", n_kv) if "hook_v" in seen else None,
        masked_below=masked_score(seen),
        points=WeakKeyDictionary({p.points[name]: name for name in names if name in p.points}),
    )
    if visible is None:
        return replace(
            spec,
            problem="neither hook_attn_scores nor hook_pattern fires: "
            + (
                "TransformerLens has no such hooks for this architecture"
                if implementation(attn) == "eager"
                else 'its attention runs in a fused kernel. Load the model with attn_implementation="eager"'
            ),
        )
    if not is_mask(visible, causal, window):
        return replace(spec, problem=_other_mask(visible, chunk_size(attn, layer)))
    pairs = list(queries_and_keys(model, layer, seen))
    if not pairs:
        return replace(spec, problem="hook_q and hook_k do not fire")
    rotations = [*rotaries(model, attn, seen, own), None]
    factors = dict.fromkeys(scales(attn, seen["hook_q"].shape[-1] if seen["hook_q"].ndim == 4 else cfg.d_head))
    caps = dict.fromkeys(soft_caps(model, attn))  # each once, in order
    spec = _explain_scores(spec, seen, visible, itertools.product(rotations, pairs, factors, caps))
    if shows_scores(seen) or spec.problem:
        return spec
    spec = _explain_result(_with_limit(spec, attn), seen)
    if keys_of is not None:
        spec = _at_lender(spec, p, keys_of)
    return replace(spec, turn_q=None, turn_k=None) if keys_of is not None or lends(p, layer) else spec


def _other_mask(visible: Tensor, chunk: int | None) -> str:
    """Return the reason given for a mask that is not described."""
    at = torch.arange(len(visible), device=visible.device)
    if chunk is None or not torch.equal(visible, (at[:, None] >= at) & (at[:, None] // chunk == at // chunk)):
        return "its mask is neither causal nor full nor a sliding window"
    return (
        f"its mask hides the keys of earlier chunks of {chunk} tokens (chunked attention), and the {len(visible)} "
        "tokens on which a model is read must be within one chunk"
    )


def _with_limit(spec: AttentionSpec, attn: Any) -> AttentionSpec:
    """Set the length up to which the layer's mask and the scale of its queries are those of a short text."""
    chunk, norm = chunk_size(attn, spec.layer), None if spec.q is None else spec.q.norm
    if chunk is not None:
        return replace(spec, holds_to=chunk, beyond="hides the keys of earlier chunks of a text")
    if isinstance(norm, Temperature):
        return replace(spec, holds_to=norm.floor - 1, beyond="scales queries by their position")
    return spec


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
        candidate = replace(spec, rotary=rotary, scale=scale, soft_cap=cap, q=pair[0], k=pair[1])
        candidate = _with_sizes(candidate, *vectors)
        turned = candidate.rotated(vectors[0], positions), candidate.rotated(vectors[1], positions)
        if pair[0].latent is not None and not _gives_rotated(candidate, turned, seen):
            continue
        tried.append((misfit(candidate, *turned, seen, visible), candidate, turned))
        if tried[-1][0] < 0.02:  # 2 % of the rounding tolerance: no other candidate can be right
            break
    if not tried:
        return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
    best = min(error for error, *_ in tried)
    if best > 1:
        return replace(spec, n_kv_heads=tried[0][1].n_kv_heads, problem=_unexplained(seen))
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
    assert spec.k is not None
    n_kv, d_head = k.shape[2:]
    certain = bool(q.any()) and bool(k.any())
    return replace(spec, k=replace(spec.k, n_heads=n_kv), n_kv_heads=n_kv, d_head=d_head, certain=certain)


def _explain_result(spec: AttentionSpec, seen: Seen) -> AttentionSpec:
    """Find the values of which z is the weighted sum, and the gate that multiplies it, if there is one."""
    if "hook_z" in seen and "hook_pattern" in seen:
        for v, gate in itertools.product(value_taps(spec, seen), gate_taps(spec, seen)):
            values, gates = (None if tap is None else read(tap, seen) for tap in (v, gate))
            found = replace(spec, v=v, gate=gate)
            if values is not None and values.shape[2] == spec.n_kv_heads:
                gathered = found.gathered(seen["hook_pattern"], values, gates)
                if gathered.shape == seen["hook_z"].shape and mismatch(seen["hook_z"], gathered) <= 1:
                    return found
    return replace(spec, v=None)


def _unexplained(seen: Seen) -> str:
    """Return the reason given for scores (or a pattern, if only that is shown) that no candidate reproduces."""
    found = "scale * <q, k> under any rotation, scale and soft cap found in the model"
    if shows_scores(seen):
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
    """Add the hooks of turned vectors and tables; vectors are set after the rotation if a hook fires there."""
    layer = spec.layer
    if spec.rotary is None:
        for name, x in zip(("hook_rot_q", "hook_rot_k"), turned, strict=True):
            if name in seen and not _carries(seen[name], x):
                return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
        return spec

    def turning(which: str, tap: Tap | None, x: Tensor) -> Tap | None:
        assert tap is not None
        if tap.latent is not None:
            return _rotated_latent(layer, which, tap)
        for name in (f"hook_rot_{which}", f"{which}_norm.hook_out"):
            for layout in _layouts(seen, name):
                behind = Tap(hook_name(layer, name), layout, tap.n_heads)
                if _carries(behind.read(seen[name]), x):
                    return behind
        return tap if tap.norm is None else None  # a norm would have to be undone

    tables = "hook_cos" in seen and "hook_sin" in seen
    return replace(
        spec,
        turn_q=turning("q", spec.q, turned[0]),
        turn_k=turning("k", spec.k, turned[1]),
        cos=hook_name(layer, "hook_cos") if tables else None,
        sin=hook_name(layer, "hook_sin") if tables else None,
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
    assert spec.q is not None
    assert spec.k is not None
    taps = (_rotated_latent(spec.layer, which, tap) for which, tap in (("q", spec.q), ("k", spec.k)))
    return all(_carries(read(tap, seen), x) for tap, x in zip(taps, turned, strict=True))


def _layouts(seen: Seen, *names: str) -> list[Layout]:
    """Return the layouts that tensors at these hooks may have; none if one of the hooks did not fire."""
    if any(name not in seen for name in names):
        return []
    return ["flat"] if seen[names[0]].ndim == 3 else ["pos head", "head pos"]


def _carries(seen: Tensor, x: Tensor) -> bool:
    """Say whether a hook carried these vectors."""
    return seen.shape == x.shape and mismatch(seen, x) <= 1


# --- layers that attend to the keys and values of another layer
#
# An edit of keys would act in all these layers, so scores are edited instead, in each by its result.

_LENT = ("hook_k", "k_norm.hook_in", "k_norm.hook_out", "hook_v", "v_norm.hook_out")


def lenders(p: Pass, layer: int) -> list[int]:
    """Return the layers whose keys a layer may attend to if it has none of its own, the nearest first."""
    if _has_keys(p.points, layer) or hook_name(layer, "q.hook_out") not in p.points:
        return []
    return [earlier for earlier in reversed(range(layer)) if _has_keys(p.points, earlier)]


def lends(p: Pass, layer: int) -> bool:
    """Say whether later layers may attend to this layer's keys."""
    own = getattr(p.model.blocks[layer].attn, "original_component", None)
    borrowers = [later for later in range(layer + 1, len(p.model.blocks)) if lenders(p, later)]
    return bool(borrowers) and getattr(own, "store_full_length_kv", True)


def _has_keys(points: Mapping[str, Any], layer: int) -> bool:
    return hook_name(layer, "k.hook_out") in points


def with_lent(seen: Seen, lender: Seen) -> Seen:
    """Return what a layer showed, with the keys and values of another layer, which fired before."""
    return {name: lender[name] for name in _LENT if name in lender} | seen


def _at_lender(spec: AttentionSpec, p: Pass, lender: int) -> AttentionSpec:
    """Return the spec with the hooks of keys and values in the layer to which they belong."""
    k, v = (tap and replace(tap, name=hook_name(lender, short_name(tap.name))) for tap in (spec.k, spec.v))
    names = [FIRST_HOOK, *(tap.name for tap in (k, v) if tap)]
    points = WeakKeyDictionary({p.points[name]: name for name in names if name in p.points})
    for point, name in spec.points.items():
        points.setdefault(point, name)
    return replace(spec, k=k, v=v, keys_of=lender, points=points)


# --- what a pass showed, and how well a candidate fits it


def shows_scores(seen: Seen) -> bool:
    """Say whether the hook of the scores carries scores: in some classes it carries the pattern."""
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    return scores is not None and not (is_pattern(scores) or (pattern is not None and torch.equal(scores, pattern)))


def visible_cells(seen: Seen) -> Bool[Tensor, "query key"] | None:
    """Find the cells that any head of any text attends to: the mask of the probe's text, which fits do not use.

    It is read from the scores if they are shown, since a sharp softmax leaves zeros without any mask.
    """
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    attended = None if pattern is None else (pattern > 0).flatten(0, -3).any(0)
    if scores is None or not shows_scores(seen):
        return attended
    visible = (scores > masked_score(seen)).flatten(0, -3).any(0)
    if pattern is None or attended is None or torch.equal(visible, attended):
        return visible
    return visible if is_softmax(pattern, scores, visible) else attended  # some models show unmasked scores


def is_softmax(pattern: Tensor, scores: Tensor, visible: Bool[Tensor, "query key"]) -> bool:
    """Say whether the pattern is the softmax of these scores, up to the share of a row that attention sinks take."""
    wanted = scores.double().masked_fill(~visible, -torch.inf).softmax(-1)
    shared = pattern.double() / pattern.double().sum(-1, keepdim=True)
    return mismatch(shared.to(pattern.dtype), wanted) <= 1


def masked_score(seen: Seen) -> float:
    """Return the value at or below which a cell of this pass is masked."""
    return masked_below(*(seen[name].dtype for name in ("hook_attn_scores", "hook_q", "hook_v") if name in seen))


def is_mask(visible: Tensor | None, causal: bool, window: int | None) -> bool:
    """Say whether the visible cells are those of a causal or full mask with this window."""
    if visible is None:
        return True
    layer = AttentionSpec(0, "", 1, 1, 1, causal, window)
    return torch.equal(visible, layer.mask(len(visible), visible.device))


def misfit(spec: AttentionSpec, q_rot: Tensor, k_rot: Tensor, seen: Seen, visible: Bool[Tensor, "query key"]) -> float:
    """Return the largest error of the scores predicted from rotated vectors, in units of the rounding error.

    A spec is acceptable up to 1. If only the pattern fires, it is compared instead.
    """
    predicted, dtype = spec.score(q_rot, k_rot), seen["hook_q"].dtype  # scores may have a wider dtype than q and k
    if spec.scores is not None:
        observed = seen["hook_attn_scores"]
        if predicted.shape == observed.shape:
            return mismatch(observed[..., visible], predicted[..., visible], dtype)
    elif "hook_pattern" in seen and seen["hook_pattern"].shape == predicted.shape:
        return mismatch(seen["hook_pattern"], predicted.masked_fill(~visible, -torch.inf).softmax(-1), dtype)
    return float("inf")


def read(tap: Tap, seen: Seen) -> Tensor:
    """Return the vectors at a hook, from what a pass showed."""
    return tap.read(*(seen[short_name(name)] for name in tap.names))


def short_name(name: str) -> str:
    """Return a hook's name within the attention of a layer: ``"hook_q"``, ``"q_norm.hook_out"``."""
    return name.split(".attn.", 1)[-1]


# --- candidates, from the attributes of model classes


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


Pair = tuple[Tap, Tap]
"""The hooks of queries and of keys."""


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
    if own is not None and not shows_scores(seen):
        names = [f"{which}_norm.hook_out" for which in "qk"]
        for layout in _layouts(seen, *names):
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
        if (tempered := temperature(own)) is not None:
            yield replace(plain[0], norm=tempered), plain[1]
    yield plain


# Multi-head latent attention: the projections to queries, and to their latent, if they have one; the projection to the
# latent of the keys and to their rotary slice, which all heads share, and that to the content of keys and values.
LATENT_QUERIES = {"q_b_proj.hook_out": "q_a_proj.hook_out", "q_proj.hook_out": None}
LATENT_KEYS = ("kv_a_proj_with_mqa.hook_out", "kv_b_proj.hook_out")


def is_latent(seen: Seen) -> bool:
    """Say whether a layer has multi-head latent attention, whose hook_q and hook_k carry rotated vectors."""
    return all(name in seen for name in ("hook_q", "hook_k", "hook_rot_q", *LATENT_KEYS))


def _latent_pairs(layer: int, seen: Seen) -> Iterator[Pair]:
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


def _query_or_key(model: Any, layer: int, which: str, seen: Seen) -> Tap | None:
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
        if own.w.numel() == attn.cfg.d_head:
            norm = partial(attn._apply_qk_norm, norm_module=own)
        else:  # OLMo 2 normalises all heads together
            norm = lambda x: own(x.flatten(2)).view_as(x)  # noqa: E731
    return Tap(hook_name(layer, f"hook_{which}"), "pos head", n_heads, norm)


def value_taps(spec: AttentionSpec, seen: Seen) -> Iterator[Tap]:
    """Yield candidates for the hook of the values that are weighted, the last in the pass first."""
    for name in ("v_norm.hook_out", "hook_v"):
        if name in seen:
            yield Tap(hook_name(spec.layer, name), "pos head", spec.n_kv_heads)


def gate_taps(spec: AttentionSpec, seen: Seen) -> Iterator[Tap | None]:
    """Yield candidates for the hook of what multiplies z before the output projection; None for nothing."""
    yield None
    gate = seen.get("gate.hook_out")
    if gate is not None and gate.ndim == 3 and gate.shape[-1] % spec.n_heads == 0:  # of each head or coordinate
        for function in (torch.sigmoid, torch.nn.functional.softplus):
            yield Tap(hook_name(spec.layer, "gate.hook_out"), "flat", spec.n_heads, function)


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


def chunk_size(attn: Any, layer: int) -> int | None:
    """Return the number of tokens in a chunk, before which keys are hidden (Llama 4); None without chunks."""
    config: Any = getattr(getattr(attn, "original_component", None), "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)


@dataclass(frozen=True)
class Temperature:
    """The factor of queries by their position in a whole text, in layers of Llama 4 without rotation.

    It is 1 up to position ``floor - 2``.
    """

    floor: int
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        at = torch.arange(1, x.shape[1] + 1, device=x.device).float()
        factor = torch.log1p(torch.floor(at / self.floor)) * self.scale + 1
        return (x * factor[:, None, None]).to(x.dtype)


def temperature(own: Any) -> Temperature | None:
    """Return how the code of a Hugging Face layer scales its queries by their position, or None."""
    names = ("attn_temperature_tuning", "floor_scale", "attn_scale", "use_rope")
    tuned, floor, scale, rotates = (getattr(own, name, None) for name in names)
    return Temperature(int(floor), float(scale)) if tuned and floor and scale and not rotates else None


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


def rotaries(model: Any, attn: Any, seen: dict[str, Tensor], own: OwnNumbers) -> Iterator[Rotary]:
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
    if not shows_scores(seen) or is_latent(seen):  # tables may pass no hook (complex ones, or Hugging Face's code)
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


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if is_number(value) else None


# --- stored tables of rotations


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
