"""Running commands of the command line in this process."""

from __future__ import annotations

import shlex
from typing import Any

from typer.testing import CliRunner, Result

from tl_posdisent.cli import app


def run_command(line: str, *more: Any, code: int = 0, stdin: bytes | None = None, width: int = 140) -> Result:
    """Run a command: a line as a shell takes it, and further words as they are."""
    words = [*shlex.split(line), *map(str, more)]
    result = CliRunner().invoke(app, words, input=stdin, env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result
