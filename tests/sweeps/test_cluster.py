"""Sweeps on a local dask cluster of two processes, which are killed while they work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.processes import copies, time_limit, wait_until
from support.swept import calls, failing, killing, measured, noted, slow_jobs, squares

from tl_posdisent.sweeps import read_results, sweep
from tl_posdisent.utils.errors import ArgumentError

pytestmark = [
    pytest.mark.slow,
    # Distributed leaves a socket open if the first port that it tries is taken.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    copies()  # of which workers are, also those that replace killed ones
    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with time_limit():
        yield


def test_results_are_those_of_direct_calls(client: Any, tmp_path: Path) -> None:
    """In the order asked for; a job that fails does not stop the others, and none runs twice."""
    jobs: dict[str, Any] = {f"{length}": partial(measured, length, layers=[4]) for length in (24, 16, 32)}
    with pytest.raises(ExceptionGroup, match=r"1 of 4 jobs failed \('bad'\)") as raised:
        sweep({"bad": partial(failing, "no such text"), **jobs}, tmp_path, client, progress=False)
    assert str(raised.value.exceptions[0]) == "no such text"
    assert raised.value.exceptions[0].__notes__ == [f"in job 'bad' of the sweep in {tmp_path}"]
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    table = sweep(jobs, tmp_path, client, progress=False)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert table["job"].unique().tolist() == ["24", "16", "32"]
    expected = pd.concat([measured(length, [4]) for length in (24, 16, 32)], ignore_index=True)
    pd.testing.assert_frame_equal(table.drop(columns="job"), expected, rtol=1e-5)


def test_a_worker_that_is_killed_while_it_works(client: Any, tmp_path: Path) -> None:
    """Dask runs its job again on another; the table is that of direct calls."""
    jobs = slow_jobs(tmp_path, seconds=1.0)

    def kill_the_first() -> None:
        wait_until(lambda: calls(tmp_path).get("a"))
        os.kill(calls(tmp_path)["a"][0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    table = sweep(jobs, tmp_path / "out", client, progress=False)
    killer.join()
    assert table.to_dict("list") == {"job": list("abcdef"), "name": list("abcdef")}
    assert len(calls(tmp_path)["a"]) == 2
    assert len({process for processes in calls(tmp_path).values() for process in processes}) >= 3


def test_a_job_that_no_worker_survives_is_an_error_of_this_job(client: Any, tmp_path: Path) -> None:
    """Dask gives up on it (here at once, by default after three more attempts); the others have run."""
    scheduler = client.cluster.scheduler
    allowed, scheduler.allowed_failures = scheduler.allowed_failures, 0
    jobs = {"killed": partial(killing, tmp_path, 1)}
    try:
        with pytest.raises(ExceptionGroup, match=r"1 of 1 jobs failed \('killed'\)") as raised:
            sweep(jobs, tmp_path / "out", client, progress=False)
    finally:
        scheduler.allowed_failures = allowed
    assert [type(error).__name__ for error in raised.value.exceptions] == ["KilledWorker"]
    others = {name: partial(noted, tmp_path, name) for name in "ab"}
    table = sweep(others | jobs, tmp_path / "out", client, progress=False)
    assert table["job"].tolist() == ["a", "b", "killed"]


def test_ctrl_c_cancels_what_has_not_begun(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {f"{n}": partial(noted, tmp_path, f"{n}", 0.3) for n in range(40)}
    out = tmp_path / "out"

    def press() -> None:
        wait_until(lambda: len(list(out.glob("*.parquet"))) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, out, client, progress=False)
    presser.join()
    wait_until(lambda: not any(client.processing().values()))
    assert len(calls(tmp_path)) < 20
    assert 2 <= read_results(out)["job"].nunique() < 20


def test_an_asynchronous_client_is_refused(client: Any, tmp_path: Path) -> None:
    class Asynchronous(type(client)):  # type: ignore[misc]
        asynchronous = True

    with pytest.raises(ArgumentError, match=r"client must be None or a synchronous dask.distributed.Client"):
        sweep({"a": partial(squares, 1)}, tmp_path, Asynchronous.__new__(Asynchronous))
