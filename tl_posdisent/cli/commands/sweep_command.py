"""``tl-posdisent sweep``: one experiment over models, checkpoints and texts, resumed after an interruption."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering, note
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import rows

_INDEX = ("batch", "layer", "head", "distance", "seed")  # numbers that are no measurements


def sweep(
    model: Annotated[
        list[str] | None, typer.Option(metavar="demo|NAME|PATH", help="May be repeated; default demo.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(help="all, or steps such as 0,512,1000-1003 (revisions step0, … of a NAME); default none."),
    ] = None,
    experiment: Annotated[str, typer.Option(help="A public function of model and tokens.")] = "additivity",
    argument: Annotated[
        list[str] | None, typer.Option(metavar="NAME=JSON", help="For the experiment; may be repeated.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="UTF-8 text; may be repeated; default the demo model's.")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens per text.")] = 256,
    texts: o.Texts = 1,
    split: Annotated[int, typer.Option(min=1, help="Number of jobs that the parts of a text are split into.")] = 1,
    seeds: Annotated[str | None, typer.Option(help="Such as 0-4, for experiments that take seeds.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweep; finished jobs are not repeated.")] = (
        Path("out/sweep")
    ),
    table: Annotated[Path | None, typer.Option(help="The whole table: .csv, .parquet, .json or .html.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes on this machine; 0 is this one.")] = 0,
    dask: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of a Dask scheduler, instead.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Repeat failed jobs.")] = False,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    progress: o.Progress = True,
) -> None:
    """Run one experiment over models, checkpoints and texts; an interrupted sweep can be resumed.

    Columns:
      model, checkpoint, step, seed   what was measured
      r, r2 …                         means over texts, layers and heads

    Examples:
      tl-posdisent sweep --length 64 --texts 4 --split 4
      tl-posdisent sweep --model EleutherAI/pythia-70m --checkpoints 0,512,143000
      tl-posdisent sweep --model out/training --checkpoints all --table all.csv
    """
    with answering():
        check_out(table)
        from tl_posdisent.sweeps.jobs import jobs
        from tl_posdisent.sweeps.runner import sweep as do
        from tl_posdisent.sweeps.text_sources import Text

        sources: list[Path | str] = [*text] if text else ["demo"]
        read = [Text.of(source, length=length, count=texts) for source in sources]
        arguments = dict(_argument(given) for given in argument or [])
        todo = jobs(
            [_place(name) for name in model or ["demo"]],
            (experiment, arguments),
            [part for whole in read for part in whole.split(split)],
            checkpoints="all" if checkpoints == "all" else o.whole_numbers("checkpoints", checkpoints),
            seeds=o.whole_numbers("seeds", seeds),
            backend=backend,
            dtype=dtype,
        )
        with _executor(workers, dask) as executor:
            done = do(todo, executor, out=out, retry=retry, device=device, progress=progress)
        save(done, table, f"{experiment} of {len(todo)} jobs")
        note(f"parts: {escape(str(out))} ({done['job'].nunique()} of {len(todo)} jobs)")
        if done.empty:
            raise ValueError(f"all {len(todo)} jobs failed; {out / 'failed'} says why")
    rows(_means(done, arguments), f"{experiment}, means over texts, layers and heads", digits=3)


def _place(name: str) -> str | Path:
    """As the other commands have it: a path is a path when there is something, or when it looks like one."""
    return Path(name) if Path(name).exists() or name.startswith((".", "/")) else name


def _argument(given: str) -> tuple[str, Any]:
    name, sign, value = given.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        if not sign:
            raise ValueError(f"--argument must be NAME=JSON, such as layers=[0,1], got {given!r}") from None
        return name, value  # a word


@contextlib.contextmanager
def _executor(workers: int, dask: str | None) -> Iterator[Any]:
    """Nothing, a pool of processes or a cluster, closed at the end."""
    if dask is not None:
        try:
            from distributed import Client
        except ImportError:
            raise ValueError('--dask needs the extra: python -m pip install "tl-posdisent[dask]"') from None
        with Client(dask) as client:  # type: ignore[no-untyped-call]
            yield client.get_executor()
    elif workers:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            try:
                yield pool
            except RuntimeError as error:  # it lost a process, and what to do is in the message
                raise OSError(str(error)) from error
    else:
        yield None


def _means(done: Any, arguments: Collection[str]) -> Any:
    """One row per model, checkpoint and seed."""
    names = ["model", "checkpoint", "step", "seed"]
    front = [name for name in names if name == "model" or done[name].notna().any()]
    measured = [name for name in done.select_dtypes("number") if name not in (*names, *_INDEX, *arguments)]
    means = done.groupby(front, sort=False)[measured].mean().reset_index()
    return means.assign(model=means["model"].map(lambda name: Path(name).name if Path(name).is_absolute() else name))
