"""Results of a sweep: a Parquet file for each job, which says what made it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tl_posdisent.sweeps.jobs import Job
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import whole_file

_KEY = b"tl_posdisent"  # of the metadata in which a file says what made it


def made_by(call: str) -> str:
    """Describe what makes a result: the call, and the version of this package."""
    return f"{call} with tl-posdisent {version('tl-posdisent')}"


def run_job(job: Job, call: str) -> pa.Table:
    """Run a job, and return its table with metadata that say what made it."""
    table = job()
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"a job must return a pandas.DataFrame, got {type(table).__name__}: a result has to_frame()")
    table = table.copy(deep=False) if isinstance(table.index, pd.RangeIndex) else table.reset_index()
    if "job" in table:
        raise ValueError("a job must return a table without a column 'job', which is added: rename that column")
    table.attrs = {}  # Parquet holds no values of other types
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    return arrow.replace_schema_metadata({**arrow.schema.metadata, _KEY: json.dumps(made_by(call)).encode()})


def write_result(path: Path, table: pa.Table) -> None:
    """Write a result, completely or not at all."""
    with whole_file(path) as file:
        pq.write_table(table, file, write_page_checksum=True)


def is_finished(path: Path, call: str) -> bool:
    """Say whether a job has its result; raise if another call or version made the file."""
    if not path.exists():
        return False
    maker = _maker(path)
    if maker != made_by(call):
        raise ArgumentError(
            "jobs",
            f"must be those whose results are in out, got {brief(path.stem)} as {made_by(call)}, but {path} was made "
            f"by {maker}: choose another name or folder, or delete that file",
        )
    return True


def _maker(path: Path) -> str:
    """Return what made a result, from the metadata of its file."""
    try:
        return str(json.loads(pq.read_schema(path).metadata[_KEY]))
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ArgumentError:
    why = f"{path} is damaged or of another kind ({type(error).__name__}: {error})"
    return ArgumentError("out", f"must hold results of a sweep, but {why}: delete it")


def join_results(paths: Iterable[Path]) -> pd.DataFrame:
    """Read results as one table, with the names of the jobs in the first column, ``job``."""
    tables = [pd.DataFrame({"job": []}, dtype=object)]
    for path in paths:
        try:
            table = pq.read_table(path, page_checksum_verification=True).to_pandas()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(path, error) from error
        table.insert(0, "job", path.stem)
        tables.append(table)
    return pd.concat(tables[1:] or tables, ignore_index=True)


def read_results(out: str | Path) -> pd.DataFrame:
    """Read the results in the folder of a sweep that is running, has failed or is finished.

    Args:
        out: the folder.

    Returns:
        The table of ``sweep``, of the jobs that have a result, in the order of their names.

    Raises:
        ValueError: no such folder; a file in it that is damaged or was not made by a sweep.

    Example:
        >>> import tempfile
        >>> from tl_posdisent.sweeps import read_results
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(read_results(folder))
        0
    """
    if not Path(out).is_dir():
        raise ArgumentError("out", f"must be the folder of a sweep, got {brief(out)}, which is no folder")
    paths = sorted(Path(out).glob("*.parquet"))
    for path in paths:
        _maker(path)
    return join_results(paths)
