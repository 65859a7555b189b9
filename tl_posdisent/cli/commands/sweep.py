"""``tl-posdisent sweep``: one experiment over models, checkpoints and texts, resumed after an interruption."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tl_posdisent.cli.inputs import check_name
from tl_posdisent.cli.options import MOST, Backend, Dtype, Progress, Settings, Texts
from tl_posdisent.cli.output import answering, check_out, frame, note, one_line, save, show
from tl_posdisent.cli.process import limit_threads, settle
from tl_posdisent.cli.values import checkpoint_steps, part_numbers, whole_numbers
from tl_posdisent.cli.values import settings as parsed
from tl_posdisent.utils.files import check_writable, found_at

_INDEX = ("batch", "layer", "head", "distance", "seed")  # numbers that are not measurements


def sweep(
    model: Annotated[list[str] | None, Option(metavar="demo|NAME|PATH", help="May be repeated; default demo.")] = None,
    checkpoints: Annotated[
        str | None, Option(help="all, or steps such as 0,512,1000-1003 (revisions step0, … of a NAME); default none.")
    ] = None,
    experiment: Annotated[str, Option(help="A name that 'run' lists.")] = "additivity",
    settings: Settings = None,
    text: Annotated[
        list[Path] | None, Option(metavar="demo|FILE", help="UTF-8 text; may be repeated; default the demo text.")
    ] = None,
    length: Annotated[int, Option(min=2, max=MOST, help="Tokens per text.")] = 256,
    texts: Texts = 1,
    split: Annotated[int, Option(min=1, max=MOST, help="Number of jobs into which the parts of a text are split.")] = 1,
    seeds: Annotated[str | None, Option(help="Seeds: 0-4 are five, 2 is seed 2 alone.")] = None,
    backend: Backend = "auto",
    device: Annotated[
        str | None, Option(help="As for fit, or worker: each worker process has a visible device of its own.")
    ] = None,
    dtype: Dtype = "float32",
    out: Annotated[Path, Option(help="Folder of the sweep; finished jobs are not repeated.")] = Path("out/sweep"),
    table: Annotated[Path | None, Option(help="File for the whole table: .csv, .parquet or .json.")] = None,
    workers: Annotated[
        int, Option(min=0, max=MOST, help="Number of worker processes on this machine; 0 runs in this process.")
    ] = 0,
    retry: Annotated[bool, Option("--retry", help="Repeat failed jobs.")] = False,
    part: Annotated[
        str | None, Option(metavar="I/N", help="Run the I-th of N parts of the jobs only, as one task of a job array.")
    ] = None,
    progress: Progress = True,
) -> None:
    """Run one experiment over models, checkpoints and texts; an interrupted sweep can be resumed.

    Columns:
      model, checkpoint, step, seed   model and seed of a row
      r, r2 …                         means over texts, layers and heads

    Examples:
      tl-posdisent sweep --length 64 --texts 4 --split 4
      tl-posdisent sweep --model EleutherAI/pythia-70m --checkpoints 0,512,143000
      tl-posdisent sweep --model out/training --checkpoints all --table all.csv
    """
    with answering(locals()):
        for name in model or ():
            check_name(name)
        check_out(table, option="table")
        check_writable("out", out, "folder")
        share = part_numbers(part)
        arguments, drawn = parsed(settings), whole_numbers("seeds", seeds)
        steps = checkpoint_steps(checkpoints)
        from tl_posdisent.sweeps.jobs import jobs
        from tl_posdisent.sweeps.runner import sweep as run
        from tl_posdisent.sweeps.sources import Text

        sources: list[Path | str] = ["demo" if str(path) == "demo" else path for path in text or [Path("demo")]]
        todo = jobs(  # as in the other commands, a model is a path if it exists or begins like one
            [Path(name) if found_at(name) or name.startswith((".", "/")) else name for name in model or ["demo"]],
            (experiment, arguments),
            [part for source in sources for part in Text.of(source, length=length, count=texts).split(split)],
            checkpoints=steps,
            seeds=drawn,
            backend=backend,
            dtype=dtype,
        )
        settle()
        if set(model or ["demo"]) == {"demo"}:
            limit_threads(1)
        with _executor(workers) as executor, warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ of \d+ jobs failed")  # said below, in words for a shell
            done = run(todo, executor, out=out, retry=retry, part=share, device=device, progress=progress)
        failed, finished = done.attrs["failed"], done["job"].nunique()
        if done.empty:
            raise ValueError(f"all {len(failed)} jobs failed, the first with: {_failure(out, failed[0])}")
        save(done, table)
        note(f"parts: {out} ({finished} of {finished + len(failed)} jobs)")
        if failed:
            reasons = f"{out / 'failed'} has the reasons, and --retry repeats them"
            warnings.warn(f"{len(failed)} of {finished + len(failed)} jobs failed: {reasons}", stacklevel=2)
        lines = frame(_means(done, arguments), f"{experiment}, means over texts, layers and heads")
    show(lines)


def _failure(out: Path, job: str) -> str:
    from tl_posdisent.sweeps.runner import failures

    return (
        f"{one_line(ValueError(failures(out).set_index('job').loc[job, 'message']), ())} (all errors: {out / 'failed'})"
    )


@contextlib.contextmanager
def _executor(workers: int) -> Iterator[Any]:
    """Yield None, or a pool of processes that is closed at the end."""
    if not workers:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import torch

    threads = torch.get_num_threads() // workers  # of each, or all of them would use every core
    with ProcessPoolExecutor(workers, get_context("spawn"), limit_threads, (threads,)) as pool:
        try:
            yield pool
        except RuntimeError as error:  # the pool lost a process
            raise OSError(str(error)) from error


def _means(done: Any, arguments: Collection[str]) -> Any:
    """Average measurements: one row per model, checkpoint and seed."""
    names = ["model", "checkpoint", "step", "seed"]
    front = [name for name in names if name == "model" or done[name].notna().any()]
    measured = [name for name in done.select_dtypes("number") if name not in (*names, *_INDEX, *arguments)]
    means = done.groupby(front, sort=False)[measured].mean().reset_index()
    return means.assign(model=means["model"].map(lambda name: Path(name).name if Path(name).is_absolute() else name))
