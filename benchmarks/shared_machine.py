"""How long a command takes alone and beside busy processes, and how far that is from a fair share of the machine.

    python benchmarks/shared_machine.py -- report --model demo --length 128 --out out/bench/demo.html
    python benchmarks/shared_machine.py --set GOMP_SPINCOUNT=20000 -- fit --model smollm2 --layers 0-9 --length 256

Each setting of the environment runs alone and then loaded, in turn, and the least of the repeats counts. The fair share
of one of n + 1 processes on c cores is c / (n + 1) of a core (at most one): the time in which it would do what it does
on one thread. Run it on a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import report

PROGRAM = "import sys; sys.argv[0] = 'tl-posdisent'; from tl_posdisent.cli import app; app()"
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that compute without a pause, each in a session of its own, as other users' are."""
    running = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
        for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def seconds(words: list[str], setting: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of the command in an environment with nothing but this setting of threads."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN} | setting
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, "--no-progress"],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=3, help="number of busy processes")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE[,…]", help="one more setting")
    parser.add_argument("words", nargs="+", help="the command, after --")
    given = parser.parse_args()
    settings: dict[str, dict[str, str]] = {
        "command line": {},
        "torch's default": {"OMP_NUM_THREADS": str(cores()), "GOMP_SPINCOUNT": "300000"},
        "one thread": {"OMP_NUM_THREADS": "1"},
    }
    settings |= {one: dict(pair.split("=") for pair in one.split(",")) for one in given.set}
    measured: dict[str, list[Any]] = {name: [] for name in settings}
    for _ in range(given.repeats):
        for name, setting in settings.items():
            alone = seconds(given.words, setting)
            with busy(given.busy):
                measured[name].append((*alone, *seconds(given.words, setting)))
    least = {name: [min(column) for column in zip(*runs, strict=True)] for name, runs in measured.items()}
    share = min(1.0, cores() / (given.busy + 1))
    fair = max(least["one thread"][1] / share, min(row[0] for row in least.values()))
    rows = [
        {"threads": name, "alone_s": a, "alone_cpu_s": b, "loaded_s": c, "loaded_cpu_s": d, "loaded/fair": c / fair}
        for name, (a, b, c, d) in least.items()
    ]
    beside = f"alone and beside {given.busy} busy processes on {cores()} cores"
    report("shared_machine", f"{' '.join(given.words)}: {beside}; fair share {fair:.1f} s", rows)


if __name__ == "__main__":
    main()
