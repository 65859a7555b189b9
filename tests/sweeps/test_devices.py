"""``device="worker"``: of two imitated devices, each process has the one with fewer claims, until it ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.accelerator import imitated
from support.processes import copies, started, wait_until
from support.swept import LAST, SLOW, claim_and_wait, claimed, imitate

from tl_posdisent.sweeps import Text, failures, jobs, runner, sweep
from tl_posdisent.sweeps.devices import release_device

pytestmark = pytest.mark.slow

TWO = ["imitated:0", "imitated:1"]


def device_of(out: Path, process: Any) -> str:
    path = out / f"{process.pid}.txt"
    wait_until(lambda: path.is_file() and path.read_text(encoding="utf-8"), process)
    return path.read_text(encoding="utf-8")


def test_processes_share_devices_equally_and_replacements_take_what_is_free(tmp_path: Path) -> None:
    with contextlib.ExitStack() as held:
        running = [held.enter_context(started(claim_and_wait, tmp_path)) for _ in range(4)]
        devices = [device_of(tmp_path, process) for process in running]
        assert Counter(devices) == {TWO[0]: 2, TWO[1]: 2}
        running[2].kill()
        running[2].join()
        assert device_of(tmp_path, held.enter_context(started(claim_and_wait, tmp_path))) == devices[2]
        (tmp_path / "other").mkdir()
        assert device_of(tmp_path / "other", held.enter_context(started(claim_and_wait, tmp_path / "other"))) == TWO[0]


def test_one_process_takes_the_free_device_and_releases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a copy of a process has its own claim."""
    used, load = [], runner.load
    monkeypatch.setattr(runner, "load", lambda *x, device, **y: used.append(device) or load(*x, device=device, **y))
    todo = jobs("demo", LAST, Text.of("demo", length=16, count=2).split(2))
    with started(claim_and_wait, tmp_path) as other, imitated():
        assert device_of(tmp_path, other) == TWO[0]
        table = sweep(todo, out=tmp_path, device="worker", progress=False)
        assert claimed(tmp_path) == TWO[1]  # free again
    release_device(tmp_path)
    assert used == TWO[1:]
    pd.testing.assert_frame_equal(table, sweep(todo, out=tmp_path / "cpu", progress=False))


def test_workers_of_a_pool_use_both_devices(tmp_path: Path) -> None:
    todo = jobs("demo", SLOW, Text.of("demo", length=16, count=8).split(8))
    with ProcessPoolExecutor(2, copies(), initializer=imitate, initargs=(tmp_path,)) as pool:
        list(pool.map(time.sleep, [0.3, 0.3]))  # both workers start
        table = sweep(todo, pool, out=tmp_path / "out", device="worker", progress=False)
    assert table["job"].nunique() == 8
    assert sorted(path.read_text(encoding="utf-8").split() for path in tmp_path.glob("*.txt")) == [[x] for x in TWO]


def without_devices(out: Path) -> None:
    sweep(jobs("demo", LAST, Text.of("demo", length=16)), out=out, device="worker", progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_an_accelerator_the_reason_is_said(tmp_path: Path) -> None:
    with started(without_devices, tmp_path) as process:  # where none is imitated
        process.join()
    (message,) = failures(tmp_path)["message"]
    assert message == "device must be 'cpu' where torch sees no accelerator, got 'worker'"
    assert os.listdir(tmp_path / "parts") == []
