"""``tl-posdisent synthetic``: train small models, and measure the positional deposit in their heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from tl_posdisent.cli.options import MOST, Progress
from tl_posdisent.cli.output import answering, grid, number, save, show
from tl_posdisent.cli.process import settle
from tl_posdisent.cli.values import whole_numbers
from tl_posdisent.utils.files import check_writable
from tl_posdisent.utils.words import plural

_SAMPLES = 1000  # number of test samples on which heads are ablated


def synthetic(
    preset: Annotated[
        Literal["small", "medium", "paper"],
        Option(help="small: minutes on a CPU; medium: an hour on a CPU; paper: hours on a GPU."),
    ] = "small",
    encoding: Annotated[list[str] | None, Option(help="rope, alibi, …; may be repeated; default all.")] = None,
    task: Annotated[
        list[str] | None,
        Option(help="distance, count, reversal, balanced, depth (medium: gap8, …); repeatable; default all."),
    ] = None,
    seeds: Annotated[str, Option(help="Seeds of the training runs of each: 0-4 are five, 2 is seed 2 alone.")] = "0",
    rotary_heads: Annotated[
        int | None,
        Option(min=0, max=MOST, help="Number of heads per layer with RoPE (the first ones); default all."),
    ] = None,
    out: Annotated[Path, Option(help="Folder for tables and training runs; existing runs are resumed.")] = Path(
        "out/synthetic"
    ),
    device: Annotated[str, Option(help="cpu, cuda, …")] = "cpu",
    progress: Progress = True,
) -> None:
    """Train small models with several position encodings, and measure how their accuracy depends on single heads.

    Columns:
      task, encoding    task and position encoding
      chance, accuracy  accuracy of guessing, and of the model on test samples
      largest drop      largest drop of accuracy without one head
      second            second largest drop
      share             share of the largest drop in the sum of drops
      effective heads   1 if one head has the whole drop (exp of entropy)
      layer             layer of the largest drop, seed by seed

    Examples:
      tl-posdisent synthetic
      tl-posdisent synthetic --encoding rope --task distance --seeds 0-2
    """
    with answering(locals()):
        check_writable("out", out, "folder")
        from tl_posdisent.models.loading.load import check_device
        from tl_posdisent.synthetic.training import presets

        check_device(device)
        drawn = whole_numbers("seeds", seeds) or [0]
        settle()
        changed: dict[str, Any] = {} if rotary_heads is None else {"rotary_heads": rotary_heads}
        runs = presets.train_preset(
            presets.preset(preset),
            encodings=encoding or None,
            tasks=task or None,
            seeds=drawn,
            folder=out / "trainings",
            device=device,
            progress=progress,
            **changed,
        )
        tables = _measured(runs, device, progress)
        for name, table in tables.items():
            save(table, out / f"{name}.csv")
        lines = _shown(tables["deposit"], f"effect of single heads: {preset} preset, {plural(len(drawn), 'seed')}")
    show(lines)


def _measured(runs: Any, device: str, progress: bool) -> dict[str, Any]:
    """Measure the drop of accuracy without each head on the first test samples, and each run's accuracy and deposit."""
    import pandas as pd

    from tl_posdisent.synthetic.analysis.deposit import deposit
    from tl_posdisent.synthetic.analysis.head_drops import head_drops
    from tl_posdisent.synthetic.training.presets import accuracies

    drops, rows = [], []
    for (encoding, task, seed), run in runs.items():
        split, key = run.split(device), {"encoding": encoding, "task": task, "seed": seed}
        samples = split.test_tokens[:_SAMPLES], split.test_labels[:_SAMPLES]
        table = head_drops(run.model, *samples, progress=progress)
        drops.append(table.assign(**key)[[*key, *table.columns]])
        rows.append(deposit(table).to_frame().assign(**key))
    deposits = accuracies(runs).merge(pd.concat(rows), on=["encoding", "task", "seed"])
    return {"drops": pd.concat(drops), "deposit": deposits}


def _shown(deposits: Any, title: str) -> list[str]:
    """Format one row per encoding and task: means over seeds with the standard deviation."""
    measures = {"accuracy": "accuracy", "drop": "largest drop", "second": "second", "share": "share"}
    measures |= {"effective_heads": "effective heads"}
    rows = []
    for (encoding, task), of in deposits.groupby(["encoding", "task"], sort=False):
        cells = [_mean(of[name]) for name in measures]
        layers = " ".join(of["layer"].astype("string").fillna("–"))
        rows.append([task, encoding, number(float(of["chance"].iloc[0]), 3), *cells, layers])
    rows.sort(key=lambda row: str(row[0]))
    columns = {"task": False, "encoding": False, "chance": True} | dict.fromkeys(measures.values(), True)
    return grid(title, columns | {"layer": False}, rows)


def _mean(values: Any) -> str:
    """Format the mean over seeds and, with two or more, the standard deviation."""
    return number(float(values.mean())) + (f" ± {values.std():.2f}" if len(values) > 1 else "")
