"""Check this package on a GPU in at most eight minutes: ``make gpu-check``, or ``python benchmarks/gpu_check.py``.

Four parts: every public function against the CPU (``tools``), costs in passes (``costs``) and memory (``memory``) at
the shape of Llama 3.2 1B, and the models of arXiv 2505.13027 (``deposit``). Each has its share of the time, and what is
left of the parts before; checks that do not fit any more are *not measured*. Ends with one table, also as CSV and
Markdown in the folder ``--out``, where trained models are kept for another run. ``--miniature`` runs the same code on a
CPU, in small sizes. Exit code: 0 if all checks hold, 1 if one does not, 3 if some were not measured, 4 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "docs" / "figures")]

import gpu_deposit  # noqa: E402 - the paths first
import gpu_large  # noqa: E402
import gpu_tools  # noqa: E402
from common import device, machine, text_of  # noqa: E402
from support import zoo  # noqa: E402

PUBLISHED = ROOT / "docs" / "figures" / "deposit_gpu.csv"
# When each part has to end, as a share of all the time.
ENDS = {"tools": 0.35, "costs": 0.5, "memory": 0.55, "deposit": 0.93}
KINDS = ("bridge", "hooked") if zoo.TL_MAJOR < 4 else ("bridge",)
Checks = Iterable[tuple[str, Callable[[], gpu_tools.Found]]]
YES, NO, UNKNOWN = "yes", "no", "not measured"


def rows_of(part: str, checks: Checks, deadline: float) -> Iterator[dict[str, Any]]:
    """One row for each check; what begins after the deadline, or exceeds the memory, is not measured."""
    for name, measure in checks:
        row = {"part": part, "check": name, "value": float("nan"), "bound": float("nan"), "ok": UNKNOWN, "note": ""}
        start = time.monotonic()
        if start > deadline:
            row["note"] = "no time left"
        else:
            try:
                value, bound, note = measure()
                row |= {"value": value, "bound": bound, "ok": YES if value <= bound else NO, "note": note}
            except torch.OutOfMemoryError:
                row["note"] = "out of memory"
            except Exception as error:  # noqa: BLE001 - a check that ends in an error does not hold
                row |= {"ok": NO, "note": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        row["seconds"] = round(time.monotonic() - start, 1)
        print({name: x for name, x in row.items() if name != "part"}, flush=True)
        yield row


def parts_of(options: argparse.Namespace, start: float) -> dict[str, tuple[Checks, float]]:
    """The checks of each part, and when it has to end."""
    ends = {part: start + share * 60 * options.minutes for part, share in ENDS.items()}
    if options.miniature:
        large, size = gpu_large.Large("miniature", 256, "float32", 4096), gpu_deposit.miniature()
        tools = gpu_tools.checks(1, KINDS[:1])
    else:
        large, size = gpu_large.Large("llama-3.2-1b", 2048, "bfloat16", 131_072), gpu_deposit.Size(gpu_deposit.PAPER)
        tools = gpu_tools.checks(3, KINDS)
    every: dict[str, Checks] = {
        "tools": tools,
        "costs": gpu_large.costs(large, bounded=not options.miniature),
        "memory": gpu_large.memory(large),
        "deposit": gpu_deposit.checks(options.out / "deposit.csv", size, ends["deposit"]),
    }
    return {part: (every[part], ends[part]) for part in ENDS if part in options.parts}


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """The table, as CSV and as Markdown."""
    table = pd.DataFrame(rows).assign(device=machine())
    table.to_csv(folder / "checks.csv", index=False)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(x).replace("|", "/") for x in r.values()] for r in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / "checks.md").write_text(f"{machine()}\n\n{text}\n", encoding="utf-8")


def exit_code(rows: list[dict[str, Any]]) -> int:
    found = {row["ok"] for row in rows}
    return 1 if NO in found else 3 if UNKNOWN in found else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--parts", nargs="+", choices=ENDS, default=list(ENDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--miniature", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out or ROOT / "out" / ("gpu-check-miniature" if options.miniature else "gpu-check")
    if options.miniature:
        os.environ.setdefault("BENCH_DEVICE", "cpu")
    elif device().type == "cpu":
        print("gpu-check needs a GPU with CUDA, and torch finds none; --miniature tries the same code on the CPU")
        return 4
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # references are computed on tiny models
    torch.set_float32_matmul_precision("highest")
    rows: list[dict[str, Any]] = []
    for part, (checks, deadline) in parts_of(options, time.monotonic()).items():
        rows += rows_of(part, checks, deadline)
        write(rows, options.out)
    print(f"\n{machine()}\n{text_of([{name: row[name] for name in list(row)[1:6]} for row in rows])}")
    print(f"written to {options.out}")
    if not options.miniature and {row["ok"] for row in rows if row["part"] == "deposit"} == {YES}:
        shutil.copy(options.out / "deposit.csv", PUBLISHED)
        print(f"{PUBLISHED} written: python docs/findings/page.py puts it on the page of results")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
