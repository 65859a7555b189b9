"""Finding out what each attention layer does, by three short forward passes.

1. Listen: which hooks fire and what they carry. Of all combinations of rotation, scale and soft cap that the model's
   attributes suggest, the one that reproduces the layer's own scores is the answer; if none does, that is said.
2. Disturb the rotated (or still unrotated) queries and keys: do the scores follow?
3. Exchange the rotation tables and disturb the scores: do scores and pattern follow?

The disturbances are additive noise, not factors: a norm after the hook would undo a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from . import facts
from .attention import AttentionSpec, Tap, n_layers
from .run import Hook, at_rest, device_of, hook_name, run
from .tables import table_like

_LISTEN = (
    *("hook_q", "hook_k", "hook_v", "hook_q_normed", "hook_k_normed", "hook_rot_q", "hook_rot_k"),
    *("hook_cos", "hook_sin", "hook_attn_scores", "hook_pattern", "hook_z"),
)


def probe(model: Any, layers: Sequence[int]) -> list[AttentionSpec]:
    """An ``AttentionSpec`` for each of these layers."""
    n_layers(model)
    tokens = _tokens(model)
    with at_rest(model):
        seen = _listen(model, tokens, layers)
        specs = [_explain(model, layer, seen[layer]) for layer in layers]
        specs = _test_turns(model, tokens, specs)
        return _test_tables_and_scores(model, tokens, specs)


def is_masked(scores: Float[Tensor, "*cells"]) -> Bool[Tensor, "*cells"]:
    """Cells that hold no score: models mask with -inf or with the most negative number of a dtype."""
    return scores <= max(-1e30, torch.finfo(scores.dtype).min)


def score_tolerance(dtype: torch.dtype) -> float:
    """How nearly recomputed scores must agree, relative to the largest."""
    return {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 6e-2)


def _tokens(model: Any) -> Int[Tensor, "2 pos"]:
    cfg = model.cfg
    heads = {cfg.n_heads, getattr(cfg, "n_key_value_heads", None)}
    length = next(n for n in (11, 10, 13, 12) if n not in heads)  # so that no axis can be taken for another
    length = min(length, getattr(cfg, "n_ctx", None) or length)
    generator = torch.Generator().manual_seed(0)
    tokenizer = getattr(model, "tokenizer", None)
    special = set(getattr(tokenizer, "all_special_ids", None) or ())  # padding would change positions and mask
    ids = torch.tensor([t for t in range(min(cfg.d_vocab, 4096)) if t not in special])
    return ids[torch.randint(0, len(ids), (2, length), generator=generator)].to(device_of(model))


def _listen(
    model: Any, tokens: Tensor, layers: Sequence[int], edits: Sequence[Hook] = ()
) -> dict[int, dict[str, Tensor]]:
    seen: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}

    def recorder(layer: int, short: str) -> Hook:
        def record(x: Tensor, hook: Any) -> None:
            if isinstance(x, Tensor):
                seen[layer][short] = x.detach().clone()

        return hook_name(layer, short), record

    listeners = [
        recorder(layer, short) for layer in layers for short in _LISTEN if hook_name(layer, short) in model.hook_dict
    ]
    run(model, tokens, [*edits, *listeners])
    return seen


def _explain(model: Any, layer: int, seen: dict[str, Tensor]) -> AttentionSpec:
    attn, cfg = model.blocks[layer].attn, model.cfg
    n_kv = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    visible = _visible(seen)
    causal = visible is None or not bool(visible.triu(1).any())
    window = next((w for w in facts.windows(model, attn) if _mask_is(visible, causal, w)), None)
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    real_scores = scores is not None and not (pattern is not None and torch.equal(scores, pattern))

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
        scores=named("hook_attn_scores") if real_scores else None,
        pattern=named("hook_pattern"),
        z=named("hook_z"),
        v=Tap(hook_name(layer, "hook_v"), "pos head", n_kv) if "hook_v" in seen else None,
    )
    if visible is None:
        return replace(
            spec,
            problem="neither hook_attn_scores nor hook_pattern fires: its attention runs in a fused kernel. "
            'Load the model with attn_implementation="eager"',
        )
    if not _mask_is(visible, causal, window):
        return replace(spec, problem=f"its mask is neither causal nor full nor a sliding window:\n{visible.int()}")
    if q is None or k is None:
        return replace(spec, problem="hook_q and hook_k do not fire")
    return _explain_scores(model, attn, spec, q, k, seen, visible)


def _explain_scores(
    model: Any, attn: Any, spec: AttentionSpec, q: Tap, k: Tap, seen: dict[str, Tensor], visible: Tensor
) -> AttentionSpec:
    """The rotation, scale and soft cap under which queries and keys give the scores that were seen."""
    fits = q.read(seen[q.name]), k.read(seen[k.name])
    if any(x.ndim != 4 or x.shape[1] != len(visible) or spec.n_heads % x.shape[2] for x in fits):
        return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
    spec = replace(spec, n_kv_heads=fits[1].shape[2])  # as many as the hooks show: TransformerLens may ungroup keys
    k = replace(k, n_heads=spec.n_kv_heads)
    positions = torch.arange(len(visible), device=visible.device)
    candidates = [*facts.rotaries(model, attn, seen), None]
    for rotary in candidates:
        for scale in dict.fromkeys(facts.scales(attn, spec.d_head)):
            for cap in dict.fromkeys(facts.soft_caps(model, attn)):
                tried = replace(spec, rotary=rotary, scale=scale, soft_cap=cap)
                turned = [tried.rotated(x.double(), positions) for x in fits]
                if _explains(tried, turned[0], turned[1], seen, visible):
                    return _with_taps(tried, q, k, turned, seen)
    return replace(
        spec,
        problem="its scores are not scale * <q, k> under any rotation, scale and soft cap found in the model "
        "(an additive bias such as ALiBi, or an unknown rotation)",
    )


_ROTATED_EARLIER = (
    "carries vectors at hook_q and hook_k that are rotated already or not laid out per head "
    "(multi-head latent attention)"
)


def _with_taps(
    spec: AttentionSpec, q: Tap, k: Tap, turned: Sequence[Tensor], seen: dict[str, Tensor]
) -> AttentionSpec:
    """Names completed, and the candidates for turning vectors: the rotated ones if they fire, else the unrotated."""
    layer = spec.layer
    if spec.rotary is None:
        rotated = any(
            name in seen and not (seen[name].shape == x.shape and _near(seen[name], x))
            for name, x in zip(("hook_rot_q", "hook_rot_k"), turned, strict=True)
        )
        if rotated:
            return replace(spec, problem=_ROTATED_EARLIER, no_rotation=_ROTATED_EARLIER)
        return replace(spec, q=_full(layer, q), k=_full(layer, k))
    taps = []
    for name, tap, x in (("hook_rot_q", q, turned[0]), ("hook_rot_k", k, turned[1])):
        fires = name in seen and seen[name].shape == x.shape and _near(seen[name], x)
        taps.append(Tap(name, "pos head", tap.n_heads) if fires else tap)
    turn_q, turn_k = (None if tap.norm is not None else _full(layer, tap) for tap in taps)
    tables = "hook_cos" in seen and "hook_sin" in seen
    return replace(
        spec,
        q=_full(layer, q),
        k=_full(layer, k),
        turn_q=turn_q,
        turn_k=turn_k,
        cos=hook_name(layer, "hook_cos") if tables else None,
        sin=hook_name(layer, "hook_sin") if tables else None,
    )


def _test_turns(model: Any, tokens: Tensor, specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """Drop hooks of turned vectors at which an edit does not reach the scores."""
    generator = torch.Generator().manual_seed(1)

    def disturb(x: Tensor, hook: Any) -> Tensor:
        return x + torch.randn(x.shape, generator=generator).to(x)

    turning = [s for s in specs if s.turn_q and s.turn_k]
    edits = [(tap.name, disturb) for s in turning for tap in (s.turn_q, s.turn_k) if tap]
    seen = _listen(model, tokens, [s.layer for s in turning], edits) if turning else {}
    tested = []
    for spec in specs:
        if spec.layer in seen and spec.turn_q and spec.turn_k:
            now = seen[spec.layer]
            ends = [tap.read(now[_short(tap)]).double() for tap in (spec.turn_q, spec.turn_k)]
            if not _short(spec.turn_q).startswith("hook_rot"):
                ends = [spec.rotated(x, torch.arange(x.shape[1], device=x.device)) for x in ends]
            visible = _visible(now)
            if visible is None or not _explains(spec, ends[0], ends[1], now, visible):
                reason = f"discards edits at {spec.turn_q.name} and {spec.turn_k.name}"
                spec = replace(spec, turn_q=None, turn_k=None, no_rotation=reason)
        elif spec.rotary is not None:
            spec = replace(spec, no_rotation="has no hook at which turned queries and keys can be set")
        tested.append(spec)
    return tested


def _test_tables_and_scores(model: Any, tokens: Tensor, specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """Which layers use edited rotation tables and edited scores."""
    generator = torch.Generator().manual_seed(2)
    edits: list[Hook] = []
    positions = torch.arange(tokens.shape[1], device=tokens.device) * 2 + 3
    before: dict[int, Tensor] = {}

    def other_table(spec: AttentionSpec, which: str) -> Any:
        def exchange(x: Tensor, hook: Any) -> Tensor:
            assert spec.rotary is not None
            return table_like(x, spec.rotary, positions.flip(0) ** 1.5, which)

        return exchange

    def disturb(spec: AttentionSpec) -> Any:
        def edit(x: Tensor, hook: Any) -> Tensor:
            before[spec.layer] = x.detach().clone()
            return x + torch.randn(x.shape, generator=generator).to(x)

        return edit

    for spec in specs:
        if spec.cos and spec.sin:
            edits += [(spec.cos, other_table(spec, "cos")), (spec.sin, other_table(spec, "sin"))]
        if spec.scores:
            edits.append((spec.scores, disturb(spec)))
    seen = _listen(model, tokens, [s.layer for s in specs], edits) if edits else {}
    return [_judge(s, seen.get(s.layer, {}), before.get(s.layer), positions.flip(0) ** 1.5) for s in specs]


def _judge(spec: AttentionSpec, now: dict[str, Tensor], before: Tensor | None, positions: Tensor) -> AttentionSpec:
    visible = _visible(now)
    if spec.cos and spec.q and spec.k and visible is not None:
        ends = [spec.rotated(tap.read(now[_short(tap)]).double(), positions) for tap in (spec.q, spec.k)]
        then = {**now, "hook_attn_scores": before} if before is not None else now
        if not _explains(spec, ends[0], ends[1], then, visible):
            spec = replace(spec, cos=None, sin=None)
    if spec.scores and visible is not None and "hook_pattern" in now:
        pattern = now["hook_pattern"].double()
        wanted = now["hook_attn_scores"].double().masked_fill(~visible, -torch.inf).softmax(-1)
        # Attention sinks take a part of each row; what they leave is shared as the softmax says.
        spec = replace(spec, scores_editable=_near(pattern / pattern.sum(-1, keepdim=True), wanted))
    return spec


def _explains(
    spec: AttentionSpec, q_rot: Tensor, k_rot: Tensor, seen: dict[str, Tensor], visible: Bool[Tensor, "query key"]
) -> bool:
    predicted = spec.score(q_rot, k_rot)
    if spec.scores is not None:
        observed = seen["hook_attn_scores"]
        return predicted.shape == observed.shape and _near(observed[..., visible], predicted[..., visible])
    pattern = seen.get("hook_pattern")
    wanted = predicted.masked_fill(~visible, -torch.inf).softmax(-1)
    return pattern is not None and pattern.shape == wanted.shape and _near(pattern, wanted)


def _near(observed: Tensor, predicted: Tensor) -> bool:
    allowed = score_tolerance(observed.dtype) * observed.double().abs().amax().clamp_min(1.0)
    return bool(((observed.double() - predicted.double()).abs() <= allowed).all())


def _visible(seen: dict[str, Tensor]) -> Bool[Tensor, "query key"] | None:
    """Cells that any head of any text attends to: the probe's own look at the mask, never used for a fit."""
    if "hook_pattern" in seen:
        return (seen["hook_pattern"] > 0).flatten(0, -3).any(0)
    if "hook_attn_scores" in seen:
        return (~is_masked(seen["hook_attn_scores"])).flatten(0, -3).any(0)
    return None


def _mask_is(visible: Tensor | None, causal: bool, window: int | None) -> bool:
    if visible is None:
        return True
    layer = AttentionSpec(0, "", 1, 1, 1, causal, window)
    return torch.equal(visible, layer.mask(len(visible), visible.device))


def _full(layer: int, tap: Tap) -> Tap:
    return replace(tap, name=hook_name(layer, tap.name))


def _short(tap: Tap) -> str:
    return tap.name.rsplit(".", 1)[-1]
