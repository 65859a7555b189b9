"""What each tool costs on SmolLM2-135M, in forward passes: ``python benchmarks/real_model.py --only swap_positions``.

Seconds of the processor, one thread, a bridge, 256 tokens; each row is the median of three ratios to a pass that was
timed with it (of what takes more than twenty passes, one ratio). `aim` is what a row should cost at most; `memory` with
``--memory`` is by how many MiB the process grew, on a text of 512 tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from common import peak, report, seconds

import tl_posdisent as tp
from tl_posdisent.hooks import substitute_attention

LENGTH, LAYERS, REPEATS, LONG = 256, [5, 15, 25], 3, 20


def with_hooks(make: Callable[[Any], list[Any]]) -> Callable[[Any, torch.Tensor], Any]:
    """A run with hooks on all layers; the list is made once, before."""
    made = lru_cache(make)
    return torch.no_grad()(lambda model, tokens: model.run_with_hooks(tokens, fwd_hooks=made(model)))


def table(function: Callable[..., Any], **options: Any) -> Callable[[Any, torch.Tensor], Any]:
    """A tool on all layers, or on those in ``options``."""
    return lambda model, tokens: function(model, tokens, progress=False, **options)


def on_two_texts(function: Callable[..., Any], **options: Any) -> Callable[[Any, torch.Tensor], Any]:
    """A tool on two texts of the length."""
    return lambda model, tokens: function(model, torch.cat([tokens, tokens.roll(7, 1)]), progress=False, **options)


def all_heads_at_once(model: Any, tokens: torch.Tensor) -> Any:
    """Estimates for all heads under eight interventions, those without fits."""
    interventions: dict[str, Any] = {
        "zero": tp.ablate_heads(model, None),
        "mean": tp.ablate_heads(model, None, mode="mean"),
    }
    interventions |= {f"d = {d}": tp.dummy_distance(model, d) for d in (0, 5)}
    interventions |= {by: substitute_attention(model, by) for by in ("uniform", "first_token")}
    interventions |= {"slow": tp.limit_frequencies(model, high=0.1), "window": tp.lambda_mask(model, 4, 64, 64)}
    return tp.head_effects(model, tokens, interventions, exact=0, progress=False)


def rows(n_heads: int, length: int = LENGTH) -> dict[str, tuple[Callable[[Any, torch.Tensor], Any], int, float]]:
    """By name: what is run, the number of heads to divide by, and the aim. A head of three layers all over the model
    costs as much as the mean over layers, but for what is run once in a call."""
    some: dict[str, Any] = {"layers": LAYERS}
    n_heads *= len(LAYERS)
    backwards = torch.arange(length).flip(0)
    far = partial(torch.clamp, max=length // 2)
    most = 1.25 if length <= 256 else 1.4  # of an intervention on positions
    return {
        "a list of hooks": (lambda model, tokens: tp.dummy_distance(model, 5), 1, 0.05),
        "dummy_distance": (with_hooks(lambda model: tp.dummy_distance(model, 5)), 1, most),
        "swap_positions": (with_hooks(lambda model: tp.swap_positions(model, backwards)), 1, most),
        "remap_distance, a ceiling": (with_hooks(lambda m: tp.remap_distance(m, lambda d: d.clamp(max=16))), 1, most),
        "remap_distance, a far plateau": (with_hooks(lambda m: tp.remap_distance(m, far)), 1, most),
        "remap_distance, a root": (with_hooks(lambda m: tp.remap_distance(m, lambda d: d.sqrt())), 1, 4.0),
        "limit_frequencies, frozen": (with_hooks(lambda m: tp.limit_frequencies(m, low=0.01, mode="freeze")), 1, most),
        "limit_frequencies, dropped": (with_hooks(lambda m: tp.limit_frequencies(m, low=0.01)), 1, most),
        "knock_out": (with_hooks(lambda model: tp.knock_out(model, queries=slice(8, None), keys=0)), 1, 1.5),
        "lambda_mask": (with_hooks(lambda model: tp.lambda_mask(model, 4, 64, 64)), 1, 2.0),
        "additivity": (table(tp.additivity), 1, 2.0),
        "controlled_distance": (table(tp.controlled_distance), 1, 2.0),
        "head_ablation, a head": (table(tp.head_ablation, **some), n_heads, 0.6),
        "head_effects, eight interventions, no exact runs": (all_heads_at_once, 1, 15.0),
        "head_labels": (table(tp.head_labels), 1, 6.0),
        "attention_ladder, a head": (table(tp.attention_ladder, **some), n_heads, 8.0),
        "attention_ladder, all at once, two texts": (on_two_texts(tp.attention_ladder, unit="all"), 1, 120.0),
    }


def cost(run: Callable[[], Any], forward: Callable[[], Any], parts: int) -> float:
    """How many passes one of ``parts`` takes; what is long is run once."""
    first = seconds(run) / seconds(forward)  # and what is cached is then in the cache
    if first > LONG:
        return first / parts
    return statistics.median(seconds(run) / parts / seconds(forward) for _ in range(REPEATS))


def cost_or_error(run: Callable[[], Any], forward: Callable[[], Any], parts: int) -> float | str:
    """How many passes one of ``parts`` takes, or the first line of the error."""
    try:
        return cost(run, forward, parts)
    except RuntimeError as error:
        return str(error).splitlines()[0][:60]


@torch.no_grad()
def forward_pass(model: Any, tokens: torch.Tensor) -> Any:
    return model(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose names begin so")
    parser.add_argument("--backend", default="bridge", choices=["bridge", "hooked"])
    parser.add_argument("--length", type=int, nargs="+", default=[LENGTH], help="tokens of the text: 64 256 1024")
    parser.add_argument("--memory", action="store_true", help="measure memory instead, on 512 tokens")
    chosen = parser.parse_args()
    os.environ["BENCH_CLOCK"] = "cpu"
    torch.set_num_threads(1)
    model: Any = tp.load_model("smollm2", backend=chosen.backend)
    measured: list[dict[str, Any]] = []
    for length in [2 * LENGTH] if chosen.memory else chosen.length:
        tokens = model.to_tokens(tp.demo_text() * (1 + length // LENGTH), truncate=False)[:, :length]
        forward = partial(forward_pass, model, tokens)
        forward()
        for name, (run, parts, aim) in rows(model.cfg.n_heads, length).items():
            if name.startswith(tuple(chosen.only)):
                row: dict[str, Any] = {"what": name, "tokens": length}
                if chosen.memory:
                    row |= {"memory": peak(partial(run, model, tokens)), "aim": 1024.0}
                else:
                    row |= {"passes": cost_or_error(partial(run, model, tokens), forward, parts), "aim": aim}
                measured.append(row)
                print(row, flush=True)
    report("real_model", f"SmolLM2-135M (4 bits, dequantised), {chosen.backend}, in passes", measured)


if __name__ == "__main__":
    main()
