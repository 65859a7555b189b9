"""Study of the deposit: train encodings × tasks × seeds, ablate each head, and collect the results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from tl_posdisent.hooks.ablate import AblationMode
from tl_posdisent.synthetic.training.presets import Key, Preset, accuracies, chosen_jobs, train_preset
from tl_posdisent.synthetic.training.runs import TrainRun
from tl_posdisent.utils.files import locked, whole_file
from tl_posdisent.utils.validation import check_choice, check_flag, check_integer

from .deposit import DepositReport, deposit, deposit_spread, head_drops
from .sufficiency import By, sufficient_heads

_KEY = ["encoding", "task", "seed"]
_GROUP = ["encoding", "task"]
_SPREAD = ["drop", "second", "share", "effective_heads", "layer"]


@dataclass(frozen=True, eq=False, repr=False)
class DepositStudy:
    """Accuracies, drops and deposits of several training runs.

    Attributes:
        accuracy: one row per training, as ``accuracies`` makes it.
        drops: one row per training, mode of ablation and head: ``encoding``, ``task``, ``seed``, ``mode`` and the
            columns of ``head_drops``.
        reports: (encoding, task, seed) → the training's ``DepositReport``: drops of accuracy in the first mode, with
            the sufficient sets if they were searched for.

    Example:
        >>> from dataclasses import replace
        >>> from tl_posdisent.synthetic import deposit_study, preset
        >>> small = preset("small")
        >>> short = replace(small, training=replace(small.training, n_train=1280, n_test=100))
        >>> study = deposit_study(short, encodings=["rope", "none"], tasks=["count"], progress=False)
        >>> study.drops.shape, study.deposits().shape, study.summary().shape
        ((24, 12), (2, 10), (2, 19))
    """

    accuracy: pd.DataFrame
    drops: pd.DataFrame
    reports: dict[Key, DepositReport]

    def deposits(self, measure: Literal["metric", "loss"] = "metric", mode: AblationMode | None = None) -> pd.DataFrame:
        """One row per training: ``encoding``, ``task``, ``seed`` and the measures of ``DepositReport``; of accuracy or
        of the loss, in a mode of ablation that was measured, by default the first."""
        modes = list(self.drops["mode"].unique())
        mode = modes[0] if mode is None else mode
        check_choice("mode", mode, modes)
        of_mode, rows = self.drops[self.drops["mode"] == mode].set_index(_KEY).sort_index(), []
        for key, report in self.reports.items():
            again = deposit(of_mode.loc[[key]], measure=measure, sufficient=report.sufficient)
            rows.append(again.to_frame().assign(**_as_columns(key)))
        table = pd.concat(rows, ignore_index=True)
        return table[[*_KEY, *table.columns.drop(_KEY)]]

    def sufficient(self) -> pd.DataFrame:
        """One row per training and kind of set: ``encoding``, ``task``, ``seed``, the columns of
        ``SufficientHeads.to_frame`` and ``set``, its heads as ``layer.head``, the most important first."""
        rows = [
            found.to_frame().assign(**_as_columns(key), set=" ".join(f"{n}.{h}" for n, h in found.heads))
            for key, report in self.reports.items()
            for found in report.sufficient
        ]
        table = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=_KEY)
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
            row |= {"loss": table["loss"].mean(), "loss_std": table["loss"].std()}
            for name in _SPREAD:
                row |= {name: spread.loc[name, "mean"], f"{name}_std": spread.loc[name, "std"]}
            rows.append(row | {"layers": " ".join("–" if r.layer is None else str(r.layer) for r in reports)})
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``accuracy.csv``, ``drops.csv``, ``deposit.csv``, ``summary.csv``, and ``sufficient.csv`` where sets
        were searched for, each whole or not at all; the paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tables = {"accuracy": self.accuracy, "drops": self.drops, "deposit": self.deposits(), "summary": self.summary()}
        if any(report.sufficient for report in self.reports.values()):
            tables["sufficient"] = self.sufficient()
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
    seeds: int | Iterable[int] = 1,
    samples: int | None = 1000,
    modes: Sequence[AblationMode] = ("zero",),
    sufficiency: bool = False,
    folder: str | Path | None = None,
    device: str = "cpu",
    progress: bool = True,
    **changed: Any,
) -> DepositStudy:
    """Train position encodings on tasks and measure accuracy and deposit of each training run.

    Accuracy and loss are measured on test samples without each head in turn.

    Args:
        preset: from ``preset``, or one of your own.
        encodings, tasks, seeds, device, changed: as in ``train_preset``.
        samples: number of test samples (the first ones) on which heads are ablated; None for all. The accuracy table
            uses all.
        modes: of ablation, one or more: "zero", "mean", "resample".
        sufficiency: search for small sets of heads that suffice: if only they rotate, where the encoding rotates, and
            if only they attend (``sufficient_heads``).
        folder: save training runs and tables there, the tables after every run; finished runs are not repeated, and
            an interrupted run is resumed.
        progress: show bars.

    Raises:
        ValueError: as ``train_preset``; ``samples`` below 1; modes that do not exist or none; a folder in which
            another study is running.

    Example:
        >>> from dataclasses import replace
        >>> from tl_posdisent.synthetic import deposit_study, preset
        >>> small = preset("small")
        >>> short = replace(small, training=replace(small.training, n_train=1280, n_test=100))
        >>> study = deposit_study(short, encodings=["rope"], tasks=["distance"], progress=False)
        >>> study.reports["rope", "distance", 0].baseline < 0.5  # ten steps are not enough
        True
    """
    if samples is not None:
        check_integer("samples", samples, 1)
    modes = list(modes)
    if not modes:
        raise ValueError("modes must name one or more, got none")
    for mode in modes:
        check_choice("modes", mode, get_args(AblationMode))
    check_flag("sufficiency", sufficiency)
    jobs = chosen_jobs(preset, encodings, tasks, seeds, **changed)
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
            drops, reports[encoding, task, seed] = _measured(run, samples, modes, sufficiency, device, progress)
            accuracy.append(accuracies(runs))
            tables.append(drops.assign(encoding=encoding, task=task, seed=seed)[[*_KEY, *drops.columns]])
            study = DepositStudy(
                pd.concat(accuracy, ignore_index=True), pd.concat(tables, ignore_index=True), dict(reports)
            )
            if folder is not None:
                study.save(folder)
    return study


def _measured(
    run: TrainRun, samples: int | None, modes: Sequence[AblationMode], sufficiency: bool, device: str, progress: bool
) -> tuple[pd.DataFrame, DepositReport]:
    """The drops of all heads in every mode, and the report of the first."""
    split = run.split(device)
    model, tokens, labels = run.model, split.test_tokens[:samples], split.test_labels[:samples]
    tables = [head_drops(model, tokens, labels, mode=mode, progress=progress) for mode in modes]
    kinds: list[By] = []
    if sufficiency:
        kinds = ["rotation", "attention"] if model.encoding.rotates else ["attention"]
    found = [sufficient_heads(model, tokens, labels, by=by) for by in kinds]
    for mode, table in zip(modes, tables, strict=True):
        table.insert(0, "mode", mode)
    return pd.concat(tables, ignore_index=True), deposit(tables[0], sufficient=found)
