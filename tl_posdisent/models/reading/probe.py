"""Find out what each attention layer does, with a few short forward passes.

First record which hooks fire and what they carry. Of all combinations of rotation, scale and soft cap that the model's
attributes suggest, choose the one that reproduces the layer's own scores; if none does, report it. Then repeat this at
far positions, to find the length up to which it holds, and perturb the tensors, to find which edits take effect.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posdisent.additive.score_checks import is_pattern
from tl_posdisent.models.reading import attributes as facts
from tl_posdisent.models.reading.forward_pass import Hook, Pass, running
from tl_posdisent.models.reading.model_parts import device_of, hook_name
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec, masked_below, n_layers
from tl_posdisent.models.reading.tokens import check_tokens, special_id
from tl_posdisent.rope.rotary import Rotary, rotated_by_table, table_like
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import mismatch
from tl_posdisent.utils.restoring import without_gradients

FIRST_HOOK = "hook_embed"  # the first hook of a forward pass, in all model classes


def probe(model: Any, layers: Sequence[int]) -> list[AttentionSpec]:
    """Measure an ``AttentionSpec`` for each of these layers by running the model."""
    tokens = check_tokens(model, probe_tokens(model))
    with running(model, bare=True) as p, without_gradients():
        # HookedTransformer, and a bridge in compatibility mode, replace NaN in the pattern by 0.
        hides_nan = getattr(model, "compatibility_mode", not hasattr(model, "original_model"))
        with _running_each_block_once(p):
            seen = listen(p, tokens, range(n_layers(model)) if hides_nan else layers, whole=True)
        for layer, tensors in seen.items():
            ends = [x for name, x in tensors.items() if name in ("hook_attn_scores", "hook_pattern")]
            if not all(bool((x < torch.inf).all()) for x in ends):  # NaN is not less
                raise ValueError(
                    f"layer {layer} of {facts.architecture(model)}: its scores are NaN or infinite: check the "
                    "weights, and whether numbers of this size fit its dtype"
                )
        own = facts.own_numbers(model)  # after the pass, which may overwrite them
        specs = [_explain(p, layer, seen[layer], own) for layer in layers]

        # A pattern alone says little about scores that are very large or almost equal.
        def to_unit_size(x: Tensor, hook: Any) -> Tensor:
            return (x / x.double().square().mean().sqrt().clamp_min(1e-30)).to(x.dtype)

        edits: list[Hook] = [
            (tap.name, to_unit_size)
            for layer in layers
            for which in "qk"
            if not shows_scores(seen[layer]) and (tap := facts.query_or_key(model, layer, which, seen[layer]))
        ]
        if edits:
            seen = listen(p, tokens, layers, edits)
            again = [_explain(p, layer, seen[layer], own) for layer in layers]
            specs = [s if now.problem else now for s, now in zip(specs, again, strict=True)]
        specs = check_lengths(p, tokens, specs, edits)
        specs = check_turns(p, tokens, specs, edits)
        return check_tables_and_scores(p, tokens, specs, edits)


@contextlib.contextmanager
def _running_each_block_once(p: Pass) -> Iterator[None]:
    """Refuse a model that runs a block several times in a pass: hooks, layers and tables have one place for each."""
    blocks = enumerate(p.model.blocks)
    parts = {part: n for n, block in blocks for part in (block, getattr(block, "attn", None)) if part is not None}
    with p.counting_runs(parts) as runs:
        yield
    for part, times in runs.items():
        if times > 1:
            raise ArgumentError(
                "model",
                f"must run each block once in a pass, got {facts.architecture(p.model)}, which runs block "
                f"{parts[part]} {times} times. Models with such loops are not supported",
            )


def probe_tokens(model: Any, length: int | None = None, seed: int = 0) -> Int[Tensor, "2 pos"]:
    """Draw two random texts of about ten tokens, or of another length, without special tokens."""
    cfg = model.cfg
    if length is None:
        heads = {cfg.n_heads, getattr(cfg, "n_key_value_heads", None)}
        length = next(n for n in (11, 10, 13, 12) if n not in heads)  # so that no two axes can be confused
        length = min(length, getattr(cfg, "n_ctx", None) or length)
    generator = torch.Generator().manual_seed(seed)
    tokenizer = getattr(model, "tokenizer", None)
    # Padding would change positions and mask.
    special = {
        *(getattr(tokenizer, "all_special_ids", None) or ()),
        getattr(cfg, "pad_id", None),
        special_id(model, "pad"),
    }
    ids = torch.tensor([t for t in range(min(cfg.d_vocab, 4096)) if t not in special], device="cpu")
    return ids[torch.randint(0, len(ids), (2, length), generator=generator, device="cpu")].to(device_of(model))


def _explain(p: Pass, layer: int, seen: Seen, own: facts.OwnNumbers) -> AttentionSpec:
    model = p.model
    attn, cfg = model.blocks[layer].attn, model.cfg
    visible = visible_cells(seen)
    causal = visible is None or not bool(visible.triu(1).any())
    window = next((w for w in facts.windows(model, attn) if is_mask(visible, causal, w)), None)
    names = [FIRST_HOOK, *(hook_name(layer, short) for short in seen)]

    def named(short: str) -> str | None:
        return hook_name(layer, short) if short in seen else None

    q, k = (facts.query_or_key(model, layer, which, seen) for which in "qk")
    n_kv = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
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
        points=WeakKeyDictionary({p.points[name]: name for name in names if name in p.points}),
    )
    if visible is None:
        return replace(
            spec,
            problem="neither hook_attn_scores nor hook_pattern fires: "
            + (
                "TransformerLens has no such hooks for this architecture"
                if facts.implementation(attn) == "eager"
                else 'its attention runs in a fused kernel. Load the model with attn_implementation="eager"'
            ),
        )
    if not is_mask(visible, causal, window):
        return replace(spec, problem="its mask is neither causal nor full nor a sliding window")
    if q is None or k is None:
        return replace(spec, problem="hook_q and hook_k do not fire")
    rotaries = [*facts.rotaries(model, attn, seen, own), None]
    scales, caps = dict.fromkeys(facts.scales(attn, spec.d_head)), dict.fromkeys(facts.soft_caps(model, attn))
    return _explain_scores(spec, q, k, seen, visible, itertools.product(rotaries, scales, caps))


def _explain_scores(
    spec: AttentionSpec, q: Tap, k: Tap, seen: Seen, visible: Tensor, explanations: Iterable[Any]
) -> AttentionSpec:
    """Find the rotation, scale and soft cap (the most specific first) under which queries and keys give the scores."""
    fits = q.read(seen[short_name(q)]), k.read(seen[short_name(k)])
    if any(x.ndim != 4 or x.shape[1] != len(visible) or spec.n_heads % x.shape[2] for x in fits):
        return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
    certain = all(bool(x.any()) for x in fits)
    # Take the number of key heads from the hooks: TransformerLens may ungroup keys.
    spec = replace(spec, n_kv_heads=fits[1].shape[2], certain=certain)
    k = replace(k, n_heads=spec.n_kv_heads)
    positions = torch.arange(len(visible), device=visible.device)
    tried: list[tuple[float, AttentionSpec, tuple[Tensor, Tensor]]] = []
    for rotary, scale, cap in explanations:
        candidate = replace(spec, rotary=rotary, scale=scale, soft_cap=cap)
        turned = candidate.rotated(fits[0].double(), positions), candidate.rotated(fits[1].double(), positions)
        tried.append((misfit(candidate, *turned, seen, visible), candidate, turned))
        if tried[-1][0] < 0.02:  # 2 % of the rounding tolerance: no other candidate can be right
            break
    best = min(error for error, *_ in tried)
    if best > 1:
        return replace(spec, problem=_unexplained(seen))
    # Among those that fit equally well (a high soft cap leaves no trace in 16 bits), the first is the most specific.
    _, chosen, turned = next(t for t in tried if t[0] <= 3 * best)
    return _with_taps(chosen, q, k, turned, seen)


def _unexplained(seen: Seen) -> str:
    """Say that nothing explains the scores of a layer, or its pattern, if hooks show only that."""
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


def _with_taps(spec: AttentionSpec, q: Tap, k: Tap, turned: Sequence[Tensor], seen: Seen) -> AttentionSpec:
    """Add the hooks to a spec; vectors may be turned at the hooks after rotation if they fire, otherwise before it."""
    layer = spec.layer

    def fires(name: str, x: Tensor) -> bool:
        return name in seen and seen[name].shape == x.shape and mismatch(seen[name], x) <= 1

    rotated = dict(zip(("hook_rot_q", "hook_rot_k"), turned, strict=True))
    if spec.rotary is None:
        if any(name in seen and not fires(name, x) for name, x in rotated.items()):
            return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
        return replace(spec, q=q, k=k)
    turn_q, turn_k = (
        Tap(hook_name(layer, name), "pos head", tap.n_heads) if fires(name, x) else tap
        for (name, x), tap in zip(rotated.items(), (q, k), strict=True)
    )
    tables = "hook_cos" in seen and "hook_sin" in seen
    return replace(
        spec,
        q=q,
        k=k,
        turn_q=None if turn_q.norm is not None else turn_q,  # a norm would have to be undone
        turn_k=None if turn_k.norm is not None else turn_k,
        cos=hook_name(layer, "hook_cos") if tables else None,
        sin=hook_name(layer, "hook_sin") if tables else None,
    )


# --- what fires in a pass, and how well a candidate fits it

_LISTEN = (
    *("hook_q", "hook_k", "hook_v", "hook_q_normed", "hook_k_normed", "hook_rot_q", "hook_rot_k"),
    *("hook_cos", "hook_sin", "hook_attn_scores", "hook_pattern", "hook_z"),
)

Seen = dict[str, Tensor]
"""Tensors recorded in one layer during one pass, by short hook name."""


def listen(
    p: Pass, tokens: Tensor, layers: Sequence[int], edits: Sequence[Hook] = (), *, whole: bool = False, **more: Any
) -> dict[int, Seen]:
    """Run one pass under edits and return what fired in each layer, after the edits; ``more`` are its arguments.

    The pass ends after the last of these layers, unless it is to be a ``whole`` one.
    """

    def record(seen: Seen, short: str, x: Any, hook: Any) -> None:
        if isinstance(x, Tensor):
            seen[short] = x.detach().clone()

    seen: dict[int, Seen] = {layer: {} for layer in layers}
    recorders = [
        (name, partial(record, seen[layer], short))
        for layer in layers
        for short in _LISTEN
        if (name := hook_name(layer, short)) in p.points
    ]
    p.run(tokens, [*edits, *recorders], stop=None if whole else max(layers) + 1, **more)
    return seen


def shows_scores(seen: Seen) -> bool:
    """Say whether the hook of the scores carries scores: in some classes it carries the pattern."""
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    return scores is not None and not (is_pattern(scores) or (pattern is not None and torch.equal(scores, pattern)))


def visible_cells(seen: Seen) -> Bool[Tensor, "query key"] | None:
    """Find the cells that any head of any text attends to. The result shows the probe's mask and is not used for fits.

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


def short_name(tap: Tap) -> str:
    """Return the hook's name without the layer: ``"hook_q"``."""
    return tap.name.rsplit(".", 1)[-1]


# --- the length of text up to which rotation and scale hold
#
# Some models rotate by other frequencies beyond a length (longrope of Phi-3 and Phi-4, dynamic NTK), or scale scores by
# the position (Llama 4). Ten tokens at the positions of the end of a long text show this without running a long text.


def check_lengths(p: Pass, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]) -> list[AttentionSpec]:
    """Set ``holds_to`` in layers whose rotation or scale changes with the length, under the edits ``first``."""
    explained = [spec for spec in specs if spec.problem is None and spec.q and spec.k]
    noted, farthest = facts.lengths_of_note(p.model)
    n = tokens.shape[1]
    if not explained or farthest <= n or not hasattr(p.model, "original_model"):  # HookedTransformer: fixed tables
        return specs

    @cache
    def held(length: int) -> dict[int, tuple[bool, bool]]:
        """Say for each layer whether its scores are as read, and whether they agree with its tables at that length."""
        try:
            positions = torch.arange(length - n, length, device=tokens.device)
            more: dict[str, Any] = {
                "position_ids": positions[None].expand(len(tokens), -1),
                "attention_mask": torch.ones_like(tokens),
            }
            seen = listen(p, tokens, [spec.layer for spec in explained], first, **more)
        except (TypeError, IndexError):  # the model takes no positions, or its table of them is shorter
            return {spec.layer: (True, True) for spec in explained}
        return {spec.layer: _holds(spec, seen[spec.layer], positions) for spec in explained}

    def longest(layer: int) -> int | None:
        if held(farthest)[layer][0]:
            return None
        low, high = n, farthest
        for length in sorted({x + more for x in noted for more in (-1, 0, 1)}):  # the likely lengths of a change
            if low < length < high:
                low, high = (length, high) if held(length)[layer][0] else (low, length)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if held(middle)[layer][0] else (low, middle)
        return low

    found = {spec.layer: longest(spec.layer) for spec in explained}
    scaled = {layer for layer, length in found.items() if length is not None and not held(farthest)[layer][1]}
    return [replace(spec, holds_to=found.get(spec.layer), scaled=spec.layer in scaled) for spec in specs]


def _holds(spec: AttentionSpec, seen: Seen, positions: Tensor) -> tuple[bool, bool]:
    """Say whether the layer's scores at these positions are as read at the beginning of a text.

    The second value says whether they agree with the layer's tables at these positions.
    """
    assert spec.q
    assert spec.k
    visible = visible_cells(seen)
    q, k = (tap.read(seen[short_name(tap)]).double() for tap in (spec.q, spec.k))
    if visible is None:
        return True, True
    for places in (positions, positions - positions[0]):  # the latter if the model ignores position_ids
        if misfit(spec, spec.rotated(q, places), spec.rotated(k, places), seen, visible) <= 1:
            return True, True
    if spec.rotary is None or "hook_cos" not in seen or "hook_sin" not in seen:
        return False, False
    q, k = (rotated_by_table(x, seen["hook_cos"], seen["hook_sin"], spec.rotary) for x in (q, k))
    return False, misfit(spec, q, k, seen, visible) <= 1


# --- edits that take effect
#
# Vectors are perturbed by additive noise, not by factors, which a norm after the hook would undo. Scores are replaced
# by random ones of ordinary size: a little noise would not change a sharp softmax.


def check_turns(p: Pass, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]) -> list[AttentionSpec]:
    """Drop the hooks of turned vectors at which an edit (after the edits ``first``) does not reach the scores."""
    generator = torch.Generator().manual_seed(1)

    def disturb(x: Tensor, hook: Any) -> Tensor:
        size = x.detach().double().square().mean().sqrt().clamp_min(1e-3)  # smaller noise is lost in large vectors
        noise = torch.randn(x.shape, generator=generator, device="cpu").to(x.device)
        return x + (noise * size).to(x.dtype)

    turning = [s for s in specs if s.turn_q and s.turn_k]
    edits = [*first] + [(tap.name, disturb) for s in turning for tap in (s.turn_q, s.turn_k) if tap]
    seen = listen(p, tokens, [s.layer for s in turning], edits) if turning else {}
    return [judge_turns(spec, seen.get(spec.layer, {})) for spec in specs]


def judge_turns(spec: AttentionSpec, now: Seen) -> AttentionSpec:
    if spec.rotary is None:
        return spec
    if not (spec.turn_q and spec.turn_k):
        return replace(spec, no_rotation="has no hook at which turned queries and keys can be set")
    taps, visible = (spec.turn_q, spec.turn_k), visible_cells(now)
    q, k = (tap.read(now[short_name(tap)]).double() for tap in taps)
    places = torch.arange(q.shape[1], device=q.device)
    q, k = (  # a hook comes after the rotation or before it
        x if short_name(tap).startswith("hook_rot") else spec.rotated(x, places)
        for x, tap in zip((q, k), taps, strict=True)
    )
    if visible is not None and misfit(spec, q, k, now, visible) <= 1:
        return spec
    reason = f"discards edits at {spec.turn_q.name} and {spec.turn_k.name}"
    return replace(spec, turn_q=None, turn_k=None, no_rotation=reason)


def check_tables_and_scores(
    p: Pass, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]
) -> list[AttentionSpec]:
    """Test which layers use edited rotation tables and edited scores, under the edits ``first``."""
    generator = torch.Generator().manual_seed(2)
    edits: list[Hook] = [*first]
    positions = (torch.arange(tokens.shape[1], device=tokens.device) * 2 + 3).flip(0) ** 1.5
    before: dict[int, Tensor] = {}

    def exchange(rotary: Rotary, which: str, x: Tensor, hook: Any) -> Tensor:
        return table_like(x, rotary, positions, which)

    def disturb(spec: AttentionSpec, x: Tensor, hook: Any) -> Tensor:
        before[spec.layer] = x.detach().clone()
        return torch.where(spec.is_masked(x), x, torch.randn(x.shape, generator=generator, device="cpu").to(x))

    for spec in specs:
        if spec.cos and spec.sin and spec.rotary:
            tables = (("cos", spec.cos), ("sin", spec.sin))
            edits += [(name, partial(exchange, spec.rotary, which)) for which, name in tables]
        if spec.scores:
            edits.append((spec.scores, partial(disturb, spec)))
    seen = listen(p, tokens, [s.layer for s in specs], edits) if len(edits) > len(first) else {}
    return [_judge(s, seen.get(s.layer, {}), before.get(s.layer), positions) for s in specs]


def _judge(spec: AttentionSpec, now: Seen, before: Tensor | None, positions: Tensor) -> AttentionSpec:
    visible = visible_cells(now)
    if spec.cos and spec.q and spec.k and visible is not None:
        q, k = (spec.rotated(tap.read(now[short_name(tap)]).double(), positions) for tap in (spec.q, spec.k))
        then = {**now, "hook_attn_scores": before} if before is not None else now
        if misfit(spec, q, k, then, visible) > 1:
            spec = replace(spec, cos=None, sin=None)
    if spec.scores and visible is not None and "hook_pattern" in now:
        editable = is_softmax(now["hook_pattern"], now["hook_attn_scores"], visible)
        spec = replace(spec, scores_editable=editable)
    return spec
