"""Values that configurations, tasks, trainings and measurements refuse: the argument's name first, and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.small_models import small_model

from tl_posdisent.synthetic import (
    Preset,
    SyntheticConfig,
    TrainConfig,
    TriggerCount,
    TriggerDistance,
    deposit,
    dynamics,
    evaluate,
    gradient_margins,
    head_drops,
    only_heads,
    positional_gradients,
    preset,
    sufficient_heads,
    train,
    train_preset,
)
from tl_posdisent.synthetic.training.train import TrainRun

pytestmark = pytest.mark.usefixtures("unchecked")
SHAPE: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 24,
    "n_heads": 3,
    "d_mlp": 32,
    "d_vocab": 20,
    "n_ctx": 16,
    "n_out": 5,
}
NO_REPEATS = {"d_vocab": 71, "repeats": False}


def config(**changed: Any) -> SyntheticConfig:
    return SyntheticConfig(**SHAPE | changed)


FIELDS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (config, {"n_heads": 5}, "n_heads must divide d_model = 24 unless d_head is given, got 5"),
    (config, {"dropout_at": "embed"}, "dropout_at must be a sequence of .* got 'embed'"),
    (config, {"dropout_at": ["values"]}, "dropout_at must be 'embed', .* got 'values'"),
    (config, {"d_rope": 4, "encoding": "learned"}, "d_rope must be left out with encoding='learned'"),
    (config, {"rotary_heads": 1, "encoding": "alibi"}, "rotary_heads must be left out with encoding='alibi'"),
    (config, {"rotary_heads": 4}, "rotary_heads must be an integer from 0 to 3 .n_heads., got 4"),
    (config, {"d_head": 7}, "d_head must be even to be rotated in pairs, got 7"),
    (config, {"d_model": 25, "d_head": 8, "encoding": "sinusoidal"}, "d_model must be even .* got 25"),
    (config, {"rope_base": 0.0}, "rope_base must be a finite number above 0, got 0.0"),
    (config, {"encoding": "mla", "d_rope": 3}, "d_rope must be even, above 0 and below d_head = 8, got 3"),
    (config, {"encoding": "t5", "t5_buckets": 6}, "t5_buckets must be a multiple of 4, got 6"),
    (config, {"encoding": "t5", "t5_max_distance": 8}, "t5_max_distance must be an integer of at least 9 .* got 8"),
    (config, {"dropout": 1.0}, "dropout must be a finite number of at least 0 and below 1, got 1.0"),
    (config, {"pad_id": 20}, "pad_id must be an integer from 0 to 19 .a token id., got 20"),
    (TrainConfig, {"n_train": 511}, "n_train must be an integer of at least 512 .one batch., got 511"),
    (TrainConfig, {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
    (TrainConfig, {"betas": (0.9, 1.0)}, "betas must be a finite number of at least 0 and below 1, got 1.0"),
    (TrainConfig, {"betas": (0.9,)}, "betas must be a sequence of 2 numbers"),
    (TrainConfig, {"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
    (TrainConfig, {"warmup": 1.5}, "warmup must be a finite number of at least 0 and at most 1, got 1.5"),
    (TrainConfig, {"clip": 0.0}, "clip must be a finite number above 0, got 0.0"),
    (TrainConfig, {"checkpoints": (3, 13_700)}, "checkpoints must be an integer from 0 to 13600 .*got 13700"),
    (TrainConfig, {"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
    (TriggerDistance, {"d_vocab": 2}, "d_vocab must be an integer of at least 3"),
    (TriggerDistance, {"min_gap": 71}, "max_gap must be an integer of at least 71 .*got 70"),
    (TriggerDistance, {"min_side": 26}, "max_side must be an integer of at least 26 .*got 25"),
    (TriggerDistance, {"n_ctx": 121}, "n_ctx must be an integer of at least 122 .*longest text.*got 121"),
    (TriggerDistance, {"max_length": 96}, r"max_length must be an integer of at least 97 \(max_side \+ max_gap \+ 2"),
    (TriggerDistance, {"n_logits": 69}, "n_logits must be an integer of at least 70"),
    (TriggerDistance, NO_REPEATS, "d_vocab must be an integer of at least 72 .as many fillers as a segment has, .*71"),
    (TriggerCount, {"max_count": 101}, "min_length must be an integer of at least 101 .*must have room.*got 100"),
    (TriggerCount, {"min_count": 101}, "max_count must be an integer of at least 101"),
    (TriggerCount, {"n_triggers": 573}, "d_vocab must be an integer of at least 575"),
    (TriggerCount, {"max_length": 99}, "max_length must be an integer of at least 100"),
    (TriggerCount, {"n_ctx": 119}, "n_ctx must be an integer of at least 120"),
    (TriggerCount, {"n_logits": 100}, "n_logits must be an integer of at least 101"),
]


@pytest.mark.parametrize(("make", "fields", "message"), FIELDS, ids=[f"{m.__name__}-{f}" for m, f, _ in FIELDS])
def test_fields_that_do_not_fit_each_other(make: Callable[..., Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


TASK = TriggerDistance(d_vocab=6, max_gap=4, min_side=1, max_side=1, n_ctx=8)
SAMPLES = TASK.batch(12)
SMALL = preset("small")
BRIEF = replace(SMALL, training=replace(SMALL.training, n_train=64, batch_size=32, n_test=20))
DROPS = pd.DataFrame([(0, 0, 0.9, -0.1), (0, 1, 0.9, -0.2)], columns=["layer", "head", "baseline", "effect"])
NORMS = pd.DataFrame({"layer": [0], "head": [0], "norm_of_mean": [1.0]})


def model(**changed: Any) -> Any:
    return small_model(**{"d_vocab": 6, "n_ctx": 8, "n_out": 4, "pad_id": 0} | changed)


def margins(**changed: Any) -> Any:
    return positional_gradients(
        **{"model": model(), "task": SAMPLES, "batches": 2, "batch_size": 4, "progress": False} | changed
    )


RUN = TrainRun(model(), TASK, TrainConfig(), pd.DataFrame({"step": []}))
LINEAR: Any = torch.nn.Linear(2, 2)
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: TASK.batch(0), "n must be an integer of at least 1, got 0"),
    (lambda: TASK.batch(1, seed=-1), "seed must be an integer from 0 to 4294967295, got -1"),
    (lambda: TASK.split(1, 1, seed=2**32), "seed must be an integer from 0 to 4294967295, got 4294967296"),
    (lambda: TASK.batch(1, torch.Generator(), device="meta"), "device must be the generator's, cpu, or None, got meta"),
    # training
    (lambda: train(model(d_vocab=5), TASK), "model must have d_vocab of 6 or more for this task, got 5"),
    (lambda: train(model(n_ctx=7), TASK), "model must have n_ctx of 8 or more for this task, got 7"),
    (lambda: train(model(n_out=3), TASK), "model must have n_out of 4 or more for this task, got 3"),
    (lambda: train(model(pad_id=1), TASK), "model must have pad_id=0, the task's, or None to read padding .* got 1"),
    (lambda: train(LINEAR, TASK), "model must be a SyntheticModel, got Linear"),
    (lambda: train(model(), "distance"), "task must be a Task, got str"),  # type: ignore[arg-type]
    (lambda: evaluate(model(), SAMPLES[0], SAMPLES[1][:4]), "labels must be one per row of tokens, got 4 for 12 rows"),
    (lambda: evaluate(model(), SAMPLES[0], SAMPLES[1][:, None]), "labels must be integers of shape"),
    (lambda: evaluate(model(), SAMPLES[0], SAMPLES[1] * 0 - 100), "labels must have one or more that are not -100"),
    # presets
    (lambda: train_preset(BRIEF, tasks=["sum"]), "task must be 'distance' or 'count', got 'sum'"),
    (lambda: train_preset(BRIEF, encodings=["rope", "rotary"]), "encoding must be .*got 'rotary'"),
    (lambda: Preset("x", {"a/b": TASK}, (), {}, TrainConfig(), {}), "tasks must have names that can be a folder's"),
    # deposit
    (lambda: deposit(DROPS.drop(columns="effect")), "drops must .* as head_ablation makes it, got no column 'effect'"),
    (lambda: deposit(DROPS.assign(effect=[0.1, math.nan])), "drops must have finite numbers as effect, got nan"),
    (lambda: deposit(DROPS.assign(baseline=math.inf)), "drops must have finite numbers as baseline, got inf"),
    (lambda: deposit(DROPS.assign(baseline=[0.1, 0.2])), r"drops must be of one model, .* got \[0.1, 0.2\]"),
    (lambda: deposit(DROPS, measure="loss"), "drops must have the column 'loss_baseline'"),
    (lambda: deposit(DROPS, sufficient=[1]), "sufficient must be of type SufficientHeads, got int"),  # type: ignore[list-item]
    (
        lambda: head_drops(model(), *SAMPLES, mode="resample"),
        'tokens must be .* for mode "resample"',
    ),
    # sufficient heads
    (lambda: sufficient_heads(model(encoding="alibi"), *SAMPLES), "by must be \"attention\" with encoding='alibi'"),
    (lambda: sufficient_heads(LINEAR, *SAMPLES), "model must be a SyntheticModel, got Linear"),
    (lambda: sufficient_heads(model(), *SAMPLES, order=pd.DataFrame()), "order must be a table of head_drops"),
    (
        lambda: sufficient_heads(model(), *SAMPLES, order=DROPS.assign(loss_effect=0.0)),
        "order must have a finite loss_effect of every head, got none for L0H2",
    ),
    (lambda: sufficient_heads(model(), *SAMPLES).at(7), "heads must be an integer from 0 to 6, got 7"),
    (lambda: only_heads(model(), [(0, 3)]), "heads must be pairs"),
    (lambda: only_heads(model(), [], by="attention"), 'reference must be tokens with by="attention", got NoneType'),
    (lambda: only_heads(model(), [], reference=SAMPLES[0]), 'reference must be None with by="rotation", got Tensor'),
    # gradients and dynamics
    (lambda: margins(batches=1), "batches must be an integer of at least 2, got 1"),
    (lambda: margins(batches=4), r"at least batches · batch_size = 16 texts, got 12 texts and 12 labels"),
    (lambda: margins(task=(SAMPLES[0], SAMPLES[1][:3])), "got 12 texts and 3 labels"),
    (lambda: margins(model=LINEAR), "model must be a SyntheticModel, got Linear"),
    (lambda: margins(model=model(read_out="token")), 'model must have one answer per text .* got "token"'),
    (lambda: margins(model=model(encoding="learned"), part="encoding"), 'part must be "distance" with encoding=\'lea'),
    (lambda: gradient_margins(NORMS, by="mean_norm"), "table must have the column 'mean_norm', as"),
    (lambda: dynamics(RUN), "run must have checkpoints"),
    (lambda: dynamics(replace(RUN, checkpoints={0: Path("nowhere.safetensors")}), progress=False), "nowhere"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:40] for _, message in CALLS])
def test_calls_that_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
