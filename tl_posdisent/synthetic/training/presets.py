"""Presets of tasks and settings: ``small`` and ``medium`` for a CPU, ``paper`` as in the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from tl_posdisent.models.loading.load import check_device
from tl_posdisent.synthetic.model.config import EncodingName, SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.brackets import Brackets
from tl_posdisent.synthetic.tasks.reversal import Reversal
from tl_posdisent.synthetic.tasks.task import Task
from tl_posdisent.synthetic.tasks.trigger_count import TriggerCount
from tl_posdisent.synthetic.tasks.trigger_distance import TriggerDistance
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import check_writable
from tl_posdisent.utils.validation import check_choice, check_seeds, check_subset, shown

from .checkpoints import save_checkpoint
from .train import TrainRun, train

Key = tuple[str, str, int]
"""Encoding, task, seed."""


@dataclass(frozen=True)
class Preset:
    """Tasks, encodings, and the settings of a model of each.

    Attributes:
        tasks: name → task.
        encodings: encodings to compare.
        settings: arguments of ``SyntheticConfig`` that all models share.
        changes: task or encoding → other arguments for its models; those of the encoding take precedence.

    Example:
        >>> from tl_posdisent.synthetic import preset
        >>> small = preset("small")
        >>> list(small.tasks), small.encodings
        (['distance', 'count', 'reversal', 'balanced', 'depth'], ('rope', 'alibi', 'none', 'learned', 'mla'))
        >>> small.model("rope", "distance", seed=1, rotary_heads=1).config.rotary_heads
        1
    """

    tasks: Mapping[str, Task]
    encodings: tuple[str, ...]
    settings: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, encoding: str, task: str, seed: int = 0, **changed: Any) -> SyntheticConfig:
        """Create the settings of a model and its training; ``changed`` overrides arguments of ``SyntheticConfig``."""
        check_choice("task", task, self.tasks)
        sizes = {name: getattr(self.tasks[task], name) for name in ("d_vocab", "n_ctx", "n_out", "pad_id")}
        changes = {**self.changes.get(task, {}), **self.changes.get(encoding, {}), **changed}
        return SyntheticConfig(**{**sizes, **self.settings, "encoding": encoding, "seed": seed, **changes})

    def model(self, encoding: str, task: str, seed: int = 0, **changed: Any) -> SyntheticModel:
        """Create an untrained model; arguments as those of ``config``."""
        return SyntheticModel(self.config(encoding, task, seed, **changed))


_ON_A_CPU: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "betas": (0.9, 0.98), "pieces": 2}

SMALL = Preset(
    tasks={
        "distance": TriggerDistance(d_vocab=32, max_gap=16, max_side=8, n_ctx=34),
        "count": TriggerCount(d_vocab=32, n_triggers=4, max_count=16, min_length=24, max_length=32, n_ctx=32),
        "reversal": Reversal(d_vocab=16, min_length=8, max_length=8, n_ctx=8),
        "balanced": Brackets(min_pairs=10, max_pairs=12, n_ctx=24),
        "depth": Brackets(min_pairs=10, max_pairs=12, n_ctx=24, question="depth"),
    },
    encodings=("rope", "alibi", "none", "learned", "mla"),
    # Wavelengths from 6 to 353 positions: with the usual base, half would exceed 600, for texts of 34 tokens.
    settings={
        **{"n_layers": 3, "d_model": 64, "n_heads": 4, "d_mlp": 128, "rope_base": 100.0},
        **_ON_A_CPU,
        **{"batch_size": 128, "n_train": 38_400, "n_test": 4_000},
    },
)

# Options that the authors' models share, whatever their size.
_AUTHORS: dict[str, Any] = {
    "keys_from": "input",
    "source_norm": False,
    "final_norm": False,
    "activation": "relu",
    "initialisation": "torch",
    "sinusoids": "halves",
    "alibi_slopes": "exponential",
}

MEDIUM = Preset(
    tasks={f"gap{n}": TriggerDistance(d_vocab=32, max_gap=n, max_side=8, n_ctx=n + 18) for n in (8, 16, 32, 70)},
    encodings=("rope", "sinusoidal_rope", "sinusoidal", "t5", "alibi", "random"),
    settings={
        **{"n_layers": 6, "d_model": 128, "n_heads": 16, "d_mlp": 256, "rope_base": 100.0},
        **_AUTHORS,
        **_ON_A_CPU,
        **{"batch_size": 64, "n_train": 16_000, "n_test": 2_000},
    },
    changes={"gap16": {"n_train": 19_200}, "gap32": {"n_train": 25_600}, "gap70": {"n_train": 51_200}},
)

PAPER = Preset(
    tasks={
        "distance": TriggerDistance(
            two_triggers=True, stray_triggers=True, repeats=False, max_length=120, first_label=2, n_logits=574
        ),
        "count": TriggerCount(min_length=120, ignore_zero=True, n_logits=574),
    },
    encodings=("sinusoidal_rope", "rope", "absolute_mla", "sinusoidal", "random", "t5", "alibi", "none"),
    settings={
        **{"n_layers": 6, "d_model": 256, "n_heads": 16, "d_mlp": 512, "pad_id": None},
        **{"dropout": 0.1, "dropout_at": ("pattern", "attn_out", "mlp_out")},
        **_AUTHORS,
        **{"clip": None, "keep_last": True, "test_every": 1_370},
    },
    changes={
        "count": {"n_train": 35_000, "n_test": 15_000, "test_every": 690},
        "absolute_mla": {
            "keys_from": "layer",
            "d_query_latent": 128,
            "d_key_latent": 128,
            "latent_norm": False,
            "d_head": 32,
            "d_rope": 16,
            "shared_rotary_query": True,
            "batch_size": 1024,
            "epochs": 150,
        },
    },
)


def preset(name: Literal["small", "medium", "paper"]) -> Preset:
    """Return the ``small``, ``medium`` or ``paper`` preset.

    * ``"small"``: texts of at most 34 tokens from a vocabulary of 32, 16 distances, 0–16 triggers of 4 kinds; the
      mirrored token of 8; 10 to 12 pairs of brackets. 3 layers, d_model 64, 4 heads. A run takes some ten seconds.
    * ``"medium"``: the paper's architecture with 6 layers of 16 heads and d_model 128, on 8, 16, 32 or 70 distances
      (tasks ``"gap8"`` …), without dropout and with hidden padding. A run takes about a minute on one core.
    * ``"paper"``: the settings of arXiv 2505.13027, where keys and values read the embedded input without a norm, and
      padding is read like other tokens. ``"sinusoidal_rope"`` is the paper's RoPE, ``"sinusoidal"`` its absolute
      positions, ``"absolute_mla"`` its MLA. It needs a GPU.

    Example:
        >>> from tl_posdisent.synthetic import preset
        >>> paper = preset("paper")
        >>> paper.config("rope", "distance").n_out, paper.config("rope", "count").n_train
        (574, 35000)
        >>> preset("medium").tasks["gap16"].n_out
        16
    """
    presets = {"small": SMALL, "medium": MEDIUM, "paper": PAPER}
    check_choice("name", name, presets)
    return presets[name]


def train_preset(
    preset: Preset,
    *,
    encodings: Iterable[str] | None = None,
    tasks: Iterable[str] | None = None,
    seeds: int | Iterable[int] = 1,
    folder: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
    **changed: Any,
) -> dict[Key, TrainRun]:
    """Train every encoding on every task from every seed, one after the other.

    Args:
        preset: a preset from ``preset``, or one of your own.
        encodings: any encodings of ``SyntheticConfig``; default all of the preset's.
        tasks: names of tasks; default all of the preset's.
        seeds: number of seeds (0, 1, …), or a list of seeds.
        folder: where to save each model after its training, as ``count-rope-seed0.safetensors``.
        device: where to train.
        changed: other arguments of ``SyntheticConfig`` for all models, for instance ``rotary_heads=1`` or ``lr=1e-2``.

    Returns:
        (encoding, task, seed) → ``TrainRun``; ``accuracies`` makes a table of them.

    Raises:
        ValueError: before a model is trained: unknown tasks or encodings, invalid seeds or changes, a device that torch
            cannot use, a folder in which no file can be written; as ``train``.

    Example:
        >>> from tl_posdisent.synthetic import accuracies, preset, train_preset
        >>> short = {"n_train": 1280, "n_test": 100, "progress": False}
        >>> runs = train_preset(preset("small"), encodings=["rope", "none"], tasks=["count"], **short)
        >>> accuracies(runs)[["encoding", "task", "seed", "steps"]]
          encoding   task  seed  steps
        0     rope  count     0     10
        1     none  count     0     10
    """
    if not isinstance(preset, Preset):
        raise ArgumentError("preset", f"must be a Preset, such as preset('small'), got {type(preset).__name__}")
    tasks = check_subset("tasks", [*preset.tasks] if tasks is None else tasks, preset.tasks)
    encodings = check_subset("encodings", preset.encodings if encodings is None else encodings, get_args(EncodingName))
    keys = [(encoding, task, seed) for seed in check_seeds(seeds) for task, encoding in product(tasks, encodings)]
    check_device(device)
    saved_in = None if folder is None else check_writable("folder", folder, "folder")
    # Create all settings first, so that invalid ones raise before anything is trained.
    settings = {key: preset.config(*key, **changed) for key in keys}
    runs: dict[Key, TrainRun] = {}
    for (encoding, task, seed), config in settings.items():
        model = SyntheticModel(config).to(device)
        runs[encoding, task, seed] = train(model, preset.tasks[task], progress=progress)
        if saved_in is not None:
            save_checkpoint(model, saved_in / f"{task}-{encoding}-seed{seed}.safetensors")
    return runs


def accuracies(runs: Mapping[Key, TrainRun]) -> pd.DataFrame:
    """Return a table of training runs, one row each.

    Its columns are ``encoding``, ``task``, ``seed``, ``steps``, ``samples``, ``seconds``, ``loss`` (on the test
    samples), ``chance`` (accuracy of a constant guess), and ``accuracy``.

    Example:
        >>> from tl_posdisent.synthetic import accuracies
        >>> accuracies({}).columns.tolist()
        ['encoding', 'task', 'seed', 'steps', 'samples', 'seconds', 'loss', 'chance', 'accuracy']
    """
    if not isinstance(runs, Mapping):
        raise ArgumentError("runs", f"must be what train_preset returns, got {shown(runs)}")
    columns = ["encoding", "task", "seed", "steps", "samples", "seconds", "loss", "chance", "accuracy"]
    rows = []
    for key, run in runs.items():
        cost = (run.steps, run.model.config.samples(run.steps), float(run.metrics["seconds"].iloc[-1]))
        rows.append((*key, *cost, run.test_loss, run.task.chance, run.test_accuracy))
    return pd.DataFrame(rows, columns=columns)
