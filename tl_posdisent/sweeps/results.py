"""Results of a sweep: a Parquet file for each job, which says what made it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pandas.testing import assert_series_equal

from tl_posdisent.sweeps.code_digest import code_digest
from tl_posdisent.sweeps.jobs import Job
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import as_path, found_at, whole_file
from tl_posdisent.utils.validation import first_line

_KEY = b"tl_posdisent"  # of the metadata in which a file says what made it

Maker = dict[str, str]
"""What makes a result: the ``call`` in words, and a digest of the ``code`` of its function."""


def made_by(call: str, job: Job) -> Maker:
    """Describe what makes a result: the call, the versions of this package and of Python, and the function's code."""
    versions = f"tl-posdisent {version('tl-posdisent')} and Python {sys.version_info.major}.{sys.version_info.minor}"
    return {"call": f"{call} with {versions}", "code": code_digest(job)}


def run_job(job: Job, maker: Maker) -> bytes:
    """Run a job, and return its table as the content of a Parquet file with metadata that say what made it.

    Raises:
        TypeError: the job returns something else than a table.
        ValueError: a table that would be another one when it is read again.
    """
    table = job()
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"a job must return a pandas.DataFrame, got {type(table).__name__}: a result has to_frame()")
    table = pd.DataFrame(table).reset_index(drop=_only_counts(table.index))  # of a subclass, the columns
    table.attrs = {}  # Parquet holds no values of other types
    if "job" in table:
        raise ValueError("a job must return a table without a column 'job', which is added: rename that column")
    try:
        return _stored(table, maker)
    except Exception as error:  # arrow has many kinds, and OverflowError
        raise ValueError(f"a job must return a table that a file can hold, got {_cause(table, error)}") from error


def _only_counts(index: pd.Index[Any]) -> bool:
    """Say whether an index only counts rows: without a name, the integers from 0 in steps of 1."""
    integers = index.nlevels == 1 and pd.api.types.is_integer_dtype(index.dtype)
    return integers and index.name is None and index.equals(pd.RangeIndex(len(index)))


def _stored(table: pd.DataFrame, maker: Maker) -> bytes:
    """Return a Parquet file of a table, or raise if the table that is read from it differs."""
    arrow = pa.Table.from_pandas(table)
    arrow = arrow.replace_schema_metadata({**arrow.schema.metadata, _KEY: json.dumps(maker).encode()})
    file = pa.BufferOutputStream()
    pq.write_table(arrow, file, write_page_checksum=True)
    content: bytes = file.getvalue().to_pybytes()
    read = _read(pa.BufferReader(content))
    _check_equal(read, table)
    return content


def _check_equal(read: pd.DataFrame, table: pd.DataFrame) -> None:
    """Raise unless two tables have the same rows, and the same columns with the same names and types."""
    # assert_frame_equal takes the names 1 and 1.0 for equal.
    names, expected = ((*map(repr, x.columns), x.columns.name, len(x)) for x in (read, table))
    if names != expected:
        raise ValueError(f"they are read back as {brief([*read.columns])}")
    if table.columns.nlevels > 1:
        raise ValueError("they have several levels")
    for place in range(table.shape[1]):
        assert_series_equal(read.iloc[:, place], table.iloc[:, place], check_exact=True, check_names=False)


def _cause(table: pd.DataFrame, error: Exception) -> str:
    """Say which columns of a table a file cannot hold, and what to do."""
    guilty = []
    for place, (name, dtype) in enumerate(table.dtypes.items()):
        try:
            _stored(table.iloc[:, [place]].set_axis(["values"], axis=1), {})
        except Exception:  # noqa: BLE001 - as in run_job
            guilty.append(f"{brief(name)} ({dtype})")
    if guilty:
        return f"{', '.join(guilty[:5])}{', …' if guilty[5:] else ''}: convert these columns, such as by astype(str)"
    return (
        f"columns named {brief([*table.columns])} ({first_line(error)}): give it at least one column, and names of one "
        "level that are all words or all numbers, none twice"
    )


def _read(file: Any) -> pd.DataFrame:
    """Read a table with the types that it had."""
    arrow = pq.read_table(file, page_checksum_verification=True)
    table: pd.DataFrame = arrow.to_pandas()
    for place, column in enumerate(arrow.schema.pandas_metadata["columns"]):
        words = table.iloc[:, place]
        if column["numpy_type"] == "object" and pd.api.types.is_string_dtype(words.dtype):
            table.isetitem(place, words.astype(object))  # type: ignore[arg-type]  # pandas 3 reads them as its own type
    return table


def write_result(path: Path, content: bytes) -> None:
    """Write a result, completely or not at all."""
    with whole_file(path) as file:
        file.write(content)


def is_finished(path: Path, maker: Maker) -> bool:
    """Say whether a job has its result; raise if another call, version or code made the file."""
    if not path.exists():
        return False
    other = _maker(path)
    if other == maker:
        return True
    why = f"{path} was made by {other['call']}"
    if other["call"] == maker["call"]:
        why = f"the function, a default or a decorator of it has changed since {path} was made"
    raise ArgumentError(
        "jobs",
        f"must be those whose results are in out, got {brief(path.stem)} as {maker['call']}, but {why}: choose another "
        "name or folder, or delete that file",
    )


def _maker(path: Path) -> Maker:
    """Return what made a result, from the metadata of its file."""
    try:
        maker = json.loads(pq.read_schema(path).metadata[_KEY])
        return {"call": str(maker["call"]), "code": str(maker["code"])}
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
            table = _read(path)
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
            raise _damaged(path, error) from error
        table.insert(0, "job", path.stem)
        tables.append(table)
    tables = tables[1:] or tables
    filled = [table for table in tables if len(table)] or tables  # one without rows would change types of the others
    joined = pd.concat(filled, ignore_index=True)
    names = dict.fromkeys(name for table in tables for name in table)
    return joined if len(names) == joined.shape[1] else joined.reindex(columns=[*names])


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
    folder = as_path("out", out, "folder")
    if found_at(folder) != "folder":
        raise ArgumentError("out", f"must be the folder of a sweep, got {brief(out)}, which is no folder")
    paths = sorted(folder.glob("*.parquet"))
    for path in paths:
        _maker(path)
    return join_results(paths)
