"""The oracle of interventions: scores and results of a layer's heads under edits, by complex numbers in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.hooks.edits.rotation_edits import (
    DistanceMap,
    FrequencyLimit,
    PhaseNoise,
    PositionMap,
    PositionScale,
    VectorPatch,
)
from tl_posdisent.hooks.edits.score_edits import ResultEdit, ScoreEdit
from tl_posdisent.models.capture import Captured


def edited_scores(q: Tensor, k: Tensor, edits: Sequence[Edit], spec: Any) -> Tensor:
    """Scores ``[batch, head, query, key]`` of vectors before rotation, ``[batch, pos, head, d_head]`` in float64.

    Of the edits nothing but what they were given: a subspace that is dropped is left out of the sum at the end.
    """
    rotary, at = spec.rotary, torch.arange(q.shape[1]).double()
    theta, n, factor = rotary.frequencies, len(rotary.frequencies), rotary.attention_factor
    split = (slice(0, n), slice(n, 2 * n)) if rotary.pairing == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    gone = {mode: torch.zeros(n, dtype=torch.bool) for mode in ("drop", "freeze")}
    for limit in (x for x in edits if isinstance(x, FrequencyLimit)):
        gone[limit.mode] |= ((theta < limit.low) | (theta > limit.high)) & (theta != 0)
    theta = torch.where(gone["freeze"], 0.0, theta) / math.prod(x.factor for x in edits if isinstance(x, PositionScale))
    phase = sum((_phases(x, len(at), n) for x in edits if isinstance(x, PhaseNoise)), torch.zeros(1, len(at), n))
    pairs = [x for x in edits if isinstance(x, DistanceMap)]
    (places,) = [x for x in edits if isinstance(x, PositionMap)] or [PositionMap("", lambda p: p, lambda p: p)]
    sides = {}
    for side, x in (("q", q), ("k", k)):
        patches = [getattr(edit, f"{side}_rot") for edit in edits if isinstance(edit, VectorPatch)]
        given = [_per_head(patch.double(), q.shape[2]) for patch in patches if patch is not None]
        turn = phase if pairs else _places(places, side, at)[..., None] * theta + phase
        z = torch.complex(x[..., split[0]], x[..., split[1]]) * torch.exp(1j * turn[:, :, None]) * factor
        rest = x[..., 2 * n :]
        if given:
            z, rest = torch.complex(given[0][..., split[0]], given[0][..., split[1]]), given[0][..., 2 * n :]
        sides[side] = z[..., ~gone["drop"]], rest
    (zq, q_rest), (zk, k_rest) = sides["q"], sides["k"]
    apart = (
        torch.exp(1j * _distances(pairs[0], at)[..., None] * theta[~gone["drop"]])
        if pairs
        else torch.ones(1, 1, 1, 1, 1)
    )
    products = zq.movedim(1, 2)[:, :, :, None] * zk.conj().movedim(1, 2)[:, :, None] * apart
    scores = (products.real.sum(-1) + torch.einsum("bqhd,bkhd->bhqk", q_rest, k_rest)) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()


def _phases(edit: PhaseNoise, length: int, n: int) -> Tensor:
    """Angles as given, or normal ones, drawn for 64 positions at a time."""
    angles = edit.angles
    if not isinstance(angles, Tensor):
        generator = torch.Generator().manual_seed(edit.seed)
        drawn = [torch.randn(64, n, generator=generator, dtype=torch.float64) for _ in range(length // 64 + 1)]
        angles = angles * torch.cat(drawn)[:length]
    return angles.double().expand(1, -1, -1) if angles.ndim == 2 else angles.double()


def _distances(edit: DistanceMap, at: Tensor) -> Tensor:
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
    from tl_posdisent.hooks.edits.rotation_edits import compose

    return compose(edits)
