"""Costs in forward passes, and claims about memory, on random weights in the shape of a large model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
from common import accelerator, device, peak
from gpu_tools import Found
from large_shapes import random_weights
from real_model import cost, rows
from support.live_bytes import LiveBytes

import tl_posdisent as tp
from tl_posdisent.models.running.memory import free_memory

COSTS = (
    *("dummy_distance", "swap_positions", "remap_distance, a ceiling", "remap_distance, a root", "limit_frequencies"),
    *("lambda_mask", "additivity", "controlled_distance", "head_effects, eight interventions, no exact runs"),
)
# docs/large_models.md: at most five copies of a layer's scores; here one more for everything else that a layer holds.
COPIES = 6.0
LINEAR = 6.0  # docs/benchmarks.md: three to six times the queries and keys in float32, at any length


class Large:
    """A shape, and a model that is made when it is first needed."""

    def __init__(self, shape: str, length: int, dtype: str, long: int) -> None:
        self.shape, self.length, self.dtype, self.long = shape, length, dtype, long

    @cached_property
    def model(self) -> Any:
        made = random_weights(Namespace(shape=self.shape, device=str(device()), dtype=self.dtype), None)
        return tp.bridge_from_hf(made)

    @cached_property
    def tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, self.model.cfg.d_vocab, (1, self.length), generator=generator).to(device())

    @property
    def scores(self) -> float:
        """MiB of one layer's."""
        size: int = next(self.model.parameters()).element_size()
        return float(self.model.cfg.n_heads * self.length**2 * size / 2**20)


@torch.no_grad()
def forward(large: Large) -> Any:
    return large.model(large.tokens)


def costs(large: Large, *, bounded: bool) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Aims are those on a processor; a model in miniature, whose passes take no time, has none."""

    def measured(name: str) -> Found:
        run, parts, aim = rows(large.model.cfg.n_heads, large.length)[name]
        forward(large)
        passes = cost(partial(run, large.model, large.tokens), partial(forward, large), parts)
        return Found(passes, aim if bounded else math.inf, f"{large.shape}, {large.length} tokens, {large.dtype}")

    for name in COSTS:
        yield f"passes: {name}", partial(measured, name)


def most(function: Callable[[], Any]) -> float:
    """MiB at most while the function runs, above what there was; tensors are counted on a CPU. It has run before, so
    that what is made once is there."""
    with torch.no_grad():
        function()
        if accelerator():
            return peak(function)
        with LiveBytes() as live:
            function()
        return live.most / 2**20


def one_layer(model: Any, tokens: torch.Tensor, **options: Any) -> Any:
    return tp.capture(model, tokens, lambda layer: None, **options)


def memory(large: Large) -> Iterator[tuple[str, Callable[[], Found]]]:
    """What docs/large_models.md, docs/benchmarks.md and docstrings claim, in MiB."""
    tools: dict[str, Callable[..., Any]] = {
        "additivity": partial(tp.additivity, progress=False),
        "controlled_distance": partial(tp.controlled_distance, progress=False),
        "subspace_patterns": partial(tp.subspace_patterns, progress=False),
        "capture with a function": one_layer,
    }

    def by_depth(tool: Callable[..., Any]) -> Found:
        every, first = (most(partial(tool, large.model, large.tokens, layers=n)) for n in (None, [0]))
        return Found(every - first, large.scores, f"{every:.4g} MiB; the bound is a layer's scores")

    def beside_forward(tool: Callable[..., Any]) -> Found:
        plain = most(partial(forward, large))
        found = most(partial(tool, large.model, large.tokens))
        return Found(found, plain + large.scores / 2, "the bound is the model's own pass and half of a layer's scores")

    def copies() -> Found:
        found = most(partial(one_layer, large.model, large.tokens, layers=[0])) / large.scores
        return Found(found, COPIES, "copies of a layer's scores in its pass: two to five, and the rest")

    def without_scores() -> Found:
        kept = tp.capture(large.model, large.tokens, scores=False)
        vectors = [getattr(layer, name) for layer in kept for name in ("q", "k", "q_rot", "k_rot")]
        size = sum(x.numel() * x.element_size() for x in vectors) / 2**20
        del kept, vectors
        every = most(partial(tp.capture, large.model, large.tokens, scores=False))
        one = most(partial(one_layer, large.model, large.tokens, scores=False))
        return Found(
            every - one, 1.05 * size, f"the bound is {size:.4g} MiB of queries and keys of all layers, and 5 %"
        )

    def linear() -> Found:
        q, k = (torch.randn(1, large.long, 1, 64, device=device()) for _ in range(2))
        found = most(partial(tp.fit_additive_qk, q, k, scale=8.0))
        return Found(found, LINEAR * 2 * q.numel() * 4 / 2**20, f"{large.long} tokens, one head")

    def refused() -> Found:
        free = free_memory([device()])
        if free is None:
            return Found(0, 0, "the free memory of this device is unknown: nothing is refused")
        tokens = large.tokens.repeat(2 + int(free / (large.scores * 2**20)), 1)
        size = tokens.numel() * tokens.element_size() / 2**20
        return Found(most(partial(refusal, large.model, tokens)), 4 * size, "the bound is four times the ids")

    for name, tool in tools.items():
        yield f"MiB of all layers above the first: {name}", partial(by_depth, tool)
    yield "MiB: additivity", partial(beside_forward, tools["additivity"])
    yield "copies of scores: one layer", copies
    yield "MiB: capture(scores=False) above one layer", without_scores
    yield "MiB: fit_additive_qk", linear
    yield "MiB: additivity of what cannot fit, refused", refused


def refusal(model: Any, tokens: torch.Tensor) -> None:
    """Raise unless scores that exceed the free memory are refused."""
    try:
        tp.additivity(model, tokens, progress=False)
    except MemoryError:
        return
    raise AssertionError(f"{len(tokens)} texts of {tokens.shape[1]} tokens are more than fit, and were not refused")
