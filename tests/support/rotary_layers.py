"""Rotary layers of every kind, queries and keys for them, and the variance decomposition of all scores by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.rope import Rotary

SCALE = 0.35


def frequencies(n: int, base: float = 50.0) -> Tensor:
    return base ** (-torch.arange(n, dtype=torch.float64) / max(n, 1))


def llama3(n: int) -> Tensor:
    """Slow down low frequencies eightfold and middle ones gradually, as Llama 3 does."""
    theta = frequencies(n, 1e4)
    blend = ((2 * torch.pi / theta).log() / math.log(200)).clamp(0, 1)
    return theta * (1 - blend) + theta / 8 * blend


LAYERS: dict[str, tuple[Rotary, int, int, int]] = {  # rotation, heads, key heads, d_head
    "half": (Rotary(frequencies(4)), 2, 2, 8),
    "adjacent": (Rotary(frequencies(4), "adjacent"), 2, 2, 8),
    "partial": (Rotary(frequencies(2)), 2, 2, 8),
    "odd rest": (Rotary(frequencies(2), "adjacent"), 2, 1, 7),
    "grouped": (Rotary(frequencies(3)), 6, 2, 6),
    "multi-query": (Rotary(frequencies(3), "adjacent"), 4, 1, 6),
    "llama3": (Rotary(llama3(4)), 4, 2, 8),
    "yarn": (Rotary(frequencies(3), attention_factor=1.2), 2, 2, 10),
    "MLA": (Rotary(frequencies(2), "adjacent"), 3, 3, 16),
    "float32 angles": (Rotary(frequencies(4), angle_dtype=torch.float32), 2, 2, 8),
    "standing": (Rotary(torch.tensor([1.0, 0.0], dtype=torch.float64)), 2, 2, 4),
    "no rotation": (Rotary(frequencies(0)), 2, 2, 5),
}


DISTANCES: dict[str, Any] = {
    "range": range(1, 12, 2),
    "fractions": torch.tensor([0.5, -3.25, 100.75, 1e4]),
    "repeated": [0.0, 1.0, 2.5, 7.0, 2.5, 40.0, 2.5],
}


def draw(layer: str, n_q: int = 9, n_k: int = 7, mean: float = 1.0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated queries and keys with means of their own."""
    _, n_heads, n_kv, d_head = LAYERS[layer]

    def side(n: int, heads: int) -> Tensor:
        mixed = torch.randn(n, heads, d_head, dtype=torch.float64) @ torch.randn(d_head, d_head, dtype=torch.float64)
        return mean * torch.randn(heads, d_head, dtype=torch.float64) + spread * mixed

    return side(n_q, n_heads), side(n_k, n_kv)


def complex_subspaces(x: Tensor, rotary: Rotary) -> Tensor:
    """Coordinates as complex numbers by their indices; a rest that is not rotated has no partner."""
    n = len(rotary.frequencies)
    first, second = (
        (range(n), range(n, 2 * n)) if rotary.pairing == "half" else (range(0, 2 * n, 2), range(1, 2 * n, 2))
    )
    x = x.double()
    return x[..., list(first)] + 1j * x[..., list(second)]


def all_scores(q: Tensor, k: Tensor, rotary: Rotary, distances: Any, scale: float = SCALE) -> Tensor:
    """``W[head, distance, query, key]``, which the closed forms never form; all leading axes of ``q`` and ``k`` pooled.

    ``scale · Re Σ_c q_c conj(k_c) exp(i θ_c d) · factor²``, and the product of what is not rotated.
    """
    q, k = (x.double().flatten(0, -3) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    d = torch.as_tensor(distances, dtype=torch.float64)
    turn = rotary.attention_factor**2 * torch.exp(1j * rotary.angles(d))
    z = torch.einsum("dc,ihc,jhc->hdij", turn, complex_subspaces(q, rotary), complex_subspaces(k, rotary).conj())
    rest = torch.einsum("ihc,jhc->hij", q[..., rotary.dim :], k[..., rotary.dim :])
    return scale * (z.real + rest[:, None])


def anova(scores: Tensor, weights: Any = None) -> dict[str, Tensor]:
    """The textbook: an effect is the mean over all other axes, less all smaller effects."""
    w = torch.as_tensor([1.0] * scores.shape[1] if weights is None else weights, dtype=torch.float64)
    w = (w / w.sum())[:, None, None]

    def average(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = (x * w).sum(1, keepdim=True) if 1 in axes else x
        rest = [axis for axis in axes if axis != 1]
        return x.mean(rest, keepdim=True) if rest else x

    terms: dict[tuple[int, ...], Tensor] = {}
    for size in range(4):
        for factors in itertools.combinations((1, 2, 3), size):
            smaller = sum(terms[f] for n in range(size) for f in itertools.combinations(factors, n))
            terms[factors] = average(scores, tuple({1, 2, 3} - set(factors))) - smaller
    names = {1: "distance", 2: "query", 3: "key"}
    squares = {":".join(names[f] for f in factors): average(x**2, (1, 2, 3)).flatten() for factors, x in terms.items()}
    return {**squares, "mean": terms[()].flatten()}
