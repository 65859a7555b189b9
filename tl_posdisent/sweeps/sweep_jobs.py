"""Run jobs in a loop or on a dask cluster, and store the result of each in a file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from tl_posdisent.sweeps.jobs import Job, describe_jobs
from tl_posdisent.sweeps.results import Maker, is_finished, join_results, made_by, run_job, write_result
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import check_writable

Outcomes = Generator[tuple[str, bytes | Exception], None, None]
"""The name of each job that ends, and the file of its table or the error that it raised."""


def sweep(jobs: Mapping[str, Job], out: str | Path, client: Any = None, *, progress: bool = True) -> pd.DataFrame:
    """Run the jobs that have no result yet, and return the results of all as one table.

    A result is a file named by its job, written as soon as the job ends, so a sweep that was stopped or killed
    continues if it is called again. Processes that run different jobs may share a folder.

    Args:
        jobs: functions by name, each a function of a module or a ``functools.partial`` of one, that return a
            ``pandas.DataFrame``. Names are those of files. Arguments are numbers, words, paths, None, functions of a
            module, and lists, tuples and dicts of these; the function itself loads its model.
        out: folder of the results, ``NAME.parquet``.
        client: None runs the jobs one after another in this process; a ``dask.distributed.Client`` runs them on its
            workers, which need the modules of the functions, but not ``out``.
        progress: show a progress bar.

    Returns:
        The tables of the jobs, one below the other, in the order of ``jobs``; the first column is ``job``, the name.
        The index of a table becomes columns, unless it is unnamed and counts the rows from 0.
        A table without rows adds only the names of its columns.

    Raises:
        ValueError: before a job runs: jobs, names or arguments other than these; a result in ``out`` that another call,
            other code of the function (its body, a default or a decorator), or another version of this package or of
            Python made; ``out`` cannot be written.
        ExceptionGroup: the errors of jobs, each with a note that names its job, when the other jobs have run; also a
            table that would be another one when it is read again, which the error describes. The other results are
            kept (``read_results``), and the next call runs only what is missing.
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
    calls = describe_jobs(jobs)
    _check_client(client)
    folder = check_writable("out", out, "folder")
    paths = {name: folder / f"{name}.parquet" for name in jobs}
    makers = {name: made_by(calls[name], job) for name, job in jobs.items()}
    todo = {name: (job, makers[name]) for name, job in jobs.items() if not is_finished(paths[name], makers[name])}
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = _run_here(todo) if client is None else _run_on_cluster(todo, client)
    errors: dict[str, Exception] = {}
    bar = tqdm(desc="jobs", total=len(jobs), initial=len(jobs) - len(todo), disable=not progress)
    with bar, contextlib.closing(outcomes):
        for name, outcome in outcomes:
            if isinstance(outcome, Exception):
                errors[name] = outcome
                bar.set_postfix(failed=len(errors))
            else:
                write_result(paths[name], outcome)
            bar.update()
    if errors:
        raise _failure(errors, len(jobs), folder)
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


def _run_here(todo: dict[str, tuple[Job, Maker]]) -> Outcomes:
    """Run jobs one after another in this process."""
    for name, (job, maker) in todo.items():
        try:
            outcome: bytes | Exception = run_job(job, maker)
        except Exception as error:  # noqa: BLE001 - it is raised when the other jobs have run
            _release_locals(error)
            outcome = error
        yield name, outcome


def _release_locals(error: BaseException | None) -> None:
    """Release the variables of the functions through which an error passed: they may hold a model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _run_on_cluster(todo: dict[str, tuple[Job, Maker]], client: Any) -> Outcomes:
    """Run jobs on the workers of a dask cluster, in the order in which they end; if closed, cancel the rest."""
    from distributed import as_completed

    jobs, makers = [job for job, _ in todo.values()], [maker for _, maker in todo.values()]
    names = dict(zip(client.map(run_job, jobs, makers, pure=False), todo, strict=True))
    try:
        for future in as_completed(list(names)):  # a future that nothing holds any more frees its table on the worker
            error = future.exception()
            yield names.pop(future), future.result() if error is None else error
    finally:
        client.cancel(list(names))


def _failure(errors: dict[str, Exception], count: int, folder: Path) -> ExceptionGroup[Exception]:
    """Return the errors of jobs as one, each with a note that names its job."""
    for name, error in errors.items():
        error.add_note(f"in job {name!r} of the sweep in {folder}")
    names = ", ".join(map(repr, list(errors)[:10])) + (" …" if len(errors) > 10 else "")
    message = (
        f"{len(errors)} of {count} jobs failed ({names}); the results of the others are kept in {folder}, and the "
    )
    return ExceptionGroup(message + "same call runs only what is missing", list(errors.values()))
