"""Storage of a sweep: a Parquet file per finished job, a JSON file per failed one, each whole or absent."""

from __future__ import annotations

import dataclasses
import json
import traceback
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tl_posdisent.utils.files import remove_unfinished, whole_file

from .jobs import Job

_KEY = b"tl_posdisent"
_FAILURE = ["job", "model", "checkpoint", "text", "experiment", "arguments", "seed", "error", "message", "traceback"]


def failures(out: str | Path) -> pd.DataFrame:
    """List the failed jobs of a sweep with their errors.

    Args:
        out: the sweep's folder.

    Returns:
        One row per failed job: ``job`` (its hash), ``model``, ``checkpoint``, ``text``, ``experiment``, ``arguments``,
        ``seed``, ``error`` (the exception's name), ``message``, ``traceback``.

    Raises:
        ValueError: no such folder; a damaged file in it.

    Example:
        >>> import tempfile
        >>> from tl_posdisent.sweeps import failures
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(failures(folder))
        0
    """
    if not Path(out).is_dir():
        raise ValueError(f"out must be the folder of a sweep, got {out}")
    rows = []
    for path in sorted(Path(out, "failed").glob("*.json")):
        try:
            row = json.loads(path.read_bytes())
            rows.append([row[name] for name in _FAILURE])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"out must be the folder of a sweep, but {path} in it is damaged ({type(error).__name__}: {error}); "
                "delete that file, and call sweep(..., retry=True) to repeat its job"
            ) from error
    return pd.DataFrame(rows, columns=_FAILURE)


def prepare(out: Path) -> None:
    """Make the folders, and delete what killed processes left unfinished. Call it while holding the folder's lock."""
    for folder in (Path(out, "parts"), Path(out, "failed")):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out must be the folder of a sweep, got {out}, in which {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)


def part_of(out: Path, job: Job) -> Path:
    return Path(out, "parts", f"{job.hash}.parquet")


def failure_of(out: Path, job: Job) -> Path:
    return Path(out, "failed", f"{job.hash}.json")


def unfinished(out: Path, jobs: list[Job], retry: bool = False) -> list[Job]:
    """Jobs without a whole table and (unless ``retry``) without an error."""
    return [job for job in jobs if (retry or not failure_of(out, job).is_file()) and read_part(out, job) is None]


def read_part(out: Path, job: Job) -> pd.DataFrame | None:
    """The job's table; None if there is none, or one that is damaged: cut short, altered, or of another job."""
    path = part_of(out, job)
    if not path.is_file():
        return None
    try:
        arrow = pq.read_table(path, page_checksum_verification=True)
        about = json.loads((arrow.schema.metadata or {})[_KEY])
        return arrow.to_pandas() if about["hash"] == job.hash else None
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        return None


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
    about = {**job.columns(), "error": type(error).__name__, "message": str(error)}
    about["traceback"] = "".join(traceback.format_exception(error))
    with whole_file(failure_of(out, job)) as file:
        file.write(json.dumps(about, indent=1).encode("utf-8"))


def with_columns(job: Job, table: pd.DataFrame) -> pd.DataFrame:
    """A job's table after the columns that name the job and its arguments. A column with the name of one of these is
    dropped if it says the same, and prefixed with the experiment's name otherwise."""
    front = job.columns()
    for name, value in json.loads(job.arguments).items():
        if name not in front and name not in table:
            front[name] = json.dumps(value) if isinstance(value, list | dict) else value
    same = [name for name in front if name in table and table[name].map(lambda x, name=name: x == front[name]).all()]
    table = table.drop(columns=same).rename(columns={name: f"{job.experiment}_{name}" for name in front})
    return pd.concat([pd.DataFrame([front] * len(table), columns=list(front), dtype=object), table], axis=1)


def joined(tables: list[pd.DataFrame], empty: list[str]) -> pd.DataFrame:
    """All of them, with job columns of one type: numbers that may be missing, and words."""
    whole_table: Any = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=empty, dtype=object)
    typed: pd.DataFrame = whole_table.astype({"step": "Int64", "seed": "Int64"})
    return typed
