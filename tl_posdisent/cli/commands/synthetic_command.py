"""``tl-posdisent synthetic``: small models, trained from scratch, and the deposit of position in their heads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering, note
from tl_posdisent.cli.inputs import device_of
from tl_posdisent.cli.screen import grid, number, screen
from tl_posdisent.utils.files import whole_file


def synthetic(
    preset: Annotated[
        Literal["small", "medium", "paper"], typer.Option(help="Minutes on a CPU, an hour on a CPU, or hours on a GPU.")
    ] = "small",
    encoding: Annotated[list[str] | None, typer.Option(help="rope, alibi, …; may be repeated; default all.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="distance or count (medium: gap8, gap16, …); may be repeated; default all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each, from --seed on.")] = 1,
    seed: o.Seed = 0,
    rotary_heads: Annotated[
        int | None, typer.Option(min=0, help="Number of heads with RoPE in each layer (the first ones); default all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and training runs; existing runs are resumed.")] = (
        Path("out/synthetic")
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    progress: o.Progress = True,
) -> None:
    """Train small models with several position encodings, and measure how their accuracy depends on single heads.

    Columns:
      task, encoding    task and position encoding
      chance, accuracy  of guessing, and of the model on test samples
      largest drop      of accuracy without one head; second: without the next one
      share             of the largest drop in all drops
      effective heads   1 if one head has the whole drop (exp of entropy)
      layer             of the largest drop, seed by seed

    Examples:
      tl-posdisent synthetic
      tl-posdisent synthetic --encoding rope --task distance --seeds 3
    """
    changed: dict[str, Any] = {} if rotary_heads is None else {"rotary_heads": rotary_heads}
    with answering():
        device_of(device)
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out must be a folder, but {out} is a file")
        from tl_posdisent.synthetic.analysis.deposit_study import deposit_study
        from tl_posdisent.synthetic.training.presets import preset as named

        study = deposit_study(
            named(preset),
            encodings=encoding or None,
            tasks=task or None,
            seeds=range(seed, seed + seeds),
            folder=out,
            device=device,
            progress=progress,
            **changed,
        )
        with whole_file(out / "heads.html") as file:
            file.write(_maps(study).encode("utf-8"))
        note(f"tables and heat maps: {escape(str(out))}")
    _show_study(study, f"{preset} preset, {seeds} seed{'s' if seeds > 1 else ''}")


def _maps(study: Any) -> str:
    """One page with a heat map for each encoding and task: the drop of accuracy with each head, mean over seeds."""
    from tl_posdisent.viz.plots.heatmaps import plot_heads

    page: list[str] = []
    for (encoding, task), table in study.drops.groupby(["encoding", "task"], sort=False):
        heads = table.assign(drop=-table["effect"]).groupby(["layer", "head"], as_index=False)["drop"].mean()
        figure = plot_heads(heads, "drop", signed=True, limits=(-1.0, 1.0)).update_layout(
            title=f"{encoding}, {task}: accuracy lost with each head", height=360, width=640
        )
        page.append(figure.to_html(full_html=False, include_plotlyjs=not page))  # the library once, inside the page
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What single heads are worth</title></head>'
    )
    return f"{head}<body>{''.join(page)}</body></html>\n"


def _show_study(study: Any, title: str) -> None:
    """A row for each encoding and task, means over seeds with the spread."""
    measures = {"accuracy": "accuracy", "drop": "largest drop", "second": "second", "share": "share"}
    measures |= {"effective_heads": "effective heads"}
    words = ("task", "encoding", "layer")
    names = ("task", "encoding", "chance", *measures.values(), "layer")
    shown = grid(f"what single heads are worth: {title}", {name: name not in words for name in names})
    for _, row in study.summary().sort_values("task", kind="stable").iterrows():
        cells = [_with_spread(row[name], row[f"{name}_std"]) for name in measures]
        shown.add_row(row["task"], row["encoding"], number(float(row["chance"]), 3), *cells, row["layers"])
    screen().print(shown)


def _with_spread(mean: float, std: float) -> str:
    return number(float(mean)) + ("" if math.isnan(std) else f" ± {std:.2f}")
