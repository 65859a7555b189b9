"""Settings of all tests: no network, one thread, fixed random seeds, marks, and models that are built once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once
# Some virtual machines report matrix units (AMX) but kill a program that uses them, as oneDNN does in half precision.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import functools
import gc
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils import backend_registration

if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    from support.accelerator import register

    register()  # before autograd runs for the first time
# One thread unless more are asked for: the models are tiny, and pytest-xdist runs several processes.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# The same examples in every run, which may take their time: a slow or busy machine is no failure.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Tests that a script starts in the background, and their processes, would otherwise ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = "docs/test_examples.py"  # minutes in one kernel: begun last, it would leave the other processes without work


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("POSDISENT_MARGINS"):
        from support.margins import Margins

        config.pluginmanager.register(Margins(Path(path).resolve()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """No test depends on which tests ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for code that draws from the global state
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations are not checked in this test, as they are not for users.

    Under pytest every annotation of the package is checked at every call (``addopts`` in pyproject.toml), so a wrong
    argument would never get as far as the library's own error. Tests of those errors take this fixture.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@functools.cache
def _build(kind: str, name: str) -> Any:
    # Imported here, so that tests of the mathematics do not wait for TransformerLens.
    from support import zoo

    return zoo.load(kind, name)


@functools.cache
def _read(kind: str, name: str) -> Any:
    from tl_posdisent import read_model

    return read_model(_build(kind, name))


@pytest.fixture
def shared_reading(shared_model: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """`shared_reading(kind, name)`: the reading of a shared model, made once, for tests of something else."""

    def take(kind: str, name: str) -> Any:
        shared_model(kind, name)  # checked at the end of the test
        return _read(kind, name)

    return take


@pytest.fixture
def shared_model() -> Iterator[Callable[[str, str], Any]]:
    """`shared_model(kind, name)`: a model of the zoo, built once and shared by all who read it.

    A test may add hooks and must remove them, and may change nothing else; this is checked when the test ends. A test
    that changes a model takes a fresh one.
    """
    taken: dict[tuple[str, str], tuple[Any, tuple[Any, ...]]] = {}

    def take(kind: str, name: str) -> Any:
        model = _build(kind, name)
        taken.setdefault((kind, name), (model, _state(model)))
        return model

    yield take
    for (kind, name), (model, before) in taken.items():
        after = _state(model)
        if after != before:
            _build.cache_clear()  # so that the next test gets a new one
            _read.cache_clear()
        for what, was, now in zip(("hooks", "hooks of torch", "training mode", "weights"), before, after, strict=True):
            assert now == was, f"{what} of the shared {kind} of {name} were left changed"


def _state(model: Any) -> tuple[Any, ...]:
    from support.untouched import state_of_model

    return state_of_model(model)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped, and why: a clone without the texts and models skips what needs them."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminalreporter.write_line(f"skipped {n}: {reason}")
