"""Processes for tests, with a time limit and default signals; none outlives its test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children, forkserver, get_context
from pathlib import Path
from typing import Any

LIMIT = 300  # seconds; the slowest takes 60 on one busy core
PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)


@contextlib.contextmanager
def process(*words: str | Path, limit: float = LIMIT, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is killed after ``limit`` seconds, or when the context ends."""
    with subprocess.Popen(words, preexec_fn=_default_signals, **options) as running, _killed(running.kill, limit):
        yield running


@contextlib.contextmanager
def _killed(kill: Callable[[], None], limit: float) -> Iterator[None]:
    """Kill a process after ``limit`` seconds, or when the context ends."""
    watch = threading.Timer(limit, kill)
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        kill()


def run(
    *words: str | Path, limit: float = LIMIT, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it wrote. An exit code other than 0 is an error that shows stderr."""
    done = subprocess.run(words, preexec_fn=_default_signals, timeout=limit, capture_output=True, text=True, **options)
    assert not check or done.returncode == 0, f"{words[0]} ended with {done.returncode}:\n{done.stderr}"
    return done


def python(code: str, *arguments: str, **options: Any) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A Python that runs ``code``, with this one's import path and one thread for torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return process(sys.executable, "-c", code, *arguments, **{"env": environment, **options})


def copies() -> Any:
    """A context of ``multiprocessing`` whose processes are copies of one that has imported TransformerLens and this
    package, which takes seconds, and has done nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["support.imported"])
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}
    return context


@contextlib.contextmanager
def time_limit(seconds: float = LIMIT) -> Iterator[None]:
    """Raise in the main thread after so many seconds, and kill the worker processes that it may be waiting for."""

    def stop(number: int, frame: Any) -> None:
        for child in active_children():
            child.kill()
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_until(there: Callable[[], Any], running: subprocess.Popen[bytes] | None = None, limit: float = LIMIT) -> None:
    """Wait for something that a process does, which must not end before."""
    until = time.monotonic() + limit
    while not there():
        assert time.monotonic() < until, "waited in vain"
        if running is not None and running.poll() is not None and not there():
            raise AssertionError(f"the process ended with {running.returncode}")
        time.sleep(0.002)


def _default_signals() -> None:
    """Restore the default signals: tests that a script starts in the background ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
