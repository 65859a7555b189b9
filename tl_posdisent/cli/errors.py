"""Errors as one line on stderr, and exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterator

import typer

QUIET = "TQDM_DISABLE"  # in the environment; --no-progress sets it
WRONG_INPUT = 2
INTERRUPTED = 130  # the code that shells give a program ended by Ctrl-C: 128 + SIGINT

# Arguments of the library whose option has another name.
_RENAMED = {"distance_ceiling": "ceiling", "kinds": "kind", "name": "preset", "path": "out", "sections": "section"}


@contextlib.contextmanager
def answering(options: Collection[str]) -> Iterator[None]:
    """Run a command's work before it shows its results; ``options`` are the names of its parameters.

    Output of loading and measuring goes to stderr. Errors of the user end in one line there and exit code 2, Ctrl-C in
    130. Any other exception is a defect and keeps its traceback (exit code 1).
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (ValueError, OSError) as error:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(one_line(str(error), options), err=True)
        raise typer.Exit(WRONG_INPUT) from error
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted{f': {one_line(str(error), options)}' if str(error) else ''}", err=True)
        raise typer.Exit(INTERRUPTED) from error


def one_line(message: str, options: Collection[str]) -> str:
    """A message without line breaks, in which an argument at the beginning has the name of its option.

    >>> one_line("distance_ceiling must be at least 1, got 0", ["in_range", "ceiling"])
    '--ceiling must be at least 1, got 0'
    """
    message = " ".join(message.split())
    word = re.match(r'(\w+)(?=( must| has| needs| "))', message)
    if word and (name := _RENAMED.get(word[0], word[0])) in options:
        return f"--{name.replace('_', '-')}{message[word.end() :]}"
    return message


def note(message: str) -> None:
    """Say on stderr what was written and where, unless ``--no-progress`` is given."""
    if not os.environ.get(QUIET):
        typer.echo(message, err=True)
