"""The command line: ``tl-posdisent fit --model demo --out table.csv``.

Results go to stdout, or whole tables to ``--out``; progress, notes and errors to stderr. Exit codes: 0 success, 2 wrong
usage or input, 130 interrupted, 1 for a bug. Nothing here imports torch until a command runs.
"""

from __future__ import annotations

import io
import sys
from importlib import metadata
from typing import Annotated

import typer

from .commands.fit import fit
from .commands.head import head
from .commands.report import report
from .threads import spin_briefly

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"tl-posdisent {metadata.version('tl-posdisent')}")
        raise typer.Exit
    return False


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Is this attention head looking at where, or at what?

    Results go to stdout, progress and errors to stderr. --out saves the whole table.

    Exit codes: 0 success, 2 wrong usage or input, 130 interrupted, 1 a bug.

    Examples:
      tl-posdisent head
      tl-posdisent head L8H1 --model smollm2 --text book.txt
      cat book.txt | tl-posdisent fit --model EleutherAI/pythia-70m --text - --out table.csv
    """
    spin_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print ? for characters that a terminal lacks, instead of failing
            stream.reconfigure(errors="replace")


for command in (fit, head, report):
    app.command()(command)
