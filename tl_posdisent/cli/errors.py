"""Errors as one line on stderr, and exit codes."""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

QUIET = contextvars.ContextVar("QUIET", default=False)  # --no-progress
WRONG_INPUT = 2
INTERRUPTED = 130  # as shells say it of a program that Ctrl-C ended: 128 + SIGINT

# Arguments of the library under the name that their option has here.
_OPTIONS = {name: name for name in ("backend", "device", "encoding", "factor", "fractions", "heads", "jitter")}
_OPTIONS |= {name: name for name in ("layers", "lengths", "mode", "sections", "task", "window")}
_OPTIONS |= {"distance_ceiling": "ceiling", "in_range": "in-range", "n_sink": "sinks", "rotary_heads": "rotary-heads"}
_OPTIONS |= {"path": "out", "name": "preset"}


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Run a command's work before it shows its results.

    Output of loading and measuring goes to stderr. Errors of the user end in one line there and exit code 2, Ctrl-C in
    130. Anything else is a defect, and passes through with its traceback (exit code 1).
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (ValueError, OSError) as error:
        say(f"[bold red]error:[/] {escape(one_line(str(error)))}")
        raise typer.Exit(WRONG_INPUT) from error
    except KeyboardInterrupt as error:
        say(f"interrupted{f': {escape(one_line(str(error)))}' if str(error) else ''}")
        raise typer.Exit(INTERRUPTED) from error


def one_line(message: str) -> str:
    """A message without line breaks, that calls an argument by the option's name.

    >>> one_line("distance_ceiling must be at least 1, got 0")
    '--ceiling must be at least 1, got 0'
    """
    message = " ".join(message.split())
    word = re.match(r"\w+", message)
    if word and word[0] in _OPTIONS and message[word.end() :].startswith((" must", " has", " needs", ' "')):
        return f"--{_OPTIONS[word[0]]}{message[word.end() :]}"
    return message


def note(message: str) -> None:
    """What was written and where; ``--no-progress`` leaves it out."""
    if not QUIET.get():
        say(message)


def say(message: str) -> None:
    """A line for the user, not for the next program in a pipe: on stderr."""
    Console(stderr=True).print(message, soft_wrap=True, highlight=False)
