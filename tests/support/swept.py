"""Jobs of sweeps in tests, in a module that processes of a cluster can import."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from tl_posdisent.sweeps import sweep


def squares(count: int, start: float = 0) -> pd.DataFrame:
    """Return a table of ``count`` rows."""
    return pd.DataFrame({"n": range(count), "square": [(start + n) ** 2 for n in range(count)]})


def measured(length: int, layers: list[int]) -> pd.DataFrame:
    """Fit heads of the demo model: numbers that depend on a model and on each argument."""
    from tl_posdisent import additivity, demo_tokens, load_demo_model  # other jobs do without torch

    return additivity(load_demo_model(), demo_tokens(length=length), layers=layers, progress=False)


def failing(reason: str) -> pd.DataFrame:
    """Raise an error."""
    raise ValueError(reason)


def noted(folder: Path, name: str, seconds: float = 0.0) -> pd.DataFrame:
    """Add a line to a file at each call, wait, and return a table of one row."""
    with (folder / f"{name}.calls").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return pd.DataFrame({"name": [name]})


def killing(folder: Path, times: int) -> pd.DataFrame:
    """Kill the process that runs it, so many times; then return a table of one row."""
    table = noted(folder, "killed")
    if len(calls(folder)["killed"]) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return table


def calls(folder: Path) -> dict[str, list[int]]:
    """Return the processes that ran ``noted``, by its name, one for each call."""
    return {path.stem: [int(line) for line in path.read_text().split()] for path in folder.glob("*.calls")}


def slow_jobs(folder: Path, seconds: float = 0.2) -> dict[str, Any]:
    """Return six jobs that note their calls in the folder."""
    return {name: partial(noted, folder, name, seconds) for name in "abcdef"}


def run_slow_jobs(folder: Path) -> None:
    """Run them, with results in the folder ``out``."""
    sweep(slow_jobs(folder), folder / "out", progress=False)
