"""The oracle of interventions: scores and results of a layer's heads under edits, by complex numbers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.rotation_and_score_edits import (
    DistanceMap,
    Edit,
    FrequencyLimit,
    PhaseNoise,
    PositionMap,
    PositionScale,
    ResultEdit,
    ScoreEdit,
    VectorPatch,
)
from tl_posdisent.models.capture import Captured


def edited_scores(q: Tensor, k: Tensor, edits: Sequence[Edit], spec: Any) -> Tensor:
    """Scores ``[batch, head, query, key]`` of vectors before rotation, ``[batch, pos, head, d_head]`` in float64."""
    rotary, at = spec.rotary, torch.arange(q.shape[1]).double()
    theta, n, half = rotary.frequencies.clone(), len(rotary.frequencies), rotary.pairing == "half"
    split = (slice(0, n), slice(n, 2 * n)) if half else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    distance, kept, phase, patches = (at[:, None] - at)[None, None], torch.ones(n), torch.zeros(1, len(at), n), {}
    for edit in edits:
        if isinstance(edit, (PositionMap, DistanceMap)):
            distance = _distances(edit, at)
        elif isinstance(edit, PhaseNoise):
            phase = phase + edit.phases(rotary, at.long(), len(q))
        elif isinstance(edit, FrequencyLimit):
            outside = (theta < edit.low) | (theta > edit.high)
            theta, kept = (theta * ~outside, kept) if edit.mode == "freeze" else (theta, kept * ~outside)
        elif isinstance(edit, VectorPatch):
            patches |= {name: x for name, x in (("q", edit.q_rot), ("k", edit.k_rot)) if x is not None}
    scale = torch.tensor([x.factor for x in edits if isinstance(x, PositionScale)]).prod()
    angle = distance[..., None] / scale * theta + (phase[:, :, None] - phase[:, None])[:, None]
    if patches:  # they are rotated already, and other edits act on the other side alone
        (edit,) = [x for x in edits if isinstance(x, PositionMap)] or [PositionMap("", lambda p: p, lambda p: p)]
        own = {side: (_places(edit, side, at) / scale)[..., None] * theta + phase for side in "qk"}
        turn = {side: torch.zeros_like(x) if side in patches else x for side, x in own.items()}
        angle, kept = (turn["q"][:, :, None] - turn["k"][:, None])[:, None], 1 if "q" in patches else kept
        q, k = patches.get("q", q).double(), _per_head(patches.get("k", k).double(), q.shape[2])
    zq, zk = (torch.complex(x[..., split[0]], x[..., split[1]]) for x in (q, k))
    factor = torch.tensor([1 if side in patches else rotary.attention_factor for side in "qk"]).prod()
    turned = torch.exp(1j * angle) * kept * factor
    scores = torch.einsum("bqhc,bkhc,bhqkc->bhqk", zq, zk.conj(), turned.expand(len(q), q.shape[2], -1, -1, -1)).real
    rest = torch.einsum("bqhd,bkhd->bhqk", q[..., 2 * n :], k[..., 2 * n :])
    scores = (scores + rest) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()


def _distances(edit: PositionMap | DistanceMap, at: Tensor) -> Tensor:
    if isinstance(edit, PositionMap):
        return _places(edit, "q", at)[:, None, :, None] - _places(edit, "k", at)[:, None, None]
    given = edit.distances
    cells = given.double() if isinstance(given, Tensor) else given((at[:, None] - at).clamp_min(0).flatten())
    cells = cells if isinstance(given, Tensor) else cells.view(len(at), len(at))
    return cells[(None,) * (4 - cells.ndim)]


def _places(edit: PositionMap, side: str, at: Tensor) -> Tensor:
    given = edit.queries if side == "q" else edit.keys
    places = given(at) if callable(given) and not isinstance(given, Tensor) else torch.as_tensor(given).double()
    return places.expand(1, len(at)) if places.ndim < 2 else places


def _per_head(x: Tensor, n: int) -> Tensor:
    return x.repeat_interleave(n // x.shape[2], 2)


def edited_results(seen: Captured, values: Tensor, edits: Sequence[Edit], beside: Tensor | None) -> Tensor:
    """What heads gather, ``[batch, head, pos, d_head]``; ``beside`` are scores of attention sinks."""
    spec = seen.spec
    q, k, v = (_per_head(x.double(), spec.n_heads) for x in (seen.q, seen.k, values))
    scores, inside = edited_scores(q, k, edits, spec), spec.mask(q.shape[1])
    own, heads = torch.arange(q.shape[1]), list(range(spec.n_heads))
    for edit in sorted((x for x in edits if isinstance(x, ScoreEdit)), key=lambda x: (x.order, x.call)):
        visible = inside & (scores > -torch.inf)
        limits = [x for x in edits if isinstance(x, (FrequencyLimit, PositionScale))]
        view = SimpleNamespace(spec=spec, heads=heads, inside=visible, own=(own, own), counted=(own, own))
        view.scores, view.vectors, view.rotation = scores, (q, k), _limits(limits)
        scores = torch.where(visible, edit.edit(view).double(), scores)
    scores = scores.masked_fill(~inside, -torch.inf)
    if beside is not None:
        scores = torch.cat([scores, beside.double()[:, None, None].expand(*scores.shape[:2], len(own), 1)], -1)
    z = torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1)[..., : len(own)], v)
    return z * 0 if any(isinstance(x, ResultEdit) for x in edits) else z


def _limits(edits: Sequence[Edit]) -> Any:
    from tl_posdisent.hooks.edits.rotation_and_score_edits import compose

    return compose(edits)
