"""How many examples the fuzz tests run, and what they draw.

In every run of the tests each takes its own few hundred, the same ones each time. With ``POSDISENT_FUZZ=20000`` (before
a release) all of them together run at least so many, new ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_posdisent.rope import Rotary

from .dense import allowed

_ALL = 1140  # the sum of what `examples` is given in all tests
_MANY = int(os.environ.get("POSDISENT_FUZZ", "0"))


def examples(n: int) -> Callable[[Any], Any]:
    """Half as many in every run, and this share of ``POSDISENT_FUZZ``."""
    return settings(
        max_examples=max(n // 2, -(-_MANY * n // _ALL)),
        derandomize=not _MANY,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


# --- scores and masks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drawn:
    """Scores, what ``fit_additive`` is told of their mask, and the cells by definition."""

    scores: Tensor
    options: dict[str, Any]
    cells: Tensor  # as the scores

    def __repr__(self) -> str:
        options = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        return f"scores {tuple(self.scores.shape)} {self.scores.dtype}, {options}, {int(self.cells.sum())} cells"


def _values(kind: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    x = normal(seed, *shape)
    if kind == "far":  # a mean that is large against the spread
        return x + 1e4
    if kind == "few":  # many equal ones, and whole rows of them
        return x.round()
    if kind == "tiny":
        return x * 1e-12
    if kind == "huge":
        return x * 1e12
    if kind == "uneven":  # heads of very different size
        return x * (10.0 ** (4 * normal(seed + 1, *shape[:-2], 1, 1)))
    if kind == "constant":
        return torch.full(shape, -1.25, dtype=torch.float64)
    return x


@st.composite
def drawn_scores(draw: Any, kinds: tuple[str, ...] = ("plain", "far", "few", "tiny", "huge", "uneven")) -> Drawn:
    """Any shape, any mask."""
    n_query = draw(st.integers(1, 9))
    n_key = max(2, n_query + draw(st.integers(0, 4)))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    shape, seed = (*batch, n_query, n_key), draw(st.integers(0, 2**31))
    window = draw(st.none() | st.integers(1, 12))
    which = draw(st.sampled_from(["causal", "full", "boolean"]))
    options: dict[str, Any] = {"mask": which, "window": window}
    if which == "boolean":
        leading = tuple(n if draw(st.booleans()) else 1 for n in batch)
        mask = torch.rand((*leading, n_query, n_key), generator=generator(seed + 2)) < draw(st.floats(0.05, 1.0))
        # Every mask must leave something within the window: the last query's own key always does.
        mask[..., -1, -1] = True
        options["mask"] = mask[(0,) * len(leading)] if draw(st.booleans()) else mask
        near = allowed(n_query, n_key, "full", window)
        cells = (options["mask"] & near).expand(shape)
    else:
        cells = allowed(n_query, n_key, which, window).expand(shape)
    return Drawn(_values(draw(st.sampled_from(kinds)), seed, shape), options, cells)


# --- rotations ---------------------------------------------------------------------------------------------------


@st.composite
def rotaries(draw: Any) -> Rotary:
    """Any frequencies, standing and repeated and negative ones too; either pairing; YaRN's factor."""
    theta = draw(st.lists(st.floats(-3.0, 3.0, width=32), max_size=4))
    pairing = draw(st.sampled_from(["half", "adjacent"]))
    return Rotary(torch.tensor(theta, dtype=torch.float64), pairing, draw(st.sampled_from([1.0, 0.5, 1.25])))


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries ``[batch, pos, head, d_head]``, keys of grouped heads, and their rotation (of some coordinates)."""

    q: Tensor
    k: Tensor
    rotary: Rotary

    def __repr__(self) -> str:
        return f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, {self.rotary}"


@st.composite
def drawn_heads(draw: Any) -> Heads:
    rotary = draw(rotaries())
    n_kv, group, batch, pos = (draw(st.integers(1, n)) for n in (3, 3, 3, 9))
    d_head = max(1, rotary.dim + draw(st.integers(0, 3)))  # what is left over is not rotated
    seed, mean = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 1.0, 100.0]))
    q = normal(seed, batch, max(2, pos), n_kv * group, d_head) + mean * normal(seed + 1, 1, 1, n_kv * group, d_head)
    k = normal(seed + 2, batch, max(2, pos), n_kv, d_head) + mean * normal(seed + 3, 1, 1, n_kv, d_head)
    return Heads(q, k, rotary)
