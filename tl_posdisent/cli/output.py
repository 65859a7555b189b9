"""Output of commands: tables to files, plain text to stdout, errors as one line to stderr."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import check_writable, whole_file

QUIET = "TQDM_DISABLE"  # environment variable that --no-progress sets
WRONG_INPUT = 2
INTERRUPTED = 130  # the code that shells give a program ended by Ctrl-C: 128 + SIGINT


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Run a command's work before it shows its results.

    Output of loading and measuring goes to stderr. A user's error is printed there on one line, with exit code 2;
    Ctrl-C gives exit code 130. Any other exception is a bug and keeps its traceback (exit code 1).
    """
    plain, warnings.formatwarning = warnings.formatwarning, _warning_line  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (ValueError, OSError, MemoryError) as error:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(one_line(error), err=True)
        raise typer.Exit(WRONG_INPUT) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from error
    finally:
        warnings.formatwarning = plain


def _warning_line(message: Warning | str, *place: Any) -> str:
    """Format a warning on one line, without the place in the library where it was raised."""
    return f"warning: {one_line(message)}\n"


def one_line(message: object) -> str:
    """Write the message of an error or a warning on one line, and cut the middle out of a long one.

    >>> one_line(ValueError("scores take\\n3 GB")), len(one_line("must be one of " + "x" * 10**6 + ": do this"))
    ('scores take 3 GB', 798)
    """
    line = " ".join(str(message).split())
    return line if len(line) <= 800 else f"{line[:595]} … {line[-200:]}"


def note(message: str) -> None:
    """Print a note on stderr, such as where a table was saved, unless ``--no-progress`` is given."""
    if not os.environ.get(QUIET):
        typer.echo(message, err=True)


FORMATS = (".csv", ".parquet")


def check_out(out: Path | None, formats: Sequence[str] = FORMATS) -> None:
    """Raise ValueError, before the work, unless the file can be written."""
    if out is None:
        return
    if out.suffix.lower() not in formats:
        endings = " or ".join(formats)
        raise ArgumentError("out", f"must be a file such as table{formats[0]}, ending in {endings}, got {brief(out)}")
    check_writable("out", out)


def save(table: Any, out: Path | None) -> None:
    """Write a table to ``out``, completely or not at all, and print a note; do nothing without ``out``."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as file:
        if out.suffix.lower() == ".csv":
            table.to_csv(file, index=False)
        else:
            table.to_parquet(file, index=False)
    note(f"table: {out} ({len(table)} rows)")


def number(value: float, digits: int = 2) -> str:
    """Format a number with fixed digits, and NaN as a dash.

    >>> number(0.126), number(-0.001), number(float("nan"))
    ('0.13', '0.00', '–')
    """
    return "–" if math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"


def grid(title: str, columns: Mapping[str, bool], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a title and rows of cells. ``columns`` maps names to whether they hold numbers (right-aligned)."""
    table = [[*columns], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, columns.values(), strict=True)
        lines.append("  ".join(x.rjust(width) if right else x.ljust(width) for x, width, right in cells))
    return [title, "", *(f" {line}".rstrip() for line in lines), ""]


def show(lines: Iterable[str]) -> None:
    """Print the results of a command."""
    sys.stdout.write("\n".join(lines) + "\n")
