"""What every benchmark does: times and peaks of memory, the machine's name, a table, a JSON file."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

OUT = Path(__file__).resolve().parents[1] / "out" / "bench"


def device() -> torch.device:
    """A GPU if one is at hand; BENCH_DEVICE overrides."""
    return torch.device(os.environ.get("BENCH_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu"))


def accelerator() -> Any:
    """``torch.cuda``, or what torch has in its place for another device; None on a CPU."""
    return None if device().type == "cpu" else torch.get_device_module(device())


def device_name() -> str:
    """Processor or GPU, threads."""
    if accelerator():
        name = accelerator().get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
        name = f"{model or platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return str(name)


def machine() -> str:
    """Processor or GPU, threads, torch."""
    return f"{device_name()}, torch {torch.__version__}, Python {platform.python_version()}"


def synchronise() -> None:
    """Wait for a GPU, so that its work is in the time."""
    if accelerator():
        accelerator().synchronize()


def seconds(function: Callable[[], Any]) -> float:
    """One run. ``BENCH_CLOCK=cpu`` counts the process's own time, for one thread on a machine that others use."""
    clock = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter
    synchronise()
    start = clock()
    function()
    synchronise()
    return clock() - start


def medians(functions: dict[str, Callable[[], Any]], *, repeats: int = 7) -> dict[str, float]:
    """Median seconds of each, after a warm-up, in turn: a machine that slows down slows all of them."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return {name: statistics.median(values) for name, values in times.items()}


def in_a_process(script: str, *arguments: object) -> Any:
    """The last line that the script prints, as JSON. Freed tensors go back to the system, so none hides another."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def peak(function: Callable[[], Any]) -> float:
    """MiB by which the process, or what it holds on its GPU, grew while the function ran."""
    gpu = accelerator()
    if gpu:
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated() / 2**20
    else:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, or it would hide what is needed
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark is from now on
        before = _resident("VmRSS")
    function()
    synchronise()
    return (gpu.max_memory_allocated() / 2**20 if gpu else _resident("VmHWM")) - before


def _resident(name: str) -> float:
    """A line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def report(name: str, claim: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print one table and write it to JSON."""
    print(f"\n{claim}\n{machine()}\n{text_of(rows)}")
    OUT.mkdir(parents=True, exist_ok=True)
    content = {"claim": claim, "machine": machine(), "rows": list(rows)}
    (OUT / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """The table as text, with its columns one under another."""
    columns = list(rows[0])
    cells = [[_text(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [columns, *cells]
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
