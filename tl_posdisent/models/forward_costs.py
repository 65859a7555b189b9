"""What a forward pass costs as a function of the length, from a few passes over short texts.

Every tensor's size is a product of lengths and constants, so what is live after each step of the pass is a polynomial
of the length; some short texts determine it exactly. The step at which most is live may be another one in a long text
than in a short one, which is why it is looked for at the length asked about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.models.probe.explain import probe_tokens

from .allocations import Counted, count
from .chunked_scores import empty_cache
from .forward import at_rest, device_of, run


@dataclass(frozen=True, eq=False)
class Costs:
    """Polynomials of ``rows`` queries after ``before`` others: coefficients of 1, rows, before, rows², rows·before,
    before².

    Attributes:
        live: bytes after each step.
        totals: bytes written, and operations of matrix products.
        steps: how many there are.
    """

    live: Float64[Tensor, "step 6"]
    totals: Float64[Tensor, "2 6"]
    steps: int

    def peak(self, rows: int, before: int = 0) -> tuple[float, float]:
        """Bytes at the worst step, and how many of them are in tensors of the size of score matrices."""
        terms = _terms(rows, before)
        at = self.live @ terms
        worst = int(at.argmax())
        of_scores = (self.live[worst, 3:5] * terms[3:5]).sum()
        return float(at[worst]), float(of_scores)

    def total(self, length: int, rows: int) -> tuple[float, float]:
        """Bytes written and operations of a whole text in blocks of ``rows``."""
        firsts = range(0, length, rows)
        terms = torch.stack([_terms(min(rows, length - first), first) for first in firsts]).sum(0)
        written, flops = (self.totals @ terms).tolist()
        return written, flops


class Rates(NamedTuple):
    """What a device does in a second: operations of matrix products, bytes of elementwise results, small steps."""

    flops: float
    written: float
    steps: float


def measure_costs(model: Any, *, stop: int, cached: bool) -> Costs:
    """Costs of one text through the layers before ``stop``: in one pass, or of a block of it behind a cache.

    Raises:
        ValueError: ``cached`` for a model that takes no cache.
    """
    unit = max(2, min(16, (getattr(model.cfg, "n_ctx", None) or 48) // 3))
    once = [(unit, 0), (2 * unit, 0), (3 * unit, 0)]
    half = max(1, unit // 2)
    twice = [(half * rows, half * before) for rows, before in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2))]
    points = twice if cached else once
    with at_rest(model):
        counted = [_count(model, rows, before, stop, cached) for rows, before in points]
    terms = torch.stack([_terms(*point) for point in points])
    columns = [0, 1, 2, 3, 4, 5] if cached else [0, 1, 3]
    return _interpolated(counted, terms[:, columns], columns)


def _count(model: Any, rows: int, before: int, stop: int, cached: bool) -> Counted:
    tokens = probe_tokens(model)[:1, :1].expand(1, before + rows).contiguous()  # one token, one route through experts

    def first() -> dict[str, Any]:
        cache = empty_cache(model, tokens) if cached else {}
        if cached:
            run(model, tokens[:, :before], [], stop=stop, **_with_mask(cache, tokens[:, :before]))
        return cache

    def second(cache: dict[str, Any]) -> None:
        run(model, tokens[:, before:], [], stop=stop, **_with_mask(cache, tokens[:, before:]))

    return count(first, second)


def _with_mask(cache: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    return cache | {"attention_mask": torch.ones_like(tokens)} if "past_kv_cache" in cache else cache


def _interpolated(counted: Sequence[Counted], terms: Tensor, columns: list[int]) -> Costs:
    steps = {len(one.live) for one in counted}
    # Where the steps depend on the text (experts chosen by it), only the peaks can be compared.
    live = [one.live if len(steps) == 1 else [max(one.live)] for one in counted]

    def solved(values: Sequence[Sequence[int]]) -> Tensor:
        found = torch.linalg.solve(terms, torch.tensor(values, dtype=torch.float64)).T
        full: Tensor = found.new_zeros(len(found), 6)
        full[:, columns] = found
        return full

    return Costs(solved(live), solved([[one.written, one.flops] for one in counted]), max(steps))


def _terms(rows: int, before: int) -> Float64[Tensor, "6"]:
    return torch.tensor([1, rows, before, rows**2, rows * before, before**2], dtype=torch.float64)


def measure_rates(model: Any) -> Rates:
    """From a matrix product, an exponential and a small sum on the model's device, in its dtype; some 0.1 s."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    device = device_of(model)
    size, many = (512, 2**21) if device.type == "cpu" else (4096, 2**26)
    square = torch.ones(size, size, dtype=parameter.dtype, device=device)
    long, short = square.new_ones(many), square.new_ones(8)
    return Rates(
        2 * size**3 / _seconds(lambda: square @ square, device),
        many * long.element_size() / _seconds(long.exp, device),
        1 / _seconds(short.exp, device),
    )


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """The shortest of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return max(1e-9, min(times))
