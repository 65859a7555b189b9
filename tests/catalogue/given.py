"""What rows begin with: small good things, made once and changed by nobody."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import AdditiveFit, fit_additive, load_demo_model
from tl_posdisent.rope import Moments, Rotary
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, TrainConfig, TriggerCount

NAN, INF = float("nan"), float("inf")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_one(value: float, *shape: int) -> Tensor:
    """The same, with this at the first place."""
    x = numbers(*shape)
    x[(0,) * len(shape)] = value
    return x


TOKENS = zoo.random_tokens()
SCORES = numbers(2, 8, 12, 12)
ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
Q, K = numbers(2, 9, 4, 6, seed=1), numbers(2, 9, 2, 6, seed=2)
TASK = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=6, max_length=6, n_ctx=6)
FEW = TrainConfig(epochs=1, batch_size=8, n_train=16, n_test=8, pieces=1)


@functools.cache
def model(name: str = "llama-gqa") -> Any:
    """A shared bridge of the zoo; without a tokenizer."""
    with torch.random.fork_rng(devices=[]):  # a row must not be taken for what draws
        return zoo.bridge(name)


@functools.cache
def demo() -> Any:
    """The demo model, with its tokenizer."""
    return load_demo_model()


with torch.random.fork_rng(devices=[]):
    LINEAR = torch.nn.Linear(2, 2)  # no language model


@functools.cache
def fit() -> AdditiveFit:
    return fit_additive(SCORES)


@functools.cache
def moments() -> Moments:
    return Moments.from_qk(Q, K, ROTARY)


def synthetic(**changed: Any) -> SyntheticModel:
    """A new tiny model of ``TASK``."""
    shape: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16, "pad_id": 0}
    shape |= {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out}
    return SyntheticModel(SyntheticConfig(**shape | changed))


def own(name: str = "llama-gqa") -> Any:
    """A model of the zoo for the row alone, to be spoilt."""
    with torch.random.fork_rng(devices=[]):
        return zoo.bridge(name)


def words(n: int) -> list[str]:
    return [f"w{i}" for i in range(n)]


DROPS = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "baseline": [0.9, 0.9], "value": [0.5, 0.8], "drop": [0.4, 0.1]})
