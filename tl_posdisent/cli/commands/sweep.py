"""``tl-posdisent sweep``: one experiment over models, checkpoints and texts, resumed after an interruption."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from typer import Option

from tl_posdisent.cli.options import Given, check_model, command, whole_numbers
from tl_posdisent.cli.output import check_out, frame, note, one_line, save
from tl_posdisent.cli.process import limit_threads, settle
from tl_posdisent.utils.files import check_writable, found_at

_INDEX = ("batch", "layer", "head", "distance", "seed")  # numbers that are not measurements


@command("backend device dtype texts progress")
def sweep(
    given: Given,
    model: list[str] | None = Option(None, metavar="demo|NAME|PATH", help="May be repeated; default demo."),
    checkpoints: str | None = Option(
        None, help="all, or steps such as 0,512,1000-1003 (revisions step0, … of a NAME); default none."
    ),
    experiment: str = Option("additivity", help="A public function of model and tokens."),
    argument: list[str] | None = Option(None, metavar="NAME=JSON", help="Argument of the experiment; may be repeated."),
    text: list[Path] | None = Option(None, metavar="FILE", help="UTF-8 text; may be repeated; default the demo text."),
    length: int = Option(256, min=2, help="Tokens per text."),
    split: int = Option(1, min=1, help="Number of jobs into which the parts of a text are split."),
    seeds: str | None = Option(None, help="Such as 0-4, for experiments that take seeds."),
    out: Path = Option(Path("out/sweep"), help="Folder of the sweep; finished jobs are not repeated."),
    table: Path | None = Option(None, help="File for the whole table: .csv, .parquet or .json."),
    workers: int = Option(0, min=0, help="Number of worker processes on this machine; 0 runs in this process."),
    retry: bool = Option(False, "--retry", help="Repeat failed jobs."),
) -> list[str]:
    """Run one experiment over models, checkpoints and texts; an interrupted sweep can be resumed.

    Columns:
      model, checkpoint, step, seed   model and seed of a row
      r, r2 …                         means over texts, layers and heads

    Examples:
      tl-posdisent sweep --length 64 --texts 4 --split 4
      tl-posdisent sweep --model EleutherAI/pythia-70m --checkpoints 0,512,143000
      tl-posdisent sweep --model out/training --checkpoints all --table all.csv
    """
    for name in model or ():
        check_model(name)
    check_out(table, option="table")
    check_writable("out", out, "folder")
    from tl_posdisent.sweeps.jobs import jobs
    from tl_posdisent.sweeps.runner import failures
    from tl_posdisent.sweeps.runner import sweep as run
    from tl_posdisent.sweeps.sources import Text

    sources: list[Path | str] = [*text] if text else ["demo"]
    arguments = dict(_argument(x) for x in argument or [])
    todo = jobs(  # as in the other commands, a model is a path if it exists or begins like one
        [Path(name) if found_at(name) or name.startswith((".", "/")) else name for name in model or ["demo"]],
        (experiment, arguments),
        [part for source in sources for part in Text.of(source, length=length, count=given.texts).split(split)],
        checkpoints="all" if checkpoints == "all" else whole_numbers("checkpoints", checkpoints),
        seeds=whole_numbers("seeds", seeds),
        backend=given.backend,
        dtype=given.dtype,
    )
    settle()
    if set(model or ["demo"]) == {"demo"}:
        limit_threads(1)
    with _executor(workers) as executor:
        done = run(todo, executor, out=out, retry=retry, device=given.device, progress=given.progress)
    save(done, table)
    note(f"parts: {out} ({done['job'].nunique()} of {len(todo)} jobs)")
    if done.empty:
        reason = one_line(ValueError(failures(out)["message"].iloc[0]), ())
        raise ValueError(f"all {len(todo)} jobs failed, the first with: {reason} (all errors: {out / 'failed'})")
    return frame(_means(done, arguments), f"{experiment}, means over texts, layers and heads", digits=3)


def _argument(given: str) -> tuple[str, Any]:
    name, sign, value = given.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        if not sign:
            raise ValueError(f"--argument must be NAME=JSON, such as layers=[0,1], got {given!r}") from None
        return name, value  # a string without quotes
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists in lists in lists …
        raise ValueError(f"--argument {name} cannot be read: {error}") from error


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
