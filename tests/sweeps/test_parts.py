"""Parts of a sweep: every job in one of them, several at once in one folder, each once, and none loses rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.processes import started
from support.swept import LAST, SLOW, inodes, wait_for_parts

from tl_posdisent.sweeps import Job, Text, jobs, sweep
from tl_posdisent.sweeps.runner import _share
from tl_posdisent.utils import files
from tl_posdisent.utils.errors import ArgumentError

pytestmark = pytest.mark.slow


def some_jobs(count: int, work: Any = LAST) -> list[Job]:
    return jobs("demo", work, Text.of("demo", length=32, count=count).split(count))


@pytest.mark.parametrize("n", range(1, 11))
def test_shares_are_a_partition_and_differ_by_one_job(n: int) -> None:
    """Of two models in turns, which one share at most has both of."""
    todo = [job for pair in zip(*two_models(5), strict=True) for job in pair]
    shares = [_share(todo, i, n) for i in range(1, n + 1)]
    assert sorted(map(todo.index, (job for share in shares for job in share))) == list(range(10))
    assert {len(share) for share in shares} <= {10 // n, -(-10 // n)}
    assert all(share == sorted(share, key=todo.index) for share in shares)
    assert sum(len({job.dtype for job in share}) == 2 for share in shares) <= n % 2


def two_models(count: int) -> Iterator[list[Job]]:
    for dtype in ("float32", "float64"):
        yield jobs("demo", LAST, Text.of("demo", length=32, count=count).split(count), dtype=dtype)


def test_equal_work_is_in_one_share(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("We hold these truths to be self-evident", encoding="utf-8")
    todo = jobs("demo", LAST, [tmp_path / "a.txt", "We the people", tmp_path / "b.txt"])
    assert [len(_share(todo, i, 2)) for i in (1, 2)] == [2, 1]
    with pytest.raises(ArgumentError, match=r"part must be an integer from 1 to 2 .*, got 3"):
        sweep(todo, out=tmp_path / "out", part=(1, 3))


def test_parts_one_after_another_make_the_whole(tmp_path: Path) -> None:
    todo = some_jobs(5)
    shares = [sweep(todo, out=tmp_path / "parts", part=(i, 3), progress=False) for i in (3, 1, 2)]
    assert [share["job"].nunique() for share in shares] == [2, 1, 2]
    before = inodes(tmp_path / "parts")
    whole = sweep(todo, out=tmp_path / "parts", progress=False)
    assert inodes(tmp_path / "parts") == before
    pd.testing.assert_frame_equal(whole, sweep(todo, out=tmp_path / "whole", progress=False), check_exact=True)
    in_order = pd.concat([shares[1], shares[2], shares[0]], ignore_index=True)
    pd.testing.assert_frame_equal(in_order, whole, check_exact=True)


def first_of_two(out: Path) -> None:
    sweep(some_jobs(8, SLOW), out=out, part=(1, 2), progress=False)


def test_another_part_runs_beside_one_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other is writing is not deleted; what a killed process left of the own jobs is."""
    monkeypatch.setattr(files, "ENTRY_SECONDS", 0.1)
    todo = some_jobs(8, SLOW)
    mine, other = (tmp_path / "parts" / f".{todo[n].hash[:40]}.0123.unfinished" for n in (-1, 3))
    with started(first_of_two, tmp_path) as process:
        wait_for_parts(tmp_path, 1, process)
        os.kill(process.pid, signal.SIGSTOP)
        for path in (mine, other):
            path.write_bytes(b"PAR1")
        with pytest.raises(ArgumentError, match="part must be one that no other process runs, got 1-of-2, which is"):
            sweep(todo, out=tmp_path, part=(1, 2), progress=False)
        for jobs_, part in ((todo, None), (todo, (3, 3)), (todo[::-1], (2, 2)), (some_jobs(3), (1, 2))):
            with pytest.raises(
                ArgumentError, match=r"out must be a folder that no other process writes to, .* another"
            ):
                sweep(jobs_, out=tmp_path, part=part, progress=False)
        table = sweep(todo, out=tmp_path, part=(2, 2), progress=False)
        assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo[4:]]
        assert (mine.exists(), other.exists()) == (False, True)
        process.kill()
        process.join()
    before = inodes(tmp_path)
    first_of_two(tmp_path)  # continues
    assert before.items() <= inodes(tmp_path).items()
    assert not other.exists()
    kept = inodes(tmp_path)
    whole = sweep(todo, out=tmp_path, progress=False)
    assert whole["job"].drop_duplicates().tolist() == [job.hash for job in todo]
    assert inodes(tmp_path) == kept


def all_of_it(out: Path) -> None:
    sweep(some_jobs(8, SLOW), out=out, progress=False)


def test_no_part_runs_beside_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ENTRY_SECONDS", 0.1)
    with started(all_of_it, tmp_path) as process:
        wait_for_parts(tmp_path, 1, process)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ArgumentError, match="out must be a folder that no other process writes to"):
            sweep(some_jobs(8, SLOW), out=tmp_path, part=(2, 2), progress=False)
        process.kill()
    sweep(some_jobs(8, SLOW)[:2], out=tmp_path, part=(2, 2), progress=False)  # the lock ended with its process


def test_the_whole_removes_the_locks_of_parts(tmp_path: Path) -> None:
    sweep(some_jobs(3), out=tmp_path, part=(1, 2), progress=False)
    assert len(list(tmp_path.glob(".tl_posdisent.*.lock"))) == 1
    sweep(some_jobs(3), out=tmp_path, progress=False)
    assert not list(tmp_path.glob(".tl_posdisent.*.lock"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("part", [(0, 2), (3, 2), (1, 9), (1, 0), (1,), 3, "1/2", (1.0, 2), (True, 2)])
def test_what_is_no_part_is_refused(tmp_path: Path, part: Any) -> None:
    with pytest.raises(ArgumentError, match="part must be"):
        sweep(some_jobs(2), out=tmp_path / "out", part=part)
    assert not (tmp_path / "out").exists()
