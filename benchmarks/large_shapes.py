"""Models of the shapes of Pythia-1.4B, Llama-3-8B and Llama-3.2-1B with random weights: time and memory of each step.

    python benchmarks/large_shapes.py --shape pythia-1.4b --length 512 2048
    python benchmarks/large_shapes.py --shape llama-3-8b --layers 2 4 --step additivity controlled_distance
    python benchmarks/large_shapes.py --shape llama-3-8b --device cuda --length 8192

Each step runs in a process of its own, once, after the same step on 64 tokens; ``load`` without a step before it.
Nothing is downloaded or stored.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import device, in_a_process, peak, report, synchronise
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PretrainedConfig
from transformers.initialization import no_init_weights

import tl_posdisent as tp

ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA_3_2 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 32.0}
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "pythia-1.4b": (
        GPTNeoXConfig,
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "max_position_embeddings": 2048},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "llama-3-8b": (
        LlamaConfig,
        {
            **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
            "rope_parameters": ROPE,
        },
    ),
    "llama-3.2-1b": (
        LlamaConfig,
        {
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            **{"tie_word_embeddings": True, "rope_parameters": ROPE | LLAMA_3_2 | {"rope_type": "llama3"}},
        },
    ),
    # For trying a script on a CPU: the scores of a few hundred tokens are larger than everything else.
    "miniature": (
        LlamaConfig,
        {
            **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
            "rope_parameters": ROPE,
        },
    ),
}


def configuration(shape: str, layers: int | None) -> PretrainedConfig:
    """Of one of the shapes, with as many layers as given."""
    kind, sizes = SHAPES[shape]
    return kind(**sizes | ({"num_hidden_layers": layers} if layers else {}))


def middle(model: Any) -> int:
    """The layer of the steps that look at one."""
    return int(model.cfg.n_layers) // 2


def fit_attention(model: Any, tokens: torch.Tensor) -> None:
    (layer,) = tp.capture(model, tokens, layers=middle(model))
    tp.fit_attention(layer.scores)


def attention_ladder(model: Any, tokens: torch.Tensor) -> None:
    tp.attention_ladder(model, tokens, layers=middle(model), unit="layer", controls=[], progress=False)


def with_hooks(make: Callable[[Any], Any], model: Any, tokens: torch.Tensor) -> None:
    model.run_with_hooks(tokens, fwd_hooks=make(model))


QUIET = {"progress": False}
STEPS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "forward": lambda model, tokens: model(tokens),
    "additivity": partial(tp.additivity, **QUIET),
    "controlled_distance": partial(tp.controlled_distance, **QUIET),
    "fit_attention": fit_attention,
    "attention_ladder": attention_ladder,
    "dummy_distance": partial(with_hooks, lambda model: tp.dummy_distance(model, 5)),
    "limit_frequencies": partial(with_hooks, lambda model: tp.limit_frequencies(model, low=0.01)),
}
BUILD = {"bridge": tp.bridge_from_hf, "hooked": tp.hooked_from_hf}


@torch.no_grad()
def random_weights(options: argparse.Namespace, layers: int | None) -> Any:
    """A transformers model whose matrices repeat a million random numbers: drawing billions takes minutes."""
    config = configuration(options.shape, layers)
    with torch.device(options.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
        some = torch.randn(2**20 + 1) * config.initializer_range
    for name, weights in model.named_parameters():
        if weights.ndim == 1:
            weights.fill_(float(not name.endswith("bias")))
            continue
        for part in weights.view(-1).split(len(some)):
            part.copy_(some[: len(part)])
    return model.eval()


@torch.no_grad()
def one(options: argparse.Namespace, step: str, length: int, layers: int | None) -> dict[str, float]:
    """In a process of its own."""
    model = random_weights(options, layers)
    size = sum(x.numel() * x.element_size() for x in model.parameters()) / 1e9
    work: Callable[[], Any] = lambda: BUILD[options.kind](model)  # noqa: E731
    found: dict[str, float] = {"model GB": size}
    if step != "load":
        model = work()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, model.cfg.d_vocab, (1, length), generator=generator).to(device())
        STEPS[step](model, tokens[:, :64])
        work = lambda: STEPS[step](model, tokens)  # noqa: E731
    synchronise()
    wall, processor = time.perf_counter(), time.process_time()
    found["peak MiB"] = peak(work)
    return found | {"CPU s": time.process_time() - processor, "wall s": time.perf_counter() - wall}


def rows_of(options: argparse.Namespace, layers: int | None) -> list[dict[str, Any]]:
    """Of one depth."""
    rows = []
    columns = ["model GB", "CPU s", "wall s", "peak MiB"]
    depth = configuration(options.shape, layers).num_hidden_layers
    for length in options.length:
        for step in [x for x in options.step if length == options.length[0] or x != "load"]:
            arguments = [f"--{name}={getattr(options, name)}" for name in ("shape", "device", "dtype", "kind")]
            found = in_a_process(__file__, *arguments, "--one", json.dumps([step, length, layers]))
            row = {"layers": depth, "length": length, "step": step} | {name: found.get(name, "") for name in columns}
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pythia-1.4b")
    parser.add_argument("--length", type=int, nargs="+", default=[512])
    parser.add_argument("--layers", type=int, nargs="+", default=[None], help="default all of the shape's")
    parser.add_argument("--step", nargs="+", choices=["load", *STEPS], default=["load", *STEPS])
    parser.add_argument("--device", default=device().type)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kind", choices=BUILD, default="bridge")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["BENCH_DEVICE"] = options.device
    if options.one:
        print(json.dumps(one(options, *options.one)))
        return
    rows = [row for layers in options.layers for row in rows_of(options, layers)]
    name = f"large_{options.shape}_{options.kind}_{options.device.partition(':')[0]}"
    report(name, f"{options.shape}, {options.kind}, {options.dtype}: MiB at most beside the model", rows)


if __name__ == "__main__":
    main()
