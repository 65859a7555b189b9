"""All scores at all distances as one dense tensor: what the closed forms never form, for tiny cases."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.rope import Rotary


def complex_subspaces(x: Tensor, rotary: Rotary) -> Tensor:
    """Coordinates as complex numbers by their indices; a rest that is not rotated has no partner."""
    n = len(rotary.frequencies)
    first, second = (
        (range(n), range(n, 2 * n)) if rotary.pairing == "half" else (range(0, 2 * n, 2), range(1, 2 * n, 2))
    )
    x = x.double()
    return x[..., list(first)] + 1j * x[..., list(second)]


def all_scores(q: Tensor, k: Tensor, rotary: Rotary, distances: Any, scale: float) -> Tensor:
    """``W[head, distance, query, key]``, all leading axes of ``q`` and ``k`` pooled.

    ``scale · Re Σ_c q_c conj(k_c) exp(i θ_c d) · factor²``, and the product of what is not rotated.
    """
    q, k = (x.double().flatten(0, -3) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    d = torch.as_tensor(distances, dtype=torch.float64)
    turn = rotary.attention_factor**2 * torch.exp(1j * rotary.angles(d))
    z = torch.einsum("dc,ihc,jhc->hdij", turn, complex_subspaces(q, rotary), complex_subspaces(k, rotary).conj())
    rest = torch.einsum("ihc,jhc->hij", q[..., rotary.dim :], k[..., rotary.dim :])
    return scale * (z.real + rest[:, None])


def effects(scores: Tensor) -> dict[str, Tensor]:
    """Variance of every effect on ``[head, distance, query, key]``: means over the other axes, less smaller effects."""
    terms: dict[tuple[int, ...], Tensor] = {}
    for size in range(4):
        for factors in itertools.combinations((1, 2, 3), size):
            smaller = sum(terms[f] for n in range(size) for f in itertools.combinations(factors, n))
            rest = [axis for axis in (1, 2, 3) if axis not in factors]
            terms[factors] = (scores.mean(rest, keepdim=True) if rest else scores) - smaller
    names = {1: "distance", 2: "query", 3: "key"}
    return {":".join(names[f] for f in key): x.square().mean((1, 2, 3)) for key, x in terms.items() if key}
