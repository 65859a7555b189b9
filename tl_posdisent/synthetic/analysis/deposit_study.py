"""Study of the deposit: train encodings × tasks × seeds, ablate each head, and collect the results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tl_posdisent.synthetic.training.presets import Key, Preset, accuracies, chosen_of, train_preset
from tl_posdisent.utils.files import locked, whole_file

from .deposit import DepositReport, deposit, deposit_spread, head_drops

_KEY = ["encoding", "task", "seed"]
_GROUP = ["encoding", "task"]
_SPREAD = ["drop", "second", "share", "effective_heads", "layer"]


@dataclass(frozen=True, eq=False, repr=False)
class DepositStudy:
    """Accuracies, drops and deposits of several training runs.

    Attributes:
        accuracy: one row per training, as ``accuracies`` makes it.
        drops: one row per training and head: ``encoding``, ``task``, ``seed`` and the columns of ``head_drops``.
        reports: (encoding, task, seed) → the training's ``DepositReport``.

    Example:
        >>> from dataclasses import replace
        >>> from tl_posdisent.synthetic import deposit_study, preset
        >>> small = preset("small")
        >>> short = replace(small, training=replace(small.training, n_train=1280, n_test=100))
        >>> study = deposit_study(short, encodings=["rope", "none"], tasks=["count"], progress=False)
        >>> study.drops.shape, study.deposits().shape, study.summary().shape
        ((24, 8), (2, 10), (2, 17))
    """

    accuracy: pd.DataFrame
    drops: pd.DataFrame
    reports: dict[Key, DepositReport]

    def deposits(self) -> pd.DataFrame:
        """One row per training: ``encoding``, ``task``, ``seed`` and the measures of ``DepositReport``."""
        rows = [report.to_frame().assign(**_as_columns(key)) for key, report in self.reports.items()]
        table = pd.concat(rows, ignore_index=True)
        return table[[*_KEY, *table.columns.drop(_KEY)]]

    def summary(self) -> pd.DataFrame:
        """One row per encoding and task: ``seeds`` (how many), ``accuracy`` and the measures of the deposit, each as
        mean over seeds and ``…_std`` (of the sample; NaN for one seed), and ``layers``, which layers had the largest
        drop, seed by seed."""
        rows = []
        for (encoding, task), table in self.accuracy.groupby(_GROUP, sort=False):
            reports = [self.reports[str(encoding), str(task), seed] for seed in table["seed"]]
            spread = deposit_spread(reports)
            row: dict[str, Any] = {"encoding": encoding, "task": task, "seeds": len(table)}
            row |= {"chance": table["chance"].iloc[0]}
            row |= {"accuracy": table["accuracy"].mean(), "accuracy_std": table["accuracy"].std()}
            for name in _SPREAD:
                row |= {name: spread.loc[name, "mean"], f"{name}_std": spread.loc[name, "std"]}
            rows.append(row | {"layers": " ".join("–" if r.layer is None else str(r.layer) for r in reports)})
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``accuracy.csv``, ``drops.csv``, ``deposit.csv`` and ``summary.csv``, each whole or not at all;
        the paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = {"accuracy": self.accuracy, "drops": self.drops, "deposit": self.deposits(), "summary": self.summary()}
        paths = [folder / f"{name}.csv" for name in tables]
        for path, table in zip(paths, tables.values(), strict=True):
            with whole_file(path) as file:
                file.write(table.to_csv(index=False).encode("utf-8"))
        return paths

    def __repr__(self) -> str:
        shown = ["encoding", "task", "seeds", "accuracy", "drop", "second", "share", "effective_heads", "layers"]
        table = self.summary()[shown].round(3).to_string(index=False)
        return f"DepositStudy of {len(self.reports)} trainings, means over seeds\n{table}"


def _as_columns(key: Key) -> dict[str, Any]:
    return dict(zip(_KEY, key, strict=True))


def deposit_study(
    preset: Preset,
    *,
    encodings: Iterable[str] | None = None,
    tasks: Iterable[str] | None = None,
    seeds: Iterable[int] = (0,),
    samples: int | None = 1000,
    folder: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
    **changed: Any,
) -> DepositStudy:
    """Train position encodings on tasks and measure accuracy and deposit of each training run.

    Trains every encoding on every task from every seed, and measures the test accuracy without each head in turn
    (zeroed, as in [B]).

    Args:
        preset: from ``preset``, or one of your own.
        encodings, tasks, seeds, device, changed: as in ``train_preset``.
        samples: number of test samples (the first ones) on which heads are ablated; None for all. The accuracy table
            uses all.
        folder: save training runs and tables there, the tables after every run; finished runs are not repeated, and
            an interrupted run is resumed.
        progress: show bars.

    Raises:
        ValueError: as ``train_preset``; ``samples`` below 1; a folder in which another study is running.

    Example:
        >>> from dataclasses import replace
        >>> from tl_posdisent.synthetic import deposit_study, preset
        >>> small = preset("small")
        >>> short = replace(small, training=replace(small.training, n_train=1280, n_test=100))
        >>> study = deposit_study(short, encodings=["rope"], tasks=["distance"], progress=False)
        >>> study.reports["rope", "distance", 0].baseline < 0.5  # ten steps are not enough
        True
    """
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be at least 1, or None for all, got {samples}")
    names, chosen = chosen_of(preset, tasks, encodings)
    jobs = list(dict.fromkeys((encoding, task, seed) for seed in seeds for task in names for encoding in chosen))
    if not jobs:
        raise ValueError("encodings, tasks and seeds must name one or more each, got none")
    for encoding, task, _ in jobs:
        preset.config(encoding, task, **changed)  # a mistake in the last must not wait for the first
    accuracy, tables, reports = [], [], {}
    with contextlib.ExitStack() as held:
        if folder is not None:
            held.enter_context(locked(folder, "folder", "study"))
        for encoding, task, seed in jobs:
            runs = train_preset(
                preset,
                encodings=[encoding],
                tasks=[task],
                seeds=[seed],
                folder=None if folder is None else Path(folder) / "trainings",
                device=device,
                progress=progress,
                **changed,
            )
            (run,) = runs.values()
            split = run.split(device)
            drops = head_drops(run.model, split.test_tokens[:samples], split.test_labels[:samples], progress=progress)
            accuracy.append(accuracies(runs))
            tables.append(drops.assign(encoding=encoding, task=task, seed=seed)[[*_KEY, *drops.columns]])
            reports[encoding, task, seed] = deposit(drops)
            study = DepositStudy(
                pd.concat(accuracy, ignore_index=True), pd.concat(tables, ignore_index=True), dict(reports)
            )
            if folder is not None:
                study.save(folder)
    return study
