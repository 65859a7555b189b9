"""Run commands of the command line in this process."""

from __future__ import annotations

import shlex
from typing import Any

from typer.testing import CliRunner, Result

from tl_posdisent.cli import app

# Given back after each command: also what --no-progress and the command line itself set.
ENVIRONMENT = {"COLUMNS": "140", "NO_COLOR": "1", "TQDM_DISABLE": None, "HF_HUB_DISABLE_PROGRESS_BARS": None}
ENVIRONMENT |= {"GOMP_SPINCOUNT": None}


def run_command(line: str, *more: Any, code: int = 0, stdin: bytes | None = None, charset: str = "utf-8") -> Result:
    """Run a command, given as a line of a shell and further arguments."""
    words = [*shlex.split(line), *map(str, more)]
    result = CliRunner(charset).invoke(app, words, input=stdin, env=ENVIRONMENT)
    assert result.exit_code == code, (result.output, result.exc_info)
    assert not code or len(result.stderr.rpartition("error: ")[2]) <= 1000, result.stderr
    return result
