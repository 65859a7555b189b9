"""Rows about synthetic tasks and models, their training, deposits and sweeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from tl_posdisent.models.loading.load import has_hooked
from tl_posdisent.sweeps import (
    jobs,
    marginals_by_layer,
    merge_additivity,
    merge_controlled_distance,
    merge_moments,
    moments_by_layer,
)
from tl_posdisent.synthetic import (
    IndexLookup,
    Preset,
    Retrieval,
    SyntheticConfig,
    SyntheticModel,
    TrainConfig,
    TrainRun,
    TriggerCount,
    TriggerDistance,
    accuracies,
    deposit,
    deposit_spread,
    deposit_study,
    dynamics,
    evaluate,
    gradient_margins,
    head_drops,
    only_heads,
    positional_gradients,
    preset,
    sufficient_heads,
    to_hooked_transformer,
    train,
    train_preset,
)

from .given import FEW, LINEAR, NAN, TASK, TOKENS, model, synthetic
from .row import Row, gives, refused

SHAPE: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16, "d_vocab": 8, "n_ctx": 6, "n_out": 4}
X, Y = TASK.batch(16)
_MODEL = synthetic()
DROPS = pd.DataFrame(
    {"layer": [0, 0], "head": [0, 1], "metric": [0.5, 0.8], "baseline": [0.9, 0.9], "effect": [-0.4, -0.1]}
)
SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16}
TINY = Preset("tiny", tasks={"count": TASK}, encodings=("rope",), shape=SIZES, training=FEW, per_task={})
MARGINS = pd.DataFrame({"layer": [0, 0], "head": [0, 1], "norm_of_mean": [1.0, 0.5]})


def trained(**changed: Any) -> TrainRun:
    return train(synthetic(), TASK, replace(FEW, **changed), progress=False)


def _climbing(at: Any, **changed: Any) -> Any:
    """A preset whose name for a task leads out of the folder."""
    out = at / "out"
    try:
        return deposit_study(replace(TINY, **changed), folder=out, samples=4, progress=False)
    finally:
        outside = [path for path in at.rglob("*") if path.is_file() and out not in path.parents]
        assert not outside, outside


def _nan_loss() -> Any:
    broken = synthetic()
    with torch.no_grad():
        broken.unembed.W_U.mul_(NAN) if hasattr(broken, "unembed") else next(broken.parameters()).mul_(NAN)
    return train(broken, TASK, FEW, progress=False)


def _no_drops() -> bool:
    """Heads that matter to nothing leave no deposit, and no division by zero."""
    report = deposit(DROPS.assign(effect=0.0))
    return report.layer is None and report.head is None and report.drop == 0.0


ROWS: list[Row] = [
    refused("SyntheticConfig", "no layers", lambda at: SyntheticConfig(**SHAPE | {"n_layers": 0}), "n_layers must be"),
    refused(
        "SyntheticConfig", "width True", lambda at: SyntheticConfig(**SHAPE | {"d_model": True}), "d_model must be"
    ),
    refused("SyntheticConfig", "3 heads of 16", lambda at: SyntheticConfig(**SHAPE | {"n_heads": 3}), "n_heads must"),
    refused(
        "SyntheticConfig",
        "an unknown encoding",
        lambda at: SyntheticConfig(**SHAPE, encoding="rotary"),
        "encoding must be",
    ),
    refused("SyntheticConfig", "dropout of all", lambda at: SyntheticConfig(**SHAPE, dropout=1.0), "dropout must be"),
    refused("SyntheticConfig", "base NaN", lambda at: SyntheticConfig(**SHAPE, rope_base=NAN), "rope_base must be"),
    refused("SyntheticModel", "no configuration", lambda at: SyntheticModel(SHAPE), "config must be", "dict"),
    refused("SyntheticModel", "seed -1", lambda at: SyntheticModel(SyntheticConfig(**SHAPE), seed=-1), "seed must be"),
    refused("SyntheticModel", "ids beyond the vocabulary", lambda at: synthetic()(X + 8), "tokens must be"),
    refused(
        "SyntheticModel",
        "more positions than were learned",
        lambda at: synthetic(encoding="learned")(X.repeat(1, 2)),
        "tokens must be at most",
        "6",
    ),
    refused("SyntheticModel", "floats", lambda at: synthetic()(X.float()), "tokens must"),
    gives("SyntheticModel", "a text without a batch axis", lambda at: torch.equal(_MODEL(X[0]), _MODEL(X[:1]))),
    refused("SyntheticModel", "no texts", lambda at: synthetic()(X[:0]), "tokens must"),
    refused("TrainConfig", "lr NaN", lambda at: TrainConfig(lr=NAN), "lr must be"),
    refused("TrainConfig", "lr in words", lambda at: TrainConfig(lr="fast"), "lr must be"),
    refused("TrainConfig", "three betas", lambda at: TrainConfig(betas=(0.9, 0.9, 0.9)), "betas must be"),
    refused("TrainConfig", "one beta", lambda at: TrainConfig(betas=0.9), "betas must be"),
    refused(
        "TrainConfig", "a checkpoint after the end", lambda at: replace(FEW, checkpoints=(99,)), "checkpoints must be"
    ),
    refused("TrainConfig", "fewer samples than a batch", lambda at: replace(FEW, n_train=4), "n_train must be"),
    refused("train", "another module", lambda at: train(LINEAR, TASK), "model must be", "Linear"),
    refused("train", "no task", lambda at: train(synthetic(), "count"), "task must be", "str"),
    refused("train", "a vocabulary too small", lambda at: train(synthetic(d_vocab=4), TASK), "d_vocab"),
    refused(
        "train", "resume from nowhere", lambda at: train(synthetic(), TASK, FEW, resume=True), "folder must be given"
    ),
    refused(
        "train", "stop before the first step", lambda at: train(synthetic(), TASK, FEW, stop_at=0), "stop_at must be"
    ),
    refused(
        "train",
        "more samples than there are",
        lambda at: train(
            synthetic(),
            TriggerCount(d_vocab=3, n_triggers=1, max_count=1, min_length=2, max_length=2, n_ctx=6),
            replace(FEW, n_train=500),
            progress=False,
        ),
        "n_train + n_test",
    ),
    refused("train", "weights of NaN", lambda at: _nan_loss(), "loss must be finite", "lr"),
    refused(
        "train",
        "a file as the folder",
        lambda at: train(synthetic(), TASK, FEW, folder=_file(at), progress=False),
        "folder must be",
    ),
    refused("evaluate", "fewer labels", lambda at: evaluate(synthetic(), X, Y[:3]), "labels must be"),
    refused("evaluate", "labels beyond the answers", lambda at: evaluate(synthetic(), X, Y + 90), "labels must be"),
    refused("evaluate", "no samples", lambda at: evaluate(synthetic(), X[:0], Y[:0]), "tokens must"),
    refused("evaluate", "another model", lambda at: evaluate(model(), X, Y), "model must be a SyntheticModel"),
    refused(
        "evaluate", "batches of nothing", lambda at: evaluate(synthetic(), X, Y, batch_size=0), "batch_size must be"
    ),
    refused("TriggerCount", "no trigger", lambda at: TriggerCount(n_triggers=0), "n_triggers must be"),
    refused("TriggerCount", "more triggers than words", lambda at: TriggerCount(d_vocab=8, n_triggers=8), "d_vocab"),
    refused("TriggerCount", "no sample", lambda at: TASK.batch(0), "n must be"),
    refused("TriggerCount", "seed in words", lambda at: TASK.batch(1, seed="a"), "seed must be"),
    refused("TriggerDistance", "gaps that fall", lambda at: TriggerDistance(min_gap=5, max_gap=2), "max_gap must be"),
    refused("TriggerDistance", "texts longer than the context", lambda at: TriggerDistance(n_ctx=10), "n_ctx must be"),
    refused("IndexLookup", "from the middle", lambda at: IndexLookup(count_from="middle"), "count_from must be"),
    refused("IndexLookup", "more places than symbols in a text", lambda at: IndexLookup(n_places=99), "n_places"),
    refused(
        "Retrieval", "more pairs than keys", lambda at: Retrieval(n_keys=2, n_pairs=8), "n_keys must be", "n_pairs"
    ),
    refused("Retrieval", "lengths that fall", lambda at: Retrieval(min_fill=9, max_fill=3), "max_fill must be"),
    refused("preset", "an unknown one", lambda at: preset("large"), "name must be", "'large'"),
    refused("preset", "a list", lambda at: preset(["small"]), "name must be"),
    refused(
        "train_preset",
        "an unknown task",
        lambda at: train_preset(TINY, tasks=["sort"], progress=False),
        "task must be",
        "'sort'",
    ),
    refused("train_preset", "no preset", lambda at: train_preset("small", progress=False), "preset must be"),
    refused(
        "train_preset",
        "tasks as one word",
        lambda at: train_preset(TINY, tasks="count", progress=False),
        "tasks must be",
    ),
    refused(
        "train_preset",
        "an unknown size",
        lambda at: train_preset(TINY, progress=False, width=3),
        "width",
        error=TypeError,
    ),
    refused(
        "deposit_study",
        "an unknown encoding",
        lambda at: deposit_study(TINY, encodings=["rotary"], progress=False),
        "encoding must be",
    ),
    refused(
        "deposit_study", "no samples", lambda at: deposit_study(TINY, samples=0, progress=False), "samples must be"
    ),
    refused("deposit_study", "no seeds", lambda at: deposit_study(TINY, seeds=[], progress=False), "seeds"),
    refused(
        "Preset",
        "a task's name that climbs out",
        lambda at: _climbing(at, tasks={"../../count": TASK}),
        "tasks",
        "'../../count'",
    ),
    refused("Preset", "a task's name from the root", lambda at: _climbing(at, tasks={str(at / "x"): TASK}), "tasks"),
    refused("deposit", "no table", lambda at: deposit([1, 2]), "drops must"),
    refused("deposit", "an empty table", lambda at: deposit(DROPS.iloc[:0]), "drops must have rows"),
    refused("deposit", "effects of NaN", lambda at: deposit(DROPS.assign(effect=NAN)), "drops must have finite"),
    refused("deposit", "a head twice", lambda at: deposit(DROPS.assign(head=0)), "drops must have one row per head"),
    refused("deposit", "an unknown direction", lambda at: deposit(DROPS, better="more"), "better must be"),
    gives("deposit", "no head matters", lambda at: _no_drops()),
    refused("deposit_spread", "no reports", lambda at: deposit_spread([]), "reports must have", "none"),
    refused("deposit_spread", "tables in place of reports", lambda at: deposit_spread([DROPS]), "reports must"),
    refused("accuracies", "a table", lambda at: accuracies(DROPS), "runs must"),
    refused(
        "head_drops", "fewer labels", lambda at: head_drops(synthetic(), X, Y[:3], progress=False), "labels must be"
    ),
    refused(
        "head_drops",
        "no model of ours",
        lambda at: head_drops(model(), X, Y, progress=False),
        "model must be a SyntheticModel",
    ),
    refused(
        "head_drops",
        "an unknown mode",
        lambda at: head_drops(synthetic(), X, Y, mode="off", progress=False),
        "mode must",
    ),
    refused(
        "sufficient_heads",
        "fewer labels",
        lambda at: sufficient_heads(synthetic(), X, Y[:3]),
        "labels must be",
    ),
    refused(
        "sufficient_heads", "a share above 1", lambda at: sufficient_heads(synthetic(), X, Y, keep=1.5), "keep must be"
    ),
    refused(
        "sufficient_heads",
        "rotation where nothing rotates",
        lambda at: sufficient_heads(synthetic(encoding="none"), X, Y),
        "by must be",
        "'none'",
    ),
    refused("only_heads", "a head too many", lambda at: only_heads(synthetic(), [(0, 2)]), "heads must be"),
    refused("only_heads", "no model of ours", lambda at: only_heads(model(), [(0, 1)]), "model must be"),
    refused(
        "only_heads",
        "texts that no rotation needs",
        lambda at: only_heads(synthetic(), [(0, 1)], reference=X),
        "reference must be None",
    ),
    refused(
        "SufficientHeads",
        "more heads than there are",
        lambda at: sufficient_heads(synthetic(), X, Y).at(3),
        "heads must be at most 2, got 3",
    ),
    refused(
        "dynamics",
        "a run without checkpoints",
        lambda at: dynamics(trained(), progress=False),
        "run must have checkpoints",
    ),
    refused("dynamics", "no run", lambda at: dynamics(DROPS, progress=False), "run must be"),
    refused("dynamics", "checkpoints that are gone", lambda at: _gone(at), "does not exist"),
    refused(
        "positional_gradients",
        "an unknown part",
        lambda at: positional_gradients(synthetic(), TASK, part="key", progress=False),
        "part must be",
    ),
    refused(
        "positional_gradients",
        "no task",
        lambda at: positional_gradients(synthetic(), "count", progress=False),
        "task must be",
    ),
    refused(
        "positional_gradients",
        "no batches",
        lambda at: positional_gradients(synthetic(), TASK, batches=0, progress=False),
        "batches must be",
    ),
    refused("gradient_margins", "one head", lambda at: gradient_margins(MARGINS[:1]), "at least two heads"),
    refused("gradient_margins", "an unknown norm", lambda at: gradient_margins(MARGINS, by="max"), "by must be"),
    refused("gradient_margins", "no table", lambda at: gradient_margins(3), "table must be"),
    refused(
        "moments_by_layer",
        "sinks of all",
        lambda at: moments_by_layer(model(), TOKENS, sinks=12, progress=False),
        "sinks must",
    ),
    refused(
        "marginals_by_layer",
        "layer 9",
        lambda at: marginals_by_layer(model(), TOKENS, layers=[9], progress=False),
        "layers must",
    ),
    refused("merge_moments", "another table", lambda at: merge_moments(DROPS), "table must"),
    refused("merge_additivity", "another table", lambda at: merge_additivity(DROPS), "table must"),
    refused("merge_additivity", "an unknown part", lambda at: merge_additivity(_marginals(), "all"), "part must"),
    refused("merge_controlled_distance", "another table", lambda at: merge_controlled_distance(DROPS), "table must"),
    refused("jobs", "an unknown experiment", lambda at: jobs("demo", "addictivity", "demo"), "experiment"),
    refused("jobs", "no file at the path", lambda at: jobs(at / "none", "additivity", "demo"), "model must be"),
    refused(
        "jobs",
        "arguments that are no JSON",
        lambda at: jobs("demo", ("additivity", {"mask": {1, 2}}), "demo"),
        "arguments must be",
    ),
]
if has_hooked():
    ROWS += [
        refused(
            "to_hooked_transformer",
            "a bidirectional model",
            lambda at: to_hooked_transformer(synthetic()),
            "causal must be",
        ),
        refused(
            "to_hooked_transformer",
            "another module",
            lambda at: to_hooked_transformer(LINEAR),
            "model must be",
        ),
    ]
else:
    ROWS += [
        refused(
            "to_hooked_transformer",
            "TransformerLens 4",
            lambda at: to_hooked_transformer(synthetic()),
            "no HookedTransformer",
        )
    ]


def _file(at: Any) -> Any:
    (at / "file").write_text("x")
    return at / "file"


def _gone(at: Any) -> Any:
    run = train(synthetic(), TASK, replace(FEW, checkpoints=(1,)), folder=at, progress=False)
    for path in run.checkpoints.values():
        path.unlink()
    return dynamics(run, progress=False)


def _marginals() -> pd.DataFrame:
    return marginals_by_layer(model(), TOKENS, layers=[0], progress=False)
