"""What a worker does: one job after the other, one model at a time, each answer on the disk before the next begins."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import torch

from .jobs import Job
from .model_sources import load
from .registry import ask
from .storage import read_part, write_failure, write_part

# A worker keeps the last model for the jobs of the next call, and no more than one. Hooks belong to a model and random
# numbers to a process, so threads of one process take turns.
_kept: dict[Any, Any] = {}
_turn = threading.Lock()


def run_jobs(todo: list[Job], out: str, device: str | None) -> None:
    """Do these jobs, unless they are done: a table or a reason for each in ``out``.

    Raises:
        OSError: ``out`` cannot be written. Everything else is the job's failure, and is written down.
    """
    with _turn:
        for job in todo:
            if read_part(Path(out), job) is not None:  # another worker did it, and died before it could say so
                continue
            try:
                model = _model(job, device)
                table = ask(job.experiment, model, job.text.tokens(model), json.loads(job.arguments), job.seed)
            except Exception as error:
                write_failure(Path(out), job, error)
            else:
                write_part(Path(out), job, table)


def forget() -> None:
    """Let the kept model go, and give its memory back."""
    with _turn:
        _clear()


def _model(job: Job, device: str | None) -> Any:
    key = (*job.loads, device)
    if key not in _kept:
        _clear()  # first, or there would be two for a while
        name, checkpoint, weights, backend, dtype = job.loads
        _kept[key] = load(name, checkpoint, weights, backend=backend, dtype=dtype, device=device)  # type: ignore[arg-type]
    return _kept[key]


def _clear() -> None:
    if _kept:
        _kept.clear()
        gc.collect()  # modules and their hooks know each other in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
