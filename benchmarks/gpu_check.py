"""Compare this package on a GPU with the CPU, and measure its costs there: ``make gpu-check``.

In one run: the numbers of twelve public functions on a model of two layers; the losses of a training; and passes and
memory of three tools on random weights in the shape of Llama 3.2 1B.
``--device cpu`` runs the same code on the CPU, with a small shape. Ends with a table, also in ``out/bench/``. Exit code
0: all bounds hold; 1: one does not; 4: no GPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import accelerator, device, medians, peak, report
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT / "tests"))

from support import on_devices  # noqa: E402 - the path first
from support.live_bytes import LiveBytes  # noqa: E402
from support.on_devices import Place  # noqa: E402
from support.results import numbers_in  # noqa: E402

import tl_posdisent as tp  # noqa: E402
from tl_posdisent.synthetic import preset, train  # noqa: E402

BOUND = 1e-4  # of the difference in float32, relative to the largest number of a result
MASKED = 1e30  # numbers beyond stand for masked scores

Numbers = dict[str, np.ndarray]
Row = dict[str, Any]


# --- every function against the CPU ---------------------------------------------------------------------------------


def numbers(name: str, place: Place) -> Numbers | Exception:
    """All numbers in what a function returns at a place, or the error that it raises."""
    try:
        arrays = numbers_in(on_devices.outcome(name, "bridge", place))
        return {path: np.asarray(x, float) for path, x in arrays if x.dtype.kind in "biuf" and "seconds" not in path}
    except Exception as error:  # noqa: BLE001 - of any kind: the CPU has to raise the same
        return error


def difference(measured: Numbers | Exception, truth: Numbers | Exception) -> float:
    """The largest difference, relative to the largest number of its array; infinite where shapes or errors differ."""
    if isinstance(measured, Exception) or isinstance(truth, Exception):
        return 0.0 if type(measured) is type(truth) else math.inf
    if {path: x.shape for path, x in measured.items()} != {path: x.shape for path, x in truth.items()}:
        return math.inf
    largest = 0.0
    for path, x in truth.items():
        visible = np.abs(x) < MASKED
        if (visible != (np.abs(measured[path]) < MASKED)).any():
            return math.inf
        if visible.any():
            error = np.abs(measured[path][visible] - x[visible]).max()
            largest = max(largest, error / (np.abs(x[visible]).max() + 0.01))
    return float(largest)


def compare_functions() -> Row:
    """The largest difference of twelve functions, between the device and the CPU."""
    found = {x: difference(numbers(x, Place(str(device()))), numbers(x, Place())) for x in on_devices.NAMES}
    wrong = [f"{name} {error:.3g}" for name, error in found.items() if not error <= BOUND]
    note = f"wrong: {', '.join(wrong)}" if wrong else f"{len(found)} functions"
    return {"value": max(found.values()), "bound": BOUND, "note": note}


def compare_training() -> Row:
    """The loss of 30 steps without dropout, on the device and on the CPU, from the same weights."""
    small = preset("small")
    model = small.model("rope", "distance", n_train=30 * 128, n_test=100, log_every=1)
    losses = [
        train(copy.deepcopy(model).to(where), small.tasks["distance"], progress=False).metrics["loss"]
        for where in ("cpu", device())
    ]
    return {"value": float((losses[0] - losses[1]).abs().max()), "bound": 1e-2, "note": "nats, of 30 steps"}


# --- costs at the shape of a large model ----------------------------------------------------------------------------


def llama_shape(miniature: bool) -> LlamaConfig:
    """Llama 3.2 1B, or a shape in which the scores of a few hundred tokens exceed everything else."""
    large = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    large |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    small |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaConfig(**(small if miniature else large), tie_word_embeddings=True, attn_implementation="eager")


@torch.no_grad()
def random_bridge(config: LlamaConfig, dtype: torch.dtype) -> Any:
    """A bridge whose matrices repeat a million random numbers: drawing billions takes minutes."""
    with torch.device(device()), no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
        drawn = torch.randn(2**20 + 1) * config.initializer_range
    for weights in model.parameters():
        if weights.ndim == 1:
            weights.fill_(1.0)
            continue
        for part in weights.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])
    return tp.bridge_from_hf(model.eval())


def costs(miniature: bool) -> Iterator[tuple[str, Row]]:
    """Passes of tools, and their memory beside that of the model's own pass."""
    length, dtype = (256, torch.float32) if miniature else (2048, torch.bfloat16)
    model = random_bridge(llama_shape(miniature), dtype)
    tokens = torch.randint(3, model.cfg.d_vocab, (1, length), generator=torch.Generator().manual_seed(0)).to(device())
    hooks = tp.dummy_distance(model, 5)
    forward = torch.no_grad()(lambda: model(tokens))
    tools: dict[str, Callable[[], Any]] = {
        "dummy_distance": torch.no_grad()(lambda: model.run_with_hooks(tokens, fwd_hooks=hooks)),
        "additivity": partial(tp.additivity, model, tokens, progress=False),
        "controlled_distance": partial(tp.controlled_distance, model, tokens, progress=False),
    }
    layer_scores = model.cfg.n_heads * length**2 * next(model.parameters()).element_size() / 2**20
    for name, tool in tools.items():
        seconds = medians({"forward": forward, "tool": tool}, repeats=3)
        note = f"{length} tokens, {dtype}"
        yield f"passes: {name}", {"value": seconds["tool"] / seconds["forward"], "bound": math.inf, "note": note}
        bound = math.inf if name == "dummy_distance" else memory(forward) + layer_scores / 2
        note = "tables: at most the model's own pass and half of a layer's scores"
        yield f"MiB: {name}", {"value": memory(tool), "bound": bound, "note": note}


@torch.no_grad()
def memory(function: Callable[[], Any]) -> float:
    """MiB at most while the function runs, above what there was; on a CPU, of tensors."""
    if accelerator():
        return peak(function)
    with LiveBytes() as live:
        function()
    return float(live.most / 2**20)


# --- one run --------------------------------------------------------------------------------------------------------


def checks(miniature: bool) -> Iterator[tuple[str, Row]]:
    yield "difference of functions, float32", compare_functions()
    yield "difference of losses in training", compare_training()
    yield from costs(miniature)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default the GPU")
    options = parser.parse_args()
    if options.device:
        os.environ["BENCH_DEVICE"] = options.device
    elif device().type == "cpu":
        print("gpu-check needs a GPU, and torch finds none; --device cpu runs the same code on the CPU")
        return 4
    torch.set_float32_matmul_precision("highest")
    rows, start = [], time.perf_counter()
    for name, row in checks(miniature=device().type == "cpu"):
        rows.append({"check": name, "holds": row["value"] <= row["bound"], **row, "s": time.perf_counter() - start})
        print(rows[-1], flush=True)
        start = time.perf_counter()
    report("gpu_check", "This package on a GPU against the CPU, and its costs there", rows)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
