"""Run jobs in a loop or on a dask cluster, and store the result of each in a file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from tqdm.auto import tqdm

from tl_posdisent.sweeps.jobs import Job, check_jobs
from tl_posdisent.sweeps.results import is_finished, join_results, result_path, run_job, write_result
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import check_writable

Outcome = tuple[str, pa.Table | Exception]
"""A job's name, and its table or the error that it raised."""


def sweep(jobs: Mapping[str, Job], out: str | Path, client: Any = None, *, progress: bool = True) -> pd.DataFrame:
    """Run the jobs that have no result yet, and return the results of all as one table.

    Each result is a file named by its job, written as soon as the job ends, so a sweep that was stopped or killed
    continues if it is called again. Several processes may run different jobs in one folder at the same time.

    Args:
        jobs: functions by name, each a function of a module or a ``functools.partial`` of one, that return a
            ``pandas.DataFrame``. Names are those of files. Arguments are numbers, words, paths, None, functions of a
            module, and lists, tuples and dicts of these: the function loads its model.
        out: folder of the results, ``NAME.parquet``.
        client: None runs the jobs one after another in this process; a ``dask.distributed.Client`` runs them on its
            workers. They need the modules of the functions, but not ``out``.
        progress: show a progress bar.

    Returns:
        The tables of the jobs, one below the other, in the order of ``jobs``; the first column is ``job``, the name.
        The index of a table becomes columns, unless it only counts rows.

    Raises:
        ValueError: jobs, names or arguments as above, before one of them runs; a result in ``out`` that another call
            or another version of this package made; ``out`` cannot be written.
        ExceptionGroup: jobs raised errors; each has a note with the job's name. The others have run: their results
            are kept (``read_results``), and the next call runs those that failed.
        OSError: a result cannot be written (a full disk). Earlier results are kept.

    Example:
        >>> import tempfile
        >>> from functools import partial
        >>> import tl_posdisent as tp
        >>> from tl_posdisent.sweeps import sweep
        >>> def measure(length, layers):
        ...     tokens = tp.demo_tokens(length=length)
        ...     return tp.additivity(tp.load_demo_model(), tokens, layers=layers, progress=False)
        >>> jobs = {f"{length} tokens": partial(measure, length, layers=[4]) for length in (32, 64)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sweep(jobs, folder, progress=False)
        >>> table.groupby("job", sort=False)["r"].count().to_dict()
        {'32 tokens': 8, '64 tokens': 8}
    """
    calls = check_jobs(jobs)
    _check_client(client)
    folder = check_writable("out", out, "folder")
    paths = {name: result_path(folder, name) for name in jobs}
    todo = {name: (jobs[name], calls[name]) for name in jobs if not is_finished(paths[name], name, calls[name])}
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = _run_here(todo) if client is None else _run_on_cluster(todo, client)
    errors: dict[str, Exception] = {}
    counted = {"total": len(jobs), "initial": len(jobs) - len(todo)}
    with contextlib.closing(outcomes), tqdm(desc="jobs", disable=not progress, **counted) as bar:
        for name, outcome in outcomes:
            if isinstance(outcome, Exception):
                errors[name] = outcome
                bar.set_postfix(failed=len(errors))
            else:
                write_result(paths[name], outcome)
            bar.update()
    _raise_errors(errors, len(jobs), folder)
    return join_results(paths.values())


def _check_client(client: Any) -> None:
    """Raise unless the client is None or one of dask that waits for its results."""
    if client is None:
        return
    with contextlib.suppress(ImportError):
        from distributed import Client

        if isinstance(client, Client) and not client.asynchronous:
            return
    raise ArgumentError(
        "client",
        f"must be None or a synchronous dask.distributed.Client, got {type(client).__name__}: for processes of this "
        "machine, Client(LocalCluster(n_workers=2, threads_per_worker=1))",
    )


def _run_here(todo: dict[str, tuple[Job, str]]) -> Iterator[Outcome]:
    """Run jobs one after another."""
    for name, (job, call) in todo.items():
        try:
            outcome = run_job(job, call)
        except Exception as error:  # noqa: BLE001 - it is raised when the other jobs have run
            _release_locals(error)
            outcome = error
        yield name, outcome


def _release_locals(error: BaseException | None) -> None:
    """Release the variables of the functions through which an error passed: they may hold a model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _run_on_cluster(todo: dict[str, tuple[Job, str]], client: Any) -> Iterator[Outcome]:
    """Run jobs on the workers of a dask cluster, and yield them as they end; cancel the rest if this one is closed."""
    from distributed import as_completed

    futures = client.map(run_job, *zip(*todo.values(), strict=True), pure=False) if todo else []
    names = dict(zip(futures, todo, strict=True))
    try:
        for future in as_completed(futures):
            error = future.exception()
            yield names.pop(future), future.result() if error is None else error
    finally:
        client.cancel(list(names))


def _raise_errors(errors: dict[str, Exception], count: int, folder: Path) -> None:
    """Raise the errors of jobs together, each with a note that names its job."""
    if not errors:
        return
    for name, error in errors.items():
        error.add_note(f"in job {name!r} of the sweep in {folder}")
    names = ", ".join(map(repr, list(errors)[:10])) + (" …" if len(errors) > 10 else "")
    raise ExceptionGroup(
        f"{len(errors)} of {count} jobs failed ({names}); the results of the others are kept in {folder}, and the "
        "same call runs only what is missing",
        list(errors.values()),
    )
