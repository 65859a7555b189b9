"""What each tool costs on SmolLM2-135M, in forward passes: ``python benchmarks/real_model.py --only swap_positions``.

Seconds of the processor, one thread, a bridge, 256 tokens; each row is the median of three ratios to a pass that was
timed just before it. `aim` is what a row should cost at most.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from common import report, seconds

import tl_posdisent as tp

LENGTH, LAYER, REPEATS = 256, 15, 3


def with_hooks(make: Callable[[Any], list[Any]]) -> Callable[[Any, torch.Tensor], Any]:
    """A run with hooks on all layers; the list is made once, before."""
    made = lru_cache(make)
    return torch.no_grad()(lambda model, tokens: model.run_with_hooks(tokens, fwd_hooks=made(model)))


def table(function: Callable[..., Any], **options: Any) -> Callable[[Any, torch.Tensor], Any]:
    """A tool on all layers, or on those in ``options``."""
    return lambda model, tokens: function(model, tokens, progress=False, **options)


def rows(n_heads: int) -> dict[str, tuple[Callable[[Any, torch.Tensor], Any], int, float]]:
    """By name: what is run, the number of heads to divide by, and the aim."""
    in_one_layer: dict[str, Any] = {"layers": [LAYER]}
    return {
        "a list of hooks": (lambda model, tokens: tp.dummy_distance(model, 5), 1, 1.0),
        "dummy_distance": (with_hooks(lambda model: tp.dummy_distance(model, 5)), 1, 1.2),
        "swap_positions": (with_hooks(lambda model: tp.swap_positions(model, torch.arange(LENGTH).flip(0))), 1, 1.2),
        "remap_distance": (with_hooks(lambda model: tp.remap_distance(model, lambda d: d.clamp(max=16))), 1, 3.0),
        "lambda_mask": (with_hooks(lambda model: tp.lambda_mask(model, 4, 64, 64)), 1, 4.0),
        "additivity": (table(tp.additivity), 1, 3.0),
        "controlled_distance": (table(tp.controlled_distance), 1, 5.0),
        "trained_vs_random": (table(tp.trained_vs_random, seeds=[0]), 1, 8.0),
        "head_ablation, a head": (table(tp.head_ablation, **in_one_layer), n_heads, 0.7),
        "head_labels": (table(tp.head_labels, streaming=False), 1, 8.0),
        "preference_flips, a head": (table(tp.preference_flips, **in_one_layer), n_heads, 0.5),
        "additive_substitution, a head": (table(tp.additive_substitution, **in_one_layer), n_heads, 2.0),
        "attention_ladder, a head": (table(tp.attention_ladder, **in_one_layer), n_heads, 10.0),
    }


def cost(run: Callable[[], Any], forward: Callable[[], Any], parts: int) -> float | str:
    """How many passes one of ``parts`` takes, or the first line of the error."""
    try:
        run()  # once before: what is cached is in the cache
        return statistics.median(seconds(run) / parts / seconds(forward) for _ in range(REPEATS))
    except RuntimeError as error:
        return str(error).splitlines()[0][:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names begin so")
    parser.add_argument("--backend", default="bridge", choices=["bridge", "hooked"])
    chosen = parser.parse_args()
    os.environ["BENCH_CLOCK"] = "cpu"
    torch.set_num_threads(1)
    model: Any = tp.load_model("smollm2", backend=chosen.backend)
    tokens = model.to_tokens(tp.demo_text(), truncate=False)[:, :LENGTH]

    @torch.no_grad()
    def forward() -> Any:
        return model(tokens)

    forward()
    measured: list[dict[str, Any]] = []
    for name, (run, parts, aim) in rows(model.cfg.n_heads).items():
        if name.startswith(tuple(chosen.only)):
            passes = cost(partial(run, model, tokens), forward, parts)
            measured.append({"what": name, "passes": passes, "aim": aim})
            print(measured[-1], flush=True)
    report("real_model", f"SmolLM2-135M (4 bits, dequantised), {chosen.backend}, {LENGTH} tokens, in passes", measured)


if __name__ == "__main__":
    main()
