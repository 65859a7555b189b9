"""How every public function is called once correctly: good values by argument, and by function where these differ."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import tl_posdisent as tp
from support import zoo
from support.public import public_names
from support.small_models import small_model
from tl_posdisent.hooks import substitute_attention
from tl_posdisent.rope import Moments, Rotary, to_complex
from tl_posdisent.synthetic import Preset, SyntheticConfig, SyntheticModel, TriggerCount

Function = Callable[..., Any]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal float32 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TOKENS = zoo.random_tokens()
TARGETS = torch.arange(12) * 2
WORDS = [f"w{i}" for i in range(12)]
SCORES = numbers(2, 8, 12, 12)
FIT = tp.fit_additive(SCORES)
ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
Q, K = numbers(2, 9, 4, 6, seed=1), numbers(2, 9, 2, 6, seed=2)
PLANES, REST = to_complex(Q, ROTARY)
ANGLES = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1])

TASK = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=6, max_length=6, n_ctx=6)
SAMPLES, LABELS = TASK.batch(16)
FEW = {"epochs": 1, "batch_size": 8, "n_train": 16, "n_test": 8, "pieces": 1}
SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16}
SHAPE: dict[str, Any] = SIZES | FEW | {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out}
PRESET = Preset(tasks={"count": TASK}, encodings=("rope",), settings=SIZES | FEW)
HEADS = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "r": [0.5, 0.25], "norm_of_mean": [1.0, 0.5]})
DROPS = HEADS.assign(metric=[0.5, 0.8], baseline=0.9, effect=[-0.4, -0.1])
FOLDER = tempfile.TemporaryDirectory()


def synthetic(**changed: Any) -> SyntheticModel:
    """A new tiny model of ``TASK``."""
    return SyntheticModel(SyntheticConfig(**SHAPE | {"pad_id": 0} | changed))


ROW = tp.score_sources(small_model(encoding="rope", causal=True), torch.arange(9), "L1H0", 8)

GOOD: dict[str, Any] = {
    "hf_model": zoo.hf_model("llama-gqa"),
    "before": zoo.load("bridge", "llama-gqa"),
    "after": zoo.load("bridge", "llama-gqa"),
    "tokens": TOKENS,
    "text": TOKENS,
    "source": TOKENS.flip(1),
    "path": Path(FOLDER.name, "report.html"),
    "layer": 0,
    "head": "L0H1",
    "heads": [(0, 1)],
    "positions": TARGETS,
    "distance": 3,
    "distances": [1, 2],
    "kind": "order",
    "fraction": 0.5,
    "noise": 0.1,
    "metric": lambda logits, tokens: logits[:, -1, 5],
    "hooks": [],
    "interventions": lambda model: {"flat": substitute_attention(model, "uniform")},
    "component": "distance",
    "length": 12,
    "lengths": [0, 4, 12],
    "sinks": 1,
    "n_sink": 1,
    "window": 4,
    "distance_ceiling": 4,
    "factor": 2,
    "query": 5,
    "key": 6,
    "by": "uniform",
    "scores": SCORES,
    "a": SCORES,
    "b": SCORES,
    "fit": FIT,
    "found": ROW,
    "q_rot": torch.zeros(2, 12, 8, 8),
    "k_rot": torch.zeros(2, 12, 4, 8),
    "scale": 1.0,
    "rotary": ROTARY,
    "q": Q,
    "k": K,
    "x": Q,
    "moments": Moments.from_qk(Q, K, ROTARY),
    "table": HEADS,
    "drops": DROPS,
    "preset": PRESET,
    "task": TASK,
    "better": "higher",
    "out": Path(FOLDER.name),
}
"""By the name of the argument; hooks, as a function of the model."""

OWN: dict[str, dict[str, Any]] = {
    "component_patching": {"source": TOKENS.flip(1)},
    "cut_text": {"text": tp.demo_text()[:300]},
    "describe_head": {"query": (0, 5), "seeds": 0},
    "dynamics": {"models": {0: synthetic()}},
    "evaluate": {"tokens": SAMPLES, "labels": LABELS},
    "fit_attention": {"scores": SCORES},
    "head_drops": {"tokens": SAMPLES, "labels": LABELS},
    "knock_out": {"keys": [1], "queries": [5, 6]},
    "limit_frequencies": {"high": 0.5},
    "logit_difference": {"answers": [3]},
    "plot_distance": {"profiles": FIT},
    "plot_heads": {"value": "r"},
    "preset": {"name": "small"},
    "remap_distance": {"distances": lambda d: d},
    "rotary_from_table": {"cos": ANGLES.cos(), "sin": ANGLES.sin()},
    "rotate": {"positions": torch.arange(9)},
    "show_parts": {"tokens": WORDS, "head": 0},
    "show_patterns": {"tokens": WORDS, "pattern": SCORES.softmax(-1)},
    "show_scores": {"tokens": WORDS},
    "sufficient_heads": {"tokens": SAMPLES, "labels": LABELS},
    "Rotary": {"frequencies": ROTARY.frequencies},
    "SyntheticConfig": SHAPE,
    "SyntheticModel": {"config": SyntheticConfig(**SHAPE)},
}
"""By the function, where another value is needed, or one in the place of a default."""

CHEAP = {"progress": False, "rungs": ["distance"], "controls": [], "fractions": [0.5], "seeds": 1}
"""In the place of defaults that take long."""
# Classes that users make, by what makes them.
MADE: dict[str, Function] = {"Moments": Moments.from_qk} | {
    made.__name__: made
    for made in (
        *(Rotary, SyntheticConfig, SyntheticModel),
        *(TriggerCount, tp.synthetic.TriggerDistance, tp.synthetic.Reversal, tp.synthetic.Brackets),
    )
}


def callables() -> dict[str, Function]:
    """All public functions, and the classes that users make, by name."""
    return {name: x for name, x in public_names().items() if inspect.isfunction(x)} | MADE


def functions(*parameters: str) -> list[Function]:
    """Public functions of a model that have these parameters; not those that take a ``SyntheticModel`` only."""
    found = []
    for function in filter(inspect.isfunction, public_names().values()):
        named = inspect.signature(function).parameters
        if list(named)[:1] == ["model"] and set(parameters) <= set(named) and not takes_synthetic(function):
            found.append(function)
    return found


def takes_synthetic(function: Function) -> bool:
    return [p.annotation for p in inspect.signature(function).parameters.values()][:1] == ["SyntheticModel"]


def model_for(function: Function, reading: Any) -> Any:
    """A model that this function takes: a synthetic one, this reading, or its model."""
    if takes_synthetic(function):
        return synthetic()
    of_models = function.__module__.startswith("tl_posdisent.models") or function == tp.hooks.applied
    return reading.model if of_models else reading


def call(function: Function, /, *model: Any, **changed: Any) -> Any:
    """Call a function with good values for all other arguments; of an iterator, take the first item."""
    name = next((x for x, made in MADE.items() if made == function), getattr(function, "__name__", ""))
    arguments = dict(zip(("model",), model, strict=False))
    arguments |= changed
    for parameter in inspect.signature(function).parameters.values():
        good = CHEAP | OWN.get(name, {})
        if parameter.name in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            good = GOOD | good
            assert parameter.name in good, f"say in GOOD what a good {parameter.name} of {name} is"
        if parameter.name in good:
            arguments[parameter.name] = good[parameter.name]
    if callable(arguments.get("interventions")):
        arguments["interventions"] = arguments["interventions"](arguments["model"])
    result = function(**arguments)
    if isinstance(result, Iterator):
        return next(result)
    enters = hasattr(result, "__enter__") and not isinstance(result, Path)
    return result.__enter__() if enters else result
