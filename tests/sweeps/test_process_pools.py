"""Sweeps over real processes: a pool of Python's own and a Dask cluster, with workers that are killed.

They are copies of a process that has imported TransformerLens; ``test_revisions_of_a_named_model`` has one that begins
with nothing, as workers of the command line do.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.processes import copies, process_pool, time_limit
from support.swept import LAST, SLOW, claimed, inodes, when_parts

from tl_posdisent import additivity, load_demo_model
from tl_posdisent.sweeps import Text, failures, jobs, runner, sweep

pytestmark = pytest.mark.slow

TEXTS = Text.of("demo", length=48, count=8)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with process_pool(2) as executor:
        yield executor


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


@pytest.mark.parametrize("kind", ["pool", "dask"])
def test_results_are_those_of_one_process(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in the order asked for; a job that fails does not stop the others, none is done twice."""
    executor = request.getfixturevalue("pool" if kind == "pool" else "client")
    monkeypatch.setattr(runner, "_PIECES", 3)  # two jobs in a call
    todo = jobs("demo", LAST, [*TEXTS.split(4), Text.of("demo", length=48, first=400)])
    with pytest.warns(UserWarning, match="1 of 5 jobs failed"):
        table = sweep(todo, executor, out=tmp_path, progress=False)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo[:4]]
    assert failures(tmp_path)["job"].tolist() == [todo[4].hash]
    model = load_demo_model()
    direct = [additivity(model, two, layers=[4], progress=False) for two in TEXTS.tokens(model).split(2)]
    expected = pd.concat(direct, ignore_index=True)
    pd.testing.assert_frame_equal(table[expected.columns].astype(expected.dtypes), expected, check_exact=True)
    before = inodes(tmp_path)
    sweep(todo[:4], executor, out=tmp_path, progress=False)
    assert inodes(tmp_path) == before


def test_ctrl_c_cancels_what_has_not_begun(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    todo = jobs("demo", SLOW, Text.of("demo", length=48, count=40).split(40))
    with (
        when_parts(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        sweep(todo, pool, out=tmp_path, progress=False)
    pool.submit(os.getpid).result()  # behind what was running or handed over
    done = list((tmp_path / "parts").glob("*.parquet"))
    assert 2 <= len(done) < 20
    table = sweep([job for job in todo if any(job.hash in part.name for part in done)], out=tmp_path, progress=False)
    assert table["job"].nunique() == len(done)


def test_files_that_cannot_grow_stop_the_sweep(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """What a full disk does, by a limit on the workers' files; a part is larger than that."""
    list(pool.map(time.sleep, [0.3, 0.3]))  # both workers start
    before, pids = resource.getrlimit(resource.RLIMIT_FSIZE), list(pool._processes)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sweep(jobs("demo", LAST, TEXTS.split(4)), pool, out=tmp_path, progress=False)
    finally:
        deadline = time.monotonic() + 60
        while any(os.listdir(tmp_path / "parts")) and time.monotonic() < deadline:  # the other worker is writing
            time.sleep(0.05)
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "parts") == os.listdir(tmp_path / "failed") == []
    table = sweep(jobs("demo", LAST, TEXTS.split(4)), pool, out=tmp_path, progress=False)
    assert table["job"].nunique() == 4


def kill_a_busy_worker(client: Any, pids: dict[str, int]) -> Callable[[], None]:
    def kill() -> None:
        while not (busy := [address for address, keys in client.processing().items() if keys]):
            time.sleep(0.01)
        os.kill(pids[busy[0]], signal.SIGKILL)

    return kill


def test_a_job_that_its_worker_does_not_survive_is_a_failed_job(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask gives up on it (here at once, by default after three more attempts); the rest of its chunk is done."""
    scheduler = client.cluster.scheduler
    allowed, scheduler.allowed_failures = scheduler.allowed_failures, 0
    monkeypatch.setattr(runner, "_PIECES", 2)  # four jobs in a call
    todo = jobs("demo", SLOW, TEXTS.split(8))
    try:
        with (
            when_parts(tmp_path, 1, kill_a_busy_worker(client, client.run(os.getpid))),
            pytest.warns(UserWarning, match="1 of 8 jobs failed"),
        ):
            table = sweep(todo, client.get_executor(), out=tmp_path, progress=False)
    finally:
        scheduler.allowed_failures = allowed
    assert failures(tmp_path)["error"].tolist() == ["KilledWorker"]
    assert table["job"].nunique() == 7
    table = sweep(todo, client, out=tmp_path, retry=True, progress=False)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]


def test_workers_of_a_cluster_have_a_device_each(client: Any, tmp_path: Path) -> None:
    assert sorted(client.run(claimed, tmp_path).values()) == ["imitated:0", "imitated:1"]


def test_a_pool_that_lost_a_worker_says_so_and_can_be_replaced(
    pool: ProcessPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of the pool: Python's own does not survive it."""
    monkeypatch.setattr(runner, "_PIECES", 2)  # four jobs in a call
    todo = jobs("demo", SLOW, TEXTS.split(8))
    with (
        when_parts(tmp_path, 2, lambda: os.kill(next(iter(pool._processes)), signal.SIGKILL)),
        pytest.raises(RuntimeError, match="a worker process ended abruptly"),
    ):
        sweep(todo, pool, out=tmp_path, progress=False)
    before = inodes(tmp_path)
    assert 2 <= len(before) < 8
    table = sweep(todo, out=tmp_path, progress=False)
    assert before.items() <= inodes(tmp_path).items()
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]
