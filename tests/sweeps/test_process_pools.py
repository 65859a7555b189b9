"""Sweeps over real processes: a pool of Python's own and a Dask cluster, with workers that are killed."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.processes import process_pool, time_limit
from support.swept import LAST, SLOW, inodes, wait_for_parts
from typer.testing import CliRunner

from tl_posdisent import additivity, controlled_distance, load_demo_model
from tl_posdisent.cli import app
from tl_posdisent.sweeps import Text, failures, jobs, merge_additivity, merge_controlled_distance, sweep

pytestmark = pytest.mark.slow

TEXTS = Text.of("demo", length=48, count=8)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with process_pool(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with time_limit():
        yield


@pytest.mark.parametrize("kind", ["pool", "dask"])
def test_a_corpus_split_over_workers_is_the_corpus(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Results to the last bit, in the order asked for, and merged to those of one process."""
    executor = request.getfixturevalue("pool") if kind == "pool" else request.getfixturevalue("client").get_executor()
    experiments = [LAST, ("moments_by_layer", {"sinks": 4}), "marginals_by_layer"]
    todo = jobs("demo", experiments, TEXTS.split(4))
    table = sweep(todo, executor, out=tmp_path, chunk=2, progress=False)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]
    model = load_demo_model()
    tokens = TEXTS.tokens(model)

    of = {name: rows.dropna(axis=1, how="all") for name, rows in table.groupby("experiment")}
    direct = pd.concat([additivity(model, two, layers=[4], progress=False) for two in tokens.split(2)])
    shown = of["additivity"][direct.columns].astype(direct.dtypes)
    pd.testing.assert_frame_equal(shown.reset_index(drop=True), direct.reset_index(drop=True), check_exact=True)

    merged = merge_controlled_distance(table)
    whole = controlled_distance(model, tokens, sinks=4, progress=False)
    pd.testing.assert_frame_equal(merged[whole.columns], whole, check_exact=False, rtol=1e-9, atol=1e-9)
    merged = merge_additivity(table)
    whole = additivity(model, tokens, pool=True, progress=False)
    pd.testing.assert_frame_equal(merged[whole.columns], whole, check_exact=False, rtol=1e-9, atol=1e-9)
    assert set(merged["model"]) == {"demo"}


def test_the_command_line_takes_a_scheduler(client: Any, tmp_path: Path) -> None:
    address = client.cluster.scheduler_address
    line = ["sweep", "--length", "48", "--texts", "2", "--split", "2", "--dask", address, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*line, "--no-progress"])
    assert result.exit_code == 0, result.output
    model = load_demo_model()
    r = [additivity(model, one, progress=False)["r"].mean() for one in TEXTS.tokens(model)[:2].split(1)]
    assert f"{sum(r) / 2:.3f}" in result.stdout


def test_a_pool_with_failures_and_a_second_sweep(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    todo = jobs("demo", LAST, [*TEXTS.split(3), Text.of("demo", length=48, first=400)])
    with pytest.warns(UserWarning, match="1 of 4 jobs failed"):
        sweep(todo, pool, out=tmp_path, progress=False)
    assert failures(tmp_path)["job"].tolist() == [todo[3].hash]
    before = inodes(tmp_path)
    sweep(todo[:3], pool, out=tmp_path, progress=False)
    assert inodes(tmp_path) == before


def test_ctrl_c_cancels_what_has_not_begun(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    todo = jobs("demo", SLOW, Text.of("demo", length=48, count=40).split(40))

    def interrupt() -> None:
        wait_for_parts(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(todo, pool, out=tmp_path, chunk=1, progress=False)
    thread.join()
    pool.submit(os.getpid).result()  # behind what was running or handed over
    done = list((tmp_path / "parts").glob("*.parquet"))
    assert 2 <= len(done) < 20
    table = sweep([job for job in todo if any(job.hash in part.name for part in done)], out=tmp_path, progress=False)
    assert table["job"].nunique() == len(done)


def test_files_that_cannot_grow_stop_the_sweep(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """What a full disk does, by a limit on the workers' files; a part is larger than that."""
    before, pids = resource.getrlimit(resource.RLIMIT_FSIZE), list(pool._processes)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sweep(jobs("demo", LAST, TEXTS.split(4)), pool, out=tmp_path, progress=False)
    finally:
        pool.submit(os.getpid).result()
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "parts") == os.listdir(tmp_path / "failed") == []
    table = sweep(jobs("demo", LAST, TEXTS.split(4)), pool, out=tmp_path, progress=False)
    assert table["job"].nunique() == 4


def kill_busy_worker(client: Any, out: Path, parts: int) -> threading.Thread:
    """In a while, when so many jobs are done, and a worker in the middle of another."""

    def kill() -> None:
        pids = client.run(os.getpid)
        wait_for_parts(out, parts)
        while not (busy := [address for address, keys in client.processing().items() if keys]):
            time.sleep(0.01)
        os.kill(pids[busy[0]], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_dask_replaces_a_killed_worker_and_nothing_is_done_twice(client: Any, tmp_path: Path) -> None:
    todo = jobs("demo", SLOW, TEXTS.split(8))
    seen: dict[str, Any] = {}
    thread = kill_busy_worker(client, tmp_path, 2)
    watching = threading.Thread(target=lambda: (wait_for_parts(tmp_path, 2), seen.update(inodes(tmp_path))))
    watching.start()
    table = sweep(todo, client.get_executor(), out=tmp_path, chunk=4, progress=False)
    thread.join()
    watching.join()
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]
    assert failures(tmp_path).empty
    assert len(seen) >= 2
    assert seen.items() <= inodes(tmp_path).items()


def test_a_job_that_its_worker_does_not_survive_is_a_failed_job(client: Any, tmp_path: Path) -> None:
    """Dask gives up on it (here at once, by default after three more attempts); the rest of its chunk is done."""
    scheduler = client.cluster.scheduler
    allowed, scheduler.allowed_failures = scheduler.allowed_failures, 0
    todo = jobs("demo", SLOW, TEXTS.split(8))
    thread = kill_busy_worker(client, tmp_path, 1)
    try:
        with pytest.warns(UserWarning, match="1 of 8 jobs failed"):
            table = sweep(todo, client.get_executor(), out=tmp_path, chunk=4, progress=False)
    finally:
        thread.join()
        scheduler.allowed_failures = allowed
    (row,) = failures(tmp_path).to_dict("records")
    assert row["error"] == "KilledWorker"
    assert table["job"].nunique() == 7
    table = sweep(todo, client.get_executor(), out=tmp_path, retry=True, progress=False)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]


def test_a_pool_that_lost_a_worker_says_so_and_can_be_replaced(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """The last test of the pool: Python's own does not survive it."""
    todo = jobs("demo", SLOW, TEXTS.split(8))

    def kill() -> None:
        wait_for_parts(tmp_path, 2)
        os.kill(next(iter(pool._processes)), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RuntimeError, match="a worker process ended abruptly"):
        sweep(todo, pool, out=tmp_path, chunk=4, progress=False)
    thread.join()
    before = inodes(tmp_path)
    assert 2 <= len(before) < 8
    table = sweep(todo, out=tmp_path, progress=False)
    assert before.items() <= inodes(tmp_path).items()
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]
