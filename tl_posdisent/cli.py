"""The command line: ``tl-posdisent fit --model demo --out table.csv``."""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FORMATS = (".csv", ".json", ".parquet")
_HEADS_SHOWN = 12

app = typer.Typer(help="Position and content in attention.", no_args_is_help=True, add_completion=True)


@app.callback()
def main() -> None:
    """Is this head looking at where or at what?"""


@app.command()
def fit(
    model: Annotated[str, typer.Option(help="demo, a model name of TransformerLens, or a directory.")] = "demo",
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; the demo model brings its own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the table goes: .csv, .json or .parquet.")] = None,
    backend: Annotated[str, typer.Option(help="auto, hooked or bridge.")] = "auto",
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per text; default the context, 512 at most.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Consecutive stretches of the text to fit.")] = 1,
    layers: Annotated[str | None, typer.Option(help="Such as 0,3,5; default all.")] = None,
    pool: Annotated[bool, typer.Option(help="One distance profile for all texts.")] = False,
    control: Annotated[int, typer.Option(min=0, help="Random initialisations to set beside it.")] = 1,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
) -> None:
    """How additive are a model's attention scores? r per layer and head, against random initialisation.

    Examples: tl-posdisent fit  ·  tl-posdisent fit --model EleutherAI/pythia-70m --text book.txt --out r.csv
    """
    try:
        _check_out(out)
        loaded, tokens = _load(model, text, backend, length, texts)
        table = _measure(loaded, tokens, _layers(layers), pool, control, progress)
        if out is not None:
            _save(table, out)
    except (ValueError, OSError) as error:
        raise _refused(error) from error
    _show(table, f"{model}, {tokens.shape[0]} × {tokens.shape[1]} tokens")
    if out is not None:
        Console().print(f"table: {escape(str(out))} ({len(table)} rows)", soft_wrap=True)


@app.command()
def synthetic(
    preset: Annotated[str, typer.Option(help="small (a laptop, minutes) or paper (a GPU, hours).")] = "small",
    encoding: Annotated[list[str] | None, typer.Option(help="rope, alibi, …; may be repeated; default all.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="distance or count; may be repeated; default both.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each, from seeds 0, 1, …")] = 1,
    rotary_heads: Annotated[
        int | None, typer.Option(min=0, help="RoPE on the first so many heads of each layer; default all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and trainings; what is there already is taken up.")] = (
        Path("out/synthetic")
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
) -> None:
    """Train small models with several position encodings, and see which heads their skill is deposited in.

    Examples: tl-posdisent synthetic  ·  tl-posdisent synthetic --encoding rope --task distance --seeds 3 --out out/rope
    """
    from tl_posdisent.synthetic.presets import preset as named
    from tl_posdisent.synthetic.study import deposit_study

    changed = {} if rotary_heads is None else {"rotary_heads": rotary_heads}
    try:
        study = deposit_study(
            named(preset),  # type: ignore[arg-type]
            encodings=encoding or None,
            tasks=task or None,
            seeds=range(seeds),
            folder=out,
            device=device,
            progress=progress,
            **changed,
        )
        _save_maps(study, out / "heads.html")
    except (ValueError, OSError, RuntimeError) as error:
        raise _refused(error) from error
    _show_study(study, f"{preset} preset, {seeds} seed{'s' if seeds > 1 else ''}")
    Console().print(f"tables and heat maps: {escape(str(out))}", soft_wrap=True)


def _refused(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
    return typer.Exit(2)


def _save_maps(study: Any, path: Path) -> None:
    """One page with a heat map for each encoding and task: the drop of accuracy with each head, mean over seeds."""
    from tl_posdisent.show.plots.heat import plot_heads

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
    path.write_text(f"{head}<body>{''.join(page)}</body></html>\n", encoding="utf-8")


def _show_study(study: Any, title: str) -> None:
    """A row for each encoding and task, means over seeds with the spread."""
    grid = Table(title=f"what single heads are worth: {escape(title)}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    measures = {"accuracy": "accuracy", "drop": "largest drop", "second": "second", "share": "share"}
    measures |= {"effective_heads": "effective heads"}
    for name in ("task", "encoding", "chance", *measures.values(), "layer"):
        grid.add_column(name, justify="left" if name in ("task", "encoding", "layer") else "right", no_wrap=True)
    for _, row in study.summary().sort_values("task", kind="stable").iterrows():
        cells = [_with_spread(row[name], row[f"{name}_std"]) for name in measures]
        grid.add_row(row["task"], row["encoding"], f"{row['chance']:.3f}", *cells, row["layers"])
    Console().print(grid)


def _with_spread(mean: float, std: float) -> str:
    text = "–" if math.isnan(mean) else f"{mean:.2f}"
    return text if math.isnan(std) else f"{text} ± {std:.2f}"


def _load(model: str, text: Path | None, backend: str, length: int | None, texts: int) -> tuple[Any, Any]:
    import torch

    from tl_posdisent.demo.load import demo_text, load_demo_model
    from tl_posdisent.lens.loading import check_backend, load_model

    check_backend(backend)
    if text is None and model != "demo":
        raise ValueError("--text is needed: only the demo model brings its own")
    words = demo_text() if text is None else text.read_text(encoding="utf-8")
    load = load_demo_model if model == "demo" else partial(load_model, model)
    loaded: Any = load(backend=backend)  # type: ignore[arg-type]
    if getattr(loaded, "tokenizer", None) is None:
        raise ValueError(f"{model} has no tokenizer, so it cannot read text")
    length = length or min(loaded.cfg.n_ctx, 512)
    begin = loaded.to_tokens("")[0] if loaded.to_tokens("").numel() else None  # the token that begins every text
    ids = loaded.to_tokens(words, truncate=False)[0]
    start = 0 if begin is None else len(begin)
    body = length - start
    if (len(ids) - start) < texts * body:
        raise ValueError(f"the text has {len(ids)} tokens, too few for {texts} stretches of {length}")
    rows = ids[start : start + texts * body].reshape(texts, body)
    return loaded, rows if begin is None else torch.cat([begin.expand(texts, -1).to(rows), rows], 1)


def _measure(model: Any, tokens: Any, layers: list[int] | None, pool: bool, control: int, progress: bool) -> Any:
    import pandas as pd

    from tl_posdisent.experiments.additivity import additivity
    from tl_posdisent.lens.control import random_control

    tables = [additivity(model, tokens, layers=layers, pool=pool, progress=progress).assign(weights="trained")]
    if control:
        for seed, fresh in enumerate(random_control(model, range(control))):
            table = additivity(fresh, tokens, layers=layers, pool=pool, progress=progress)
            tables.append(table.assign(weights=f"random {seed}"))
    return pd.concat(tables, ignore_index=True)


def _check_out(out: Path | None) -> None:
    """Before the work, not after it."""
    if out is not None and out.suffix not in _FORMATS:
        raise ValueError(f"--out must end in {', '.join(_FORMATS)}, got {out.name!r}")
    if out is not None and out.suffix == ".parquet" and not any(map(find_spec, ("pyarrow", "fastparquet"))):
        raise ValueError("--out ends in .parquet, which needs pyarrow or fastparquet; neither is installed")


def _save(table: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".json":
        table.to_json(out, orient="records")
    elif out.suffix == ".parquet":
        table.to_parquet(out, index=False)
    else:
        table.to_csv(out, index=False)


def _layers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(x) for x in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--layers must be numbers with commas between, got {text!r}") from error


def _show(table: Any, title: str) -> None:
    """Mean r per layer (and head, where they fit the screen), then the headline."""
    import pandas as pd

    console = Console()
    trained, chance = table[table["weights"] == "trained"], table[table["weights"] != "trained"]
    by_head = trained.pivot_table(values="r", index="layer", columns="head", aggfunc="mean")
    shown = by_head
    if len(by_head.columns) > _HEADS_SHOWN:
        shown = pd.DataFrame({"lowest": by_head.min(axis=1), "highest": by_head.max(axis=1)})
    grid = Table(
        title=f"r of the three-axis fit, by layer and head: {escape(title)}", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for name in ("layer", *map(str, shown.columns), "mean", "random"):
        grid.add_column(name, justify="right", no_wrap=True)
    for layer, row in by_head.iterrows():
        cells = [*shown.loc[layer], row.mean(), chance.loc[chance["layer"] == layer, "r"].mean()]
        grid.add_row(str(layer), *("–" if math.isnan(x) else f"{x:.2f}" for x in cells))
    console.print(grid)
    r = trained["r"]
    line = f"mean r {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over {by_head.size} heads"
    if len(chance):
        line += f"; at random initialisation {chance['r'].mean():.3f}"
    shares = ", ".join(f"{name} {trained[f'share_{name}'].mean():.3f}" for name in ("distance", "query", "key"))
    console.print(f"{line}\nshare of the variance that each part explains alone: {shares}", soft_wrap=True)
