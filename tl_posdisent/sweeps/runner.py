"""Run jobs in this process or with an executor, store each result in a file, and resume an interrupted sweep."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import json
import math
import os
import threading
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm.auto import tqdm

from tl_posdisent.sweeps.devices import own_device, release_device
from tl_posdisent.sweeps.jobs import Job, run_experiment
from tl_posdisent.sweeps.sources import Text, load
from tl_posdisent.sweeps.versions import installed_versions
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import KEPT, UNFINISHED, locked, whole_file
from tl_posdisent.utils.validation import check_integer, shown

_KEY = b"tl_posdisent"
_FAILURE = ["job", "model", "checkpoint", "text", "experiment", "arguments", "seed"]
_FAILURE += ["error", "message", "traceback", "versions"]


def failures(out: str | Path) -> pd.DataFrame:
    """List the failed jobs of a sweep with their errors.

    Args:
        out: the sweep's folder.

    Returns:
        One row per failed job: ``job`` (its hash), ``model``, ``checkpoint``, ``text``, ``experiment``, ``arguments``,
        ``seed``, ``error`` (the exception's name), ``message``, ``traceback``; ``versions``, as in ``Job``.

    Raises:
        ValueError: no such folder; a damaged file in it.

    Example:
        >>> import tempfile
        >>> from tl_posdisent.sweeps import failures
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(failures(folder))
        0
    """
    folder = _folder(out)
    if not folder.is_dir():
        raise ArgumentError("out", f"must be the folder of a sweep, got {shown(folder)}")
    rows = []
    for path in sorted(Path(folder, "failed").glob("*.json")):
        try:
            row = json.loads(path.read_bytes())
            rows.append([row[name] for name in _FAILURE])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ArgumentError(
                "out",
                f"must be the folder of a sweep, but {path} in it is damaged ({type(error).__name__}: {error}); "
                "delete that file, and call sweep(..., retry=True) to repeat its job",
            ) from error
    return pd.DataFrame(rows, columns=_FAILURE)


def _folder(out: Any) -> Path:
    if not isinstance(out, (str, os.PathLike)):
        raise ArgumentError("out", f"must be the path of a folder, got {shown(out)}")
    return Path(out)


def prepare(out: Path, jobs: list[Job]) -> None:
    """Create the folders, and delete unfinished files of these jobs that killed processes have left.

    Call it while holding the lock: other parts may be writing theirs.
    """
    mine = {job.hash[:KEPT] for job in jobs}
    for folder in (Path(out, "parts"), Path(out, "failed")):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f".*{UNFINISHED}"):
            if path.name[1 : KEPT + 1] in mine:
                path.unlink(missing_ok=True)


def part_of(out: Path, job: Job) -> Path:
    return Path(out, "parts", f"{job.hash}.parquet")


def failure_of(out: Path, job: Job) -> Path:
    return Path(out, "failed", f"{job.hash}.json")


def unfinished(out: Path, jobs: list[Job], retry: bool = False) -> list[Job]:
    """Return the jobs without a complete table and (unless ``retry``) without an error."""
    return [job for job in jobs if (retry or not failure_of(out, job).is_file()) and read_part(out, job) is None]


def read_part(out: Path, job: Job) -> pd.DataFrame | None:
    """Read the job's table; return None if it is missing or damaged (cut short, altered, or of another job)."""
    path = part_of(out, job)
    if not path.is_file():
        return None
    try:
        arrow = pq.read_table(path, page_checksum_verification=True)
        about = json.loads((arrow.schema.metadata or {})[_KEY])
        return arrow.to_pandas() if about["hash"] == job.hash else None
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


def finished_before(out: Path, jobs: list[Job]) -> dict[str, int]:
    """Count the jobs that were finished with other versions: their results are kept, but not used."""
    wanted, counts = {job.hash for job in jobs}, dict[str, int]()
    for path in Path(out, "parts").glob("*.parquet"):
        if path.stem in wanted:
            continue
        try:
            about = json.loads((pq.read_schema(path).metadata or {})[_KEY])["job"]
            old = Job(**about | {"text": Text(**about["text"]), "versions": installed_versions()})
            versions = about["versions"]
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
            continue  # damaged, or no part of a sweep
        if old.hash in wanted:
            counts[versions] = counts.get(versions, 0) + 1
    return counts


def write_part(out: Path, job: Job, table: pd.DataFrame) -> None:
    table = table.copy(deep=False)
    table.attrs = {}
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    about = json.dumps({"hash": job.hash, "job": dataclasses.asdict(job)})
    arrow = arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), _KEY: about.encode("utf-8")})
    with whole_file(part_of(out, job)) as file:
        pq.write_table(arrow, file, write_page_checksum=True)
    failure_of(out, job).unlink(missing_ok=True)


def write_failure(out: Path, job: Job, error: BaseException) -> None:
    about = {**job.columns(), "versions": job.versions, "error": type(error).__name__, "message": str(error)}
    about["traceback"] = "".join(traceback.format_exception(error))
    with whole_file(failure_of(out, job)) as file:
        file.write(json.dumps(about, indent=1).encode("utf-8"))


def with_columns(job: Job, table: pd.DataFrame) -> pd.DataFrame:
    """Put the columns that identify the job and its arguments in front of its table.

    A column of the table with the name of one of these is dropped if it has the same values, and prefixed with the
    experiment's name otherwise.
    """
    front = job.columns()
    for name, value in json.loads(job.arguments).items():
        if name not in front and name not in table:
            front[name] = json.dumps(value) if isinstance(value, list | dict) else value
    same = [name for name in front if name in table and table[name].map(lambda x, name=name: x == front[name]).all()]
    table = table.drop(columns=same).rename(columns={name: f"{job.experiment}_{name}" for name in front})
    return pd.concat([pd.DataFrame([front] * len(table), columns=list(front), dtype=object), table], axis=1)


def joined(tables: list[pd.DataFrame], empty: list[str]) -> pd.DataFrame:
    """Concatenate tables, with one type per job column: numbers that may be missing, or strings."""
    whole_table: Any = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=empty, dtype=object)
    typed: pd.DataFrame = whole_table.astype({"step": "Int64", "seed": "Int64"})
    return typed


# A worker process runs one job at a time and stores its result before it begins the next. It keeps the last model for
# later jobs and calls. Threads of one process take turns, because they would share a model's hooks and random numbers.
_kept: dict[Any, Any] = {}
_turn = threading.RLock()


def run_jobs(todo: list[Job], out: str, device: str | None) -> None:
    """Run the jobs that are not finished, and store the table or the error of each in ``out``."""
    with _turn:
        for job in todo:
            if read_part(Path(out), job) is not None:  # finished by a worker that died before it returned
                continue
            try:
                _check_versions(job)
                model = _model(job, own_device(Path(out)) if device == "worker" else device)
                tokens, arguments = job.text.tokens(model), json.loads(job.arguments)
                table = run_experiment(job.experiment, model, tokens, arguments, job.seed)
            except Exception as error:  # noqa: BLE001 - it is stored, and the other jobs run
                write_failure(Path(out), job, error)
            else:
                write_part(Path(out), job, table)


def _check_versions(job: Job) -> None:
    if job.versions != installed_versions():
        raise ValueError(
            f"the versions of the job, {job.versions}, are not those of the process that runs it, "
            f"{installed_versions()}: install the same everywhere, or call jobs again after an upgrade"
        )


def _model(job: Job, device: str | None) -> Any:
    key = (*job.loads, device)
    if key not in _kept:
        forget()  # before loading, so that memory never holds two models
        name, checkpoint, weights, backend, dtype = job.loads
        _kept[key] = load(name, checkpoint, weights, backend=backend, dtype=dtype, device=device)  # type: ignore[arg-type]
    return _kept[key]


def forget() -> None:
    """Release the model that this process keeps."""
    with _turn:
        if _kept:
            _kept.clear()
            gc.collect()  # modules and their hooks are reference cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


_PIECES = 64  # approximate number of chunks: few enough to reuse models, enough to keep all workers busy


def sweep(
    jobs: Iterable[Job],
    executor: Any = None,
    *,
    out: str | Path,
    retry: bool = False,
    part: tuple[int, int] | None = None,
    device: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run the jobs that have no result yet, and return the results of all jobs as one table.

    Each finished job is written immediately, so a sweep that was stopped or killed continues if it is called again with
    the same ``out``. Results of other versions (``Job.versions``) are not used; a warning says so. A job that fails is
    recorded with its error and does not stop the others. Ctrl-C cancels the jobs that have not begun. One sweep at a
    time may write to a folder; a second one raises an error, except for other parts (``part``) of the same jobs.

    Args:
        jobs: jobs from ``jobs``.
        executor: where to run them: None for this process, or a ``concurrent.futures.Executor``:
            ``ProcessPoolExecutor(mp_context=get_context("spawn"))``; or a ``dask.distributed.Client`` of a cluster,
            whose workers must have the same versions and see ``out`` and the files of the jobs under the same paths.
            Each of its processes holds one model at a time; threads take turns.
        out: a folder. ``parts/HASH.parquet`` is the table of a job, ``failed/HASH.json`` the error of a failed job.
        retry: repeat failed jobs.
        part: ``(i, n)``, the ``i``-th of ``n`` parts of the jobs, from 1 to ``n``: only its share is run and returned.
            Jobs are ordered by model, and shares are consecutive, equal within one job. Several processes, as of a job
            array, run one part each of the same ``jobs`` at the same time in the same ``out``; a later call without
            ``part`` returns the whole table. A part that was killed continues if it is called again.
        device: device of the models, such as ``"cuda"``; default as in ``load_model``. ``"worker"``: each process has a
            visible CUDA device (or other accelerator) of its own, of all processes that work on ``out`` on its machine:
            this one, workers and parts. If there are more processes than devices, they share them equally.
        progress: show a progress bar.

    Returns:
        The concatenated tables of all jobs, in the order of ``jobs``. The first columns are ``model``, ``checkpoint``,
        ``step`` (if the checkpoint names one), ``text``, ``seed``, ``experiment``, ``arguments`` (JSON), ``backend``,
        ``dtype`` and ``job``, its hash; then a column for each argument (lists as JSON) that is not a column of the
        experiment. A column of the experiment with the name of a job column but other values gets the experiment's name
        as a prefix. Failed jobs have no rows: there is a warning, ``attrs["failed"]`` has their hashes, and
        ``failures(out)`` the reasons.

    Raises:
        ValueError: no jobs; an invalid job or executor; more parts than jobs; ``out`` is a file or cannot be written,
            or another sweep is running there, or the same part.
        OSError: a result cannot be written (a full disk). Finished jobs are kept.
        RuntimeError: the executor lost its workers, or its workers do not see ``out``. Finished jobs are kept.

    Example:
        >>> import tempfile
        >>> from tl_posdisent.sweeps import Text, jobs, sweep
        >>> todo = jobs("demo", ("additivity", {"layers": [4]}), Text.of("demo", length=64, count=2).split(2))
        >>> with tempfile.TemporaryDirectory() as out:
        ...     table = sweep(todo, out=out, progress=False)
        >>> table.groupby("text")["r"].count().to_dict()
        {'demo[0:1]×64': 8, 'demo[1:2]×64': 8}
    """
    listed, folder = list(jobs) if isinstance(jobs, Iterable) else [jobs], _folder(out).resolve()
    wrong = [type(job).__name__ for job in listed if not isinstance(job, Job)]
    if wrong or not listed:
        raise ArgumentError("jobs", f"must be a list of Job as jobs() returns it, got {wrong[0] if wrong else 'none'}")
    listed = list(dict.fromkeys(listed))
    name = None if part is None else _name_of(part, listed)
    if part is not None:
        listed = _share(listed, *part)
    executor = _executor(executor)
    different = list({job.hash: job for job in listed}.values())
    if unfinished(folder, different, retry):
        with locked(folder, "out", "sweep", part=name):
            todo = unfinished(folder, different, retry)  # again, because another sweep may have ended before the lock
            prepare(folder, todo)
            for versions, n in finished_before(folder, todo).items():
                warnings.warn(
                    f"{n} of {len(listed)} jobs have results of other versions in {folder}, which are not used: "
                    f"they were made with {versions}, and run again with {installed_versions()}",
                    stacklevel=2,
                )
            for job in todo:  # old errors and damaged parts must not be taken for new ones
                part_of(folder, job).unlink(missing_ok=True)
                failure_of(folder, job).unlink(missing_ok=True)
            done = len(different) - len(todo)
            with tqdm(total=len(different), initial=done, desc="jobs", disable=not progress) as bar:
                if executor is None:
                    try:
                        for job in itertools.chain(*_by_model(todo)):
                            run_jobs([job], os.fspath(folder), device)
                            bar.update()
                    finally:
                        forget()
                        release_device(folder)
                else:
                    _elsewhere(_chunks(_by_model(todo)), folder, device, executor, bar)
    return _table(listed, folder)


def _executor(given: Any) -> Executor | None:
    """Return an executor as it is, or that of a dask Client; raise for anything else but None."""
    if callable(getattr(given, "get_executor", None)) and not getattr(given, "asynchronous", False):
        given = given.get_executor()
    if given is not None and not isinstance(given, Executor):
        raise _no_futures(given)
    return given


def _no_futures(executor: Any) -> ArgumentError:
    return ArgumentError(
        "executor",
        "must be None, a synchronous dask Client, or a concurrent.futures.Executor that returns futures, got "
        f"{type(executor).__name__}: with submitit, or a scheduler without futures, start n processes, each of which "
        "calls sweep(..., part=(i, n))",
    )


def _name_of(part: Any, jobs: list[Job]) -> tuple[str, str]:
    """Return the group of a part, equal for equal jobs in as many parts, and its name in it; raise if it is no part."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise ArgumentError("part", f"must be (i, n), the i-th of n parts, or None, got {shown(part)}")
    different = len({job.hash for job in jobs})
    n = check_integer("part", part[1], 1, different, why="n of (i, n), at most as many parts as jobs")
    i = check_integer("part", part[0], 1, n, why="i of (i, n), the first part is 1")
    group = hashlib.sha256(" ".join(job.hash for job in jobs).encode()).hexdigest()
    return f"{group[:16]}-{n}", f"{i}-of-{n}"


def _share(jobs: list[Job], i: int, n: int) -> list[Job]:
    """Return the i-th of n shares of the jobs, in their order; jobs of one model are in as few shares as possible."""
    ordered = list(dict.fromkeys(job.hash for job in itertools.chain(*_by_model(jobs))))
    share = {*ordered[len(ordered) * (i - 1) // n : len(ordered) * i // n]}
    return [job for job in jobs if job.hash in share]


def _by_model(todo: list[Job]) -> list[list[Job]]:
    models: dict[Any, list[Job]] = {}
    for job in todo:
        models.setdefault(job.loads, []).append(job)
    return list(models.values())


def _chunks(models: list[list[Job]]) -> list[list[Job]]:
    """Split the jobs of each model into chunks, so that a worker loads a model once for several jobs."""
    found = []
    for group in models:
        step = math.ceil(len(group) / math.ceil(_PIECES / len(models)))
        found += [group[n : n + step] for n in range(0, len(group), step)]
    return found


def _elsewhere(chunks: list[list[Job]], out: Path, device: str | None, executor: Executor, bar: Any) -> None:
    """Run chunks of jobs with an executor; what a chunk left undone because a job killed its worker is run again."""
    waiting: dict[Future[None], list[Job]] = {}
    try:
        for chunk in chunks:
            waiting[_submitted(chunk, out, device, executor)] = chunk
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                chunk = waiting.pop(future)
                left = _left_of(chunk, future.exception(), out)
                bar.update(len(chunk) - len(left))
                if left:
                    waiting[_submitted(left, out, device, executor)] = left
    except BrokenExecutor as error:
        raise RuntimeError(
            "a worker process ended abruptly (killed, or out of memory), which ended its pool; finished jobs are kept "
            f"in {out}: call sweep again with a new executor"
        ) from error
    finally:
        for future in waiting:  # empty after success
            future.cancel()


def _submitted(chunk: list[Job], out: Path, device: str | None, executor: Executor) -> Future[None]:
    future = executor.submit(run_jobs, chunk, os.fspath(out), device)
    if not isinstance(future, Future):
        raise _no_futures(executor)
    return future


def _left_of(chunk: list[Job], error: BaseException | None, out: Path) -> list[Job]:
    """Return the jobs of a chunk that are still to be done after a call has returned."""
    if isinstance(error, BrokenExecutor | OSError) or not isinstance(error, Exception | None):
        raise error  # the pool is broken, the disk is full, or Ctrl-C reached a worker first
    left = unfinished(out, chunk)
    if error is None and left:
        raise RuntimeError(
            f"out must be a folder that this process and all workers see under the same path: a worker has finished a "
            f"job, but {part_of(out, left[0])} is missing"
        )
    if error is not None and left:
        # Jobs run in order, so the worker died during the first of those that are left, or before it.
        write_failure(out, left.pop(0), error)
    return left


def _table(jobs: list[Job], out: Path) -> pd.DataFrame:
    """Read the results of the jobs as one table, and warn of those that failed."""
    parts = [(job, read_part(out, job)) for job in jobs]
    tables = [with_columns(job, part) for job, part in parts if part is not None]
    failed = [job for job, part in parts if part is None]
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(jobs)} jobs failed; failures({os.fspath(out)!r}) lists the reasons, "
            "and sweep(..., retry=True) repeats them",
            stacklevel=3,
        )
    table = joined(tables, list(jobs[0].columns()))
    table.attrs["failed"] = [job.hash for job in failed]
    return table
