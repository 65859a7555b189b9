"""Test which edits of an attention layer take effect: the second and third pass of the probe.

1. Disturb the rotated (or still unrotated) queries and keys: do the scores follow?
2. Exchange the rotation tables and disturb the scores: do scores and pattern follow?

Vectors are disturbed by additive noise, not factors, which a norm after the hook would undo. Scores are replaced by
some of ordinary size: to a sharp softmax a little noise makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.observe import Seen, is_softmax, listen, misfit, short_name, visible_cells
from tl_posdisent.models.reading.rotation_tables import table_like
from tl_posdisent.models.reading.spec import AttentionSpec, Tap


def check_turns(model: Any, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]) -> list[AttentionSpec]:
    """Drop hooks of turned vectors at which an edit, after these first ones, does not reach the scores."""
    generator = torch.Generator().manual_seed(1)

    def disturb(x: Tensor, hook: Any) -> Tensor:
        return x + noise_like(x, generator)

    turning = [s for s in specs if s.turn_q and s.turn_k]
    edits = [*first] + [(tap.name, disturb) for s in turning for tap in (s.turn_q, s.turn_k) if tap]
    seen = listen(model, tokens, [s.layer for s in turning], edits) if turning else {}
    return [_judge_turns(spec, seen.get(spec.layer, {})) for spec in specs]


def noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the size of ``x``: less would be lost in large vectors."""
    size = x.detach().double().square().mean().sqrt().clamp_min(1e-3)
    return (torch.randn(x.shape, generator=generator).to(x.device) * size).to(x.dtype)


def _judge_turns(spec: AttentionSpec, now: Seen) -> AttentionSpec:
    if spec.rotary is None:
        return spec
    if not (spec.turn_q and spec.turn_k):
        return replace(spec, no_rotation="has no hook at which turned queries and keys can be set")
    q, k = (_rotated(spec, tap, now) for tap in (spec.turn_q, spec.turn_k))
    visible = visible_cells(now)
    if visible is not None and misfit(spec, q, k, now, visible) <= 1:
        return spec
    reason = f"discards edits at {spec.turn_q.name} and {spec.turn_k.name}"
    return replace(spec, turn_q=None, turn_k=None, no_rotation=reason)


def _rotated(spec: AttentionSpec, tap: Tap, now: Seen) -> Tensor:
    """What a tap for turned vectors comes to, whether it lies behind the rotation or before it."""
    x = tap.read(now[short_name(tap)]).double()
    if short_name(tap).startswith("hook_rot"):
        return x
    return spec.rotated(x, torch.arange(x.shape[1], device=x.device))


def check_tables_and_scores(
    model: Any, tokens: Tensor, specs: list[AttentionSpec], first: Sequence[Hook]
) -> list[AttentionSpec]:
    """Which layers use edited rotation tables and edited scores, after these first edits."""
    generator = torch.Generator().manual_seed(2)
    edits: list[Hook] = [*first]
    positions = (torch.arange(tokens.shape[1], device=tokens.device) * 2 + 3).flip(0) ** 1.5
    before: dict[int, Tensor] = {}

    def other_table(spec: AttentionSpec, which: str) -> Any:
        def exchange(x: Tensor, hook: Any) -> Tensor:
            assert spec.rotary is not None
            return table_like(x, spec.rotary, positions, which)

        return exchange

    def disturb(spec: AttentionSpec) -> Any:
        def edit(x: Tensor, hook: Any) -> Tensor:
            before[spec.layer] = x.detach().clone()
            return torch.where(spec.is_masked(x), x, torch.randn(x.shape, generator=generator).to(x))

        return edit

    for spec in specs:
        if spec.cos and spec.sin:
            edits += [(spec.cos, other_table(spec, "cos")), (spec.sin, other_table(spec, "sin"))]
        if spec.scores:
            edits.append((spec.scores, disturb(spec)))
    seen = listen(model, tokens, [s.layer for s in specs], edits) if len(edits) > len(first) else {}
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
