"""Sweeps in one process: results are those of direct calls, what was done stays done, errors name their jobs."""

from __future__ import annotations

import copy
import gc
import shutil
import signal
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.processes import python, wait_until
from support.swept import calls, failing, measured, noted, slow_jobs, squares

from tl_posdisent import demo_tokens
from tl_posdisent.sweeps import read_results, results, sweep
from tl_posdisent.sweeps.jobs import describe_jobs
from tl_posdisent.utils.errors import ArgumentError


def inodes(out: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each result, which change if a job runs again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}


def test_the_table_is_that_of_direct_calls(tmp_path: Path) -> None:
    jobs = {f"{length} tokens": partial(measured, length, layers=[0, 4]) for length in (24, 16)}
    table = sweep(jobs, tmp_path, progress=False)
    expected = pd.concat([measured(24, [0, 4]), measured(16, [0, 4])], ignore_index=True)
    assert table["job"].tolist() == ["24 tokens"] * 16 + ["16 tokens"] * 16
    assert table.columns[0] == "job"
    pd.testing.assert_frame_equal(table.drop(columns="job"), expected, check_exact=True)
    assert sorted(inodes(tmp_path)) == ["16 tokens.parquet", "24 tokens.parquet"]


def test_what_is_there_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    first = {name: partial(noted, tmp_path, name) for name in "ab"}
    sweep(first, out, progress=False)
    before = inodes(out)
    table = sweep({"c": partial(noted, tmp_path, "c"), **first}, out, progress=False)
    assert {name: len(processes) for name, processes in calls(tmp_path).items()} == {"a": 1, "b": 1, "c": 1}
    assert before.items() < inodes(out).items()
    assert table.to_dict("list") == {"job": ["c", "a", "b"], "name": ["c", "a", "b"]}


def test_shares_of_the_jobs_fill_one_folder(tmp_path: Path) -> None:
    """As the tasks of a job array do, at the same time or one after another; nothing runs twice."""
    jobs, out = slow_jobs(tmp_path, seconds=0), tmp_path / "out"
    shares = [dict(list(jobs.items())[task::4]) for task in range(4)]
    tables = [sweep(share, out, progress=False) for share in shares]
    whole = sweep(jobs, out, progress=False)
    assert {len(processes) for processes in calls(tmp_path).values()} == {1}
    assert whole["job"].tolist() == list("abcdef")
    assert sorted(pd.concat(tables)["job"]) == list("abcdef")


def test_a_killed_sweep_continues_and_equals_direct_calls(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = "import pathlib, sys; from support import swept; swept.run_slow_jobs(pathlib.Path(sys.argv[1]))"
    with python(code, str(tmp_path)) as running:
        wait_until(lambda: (out / "b.parquet").exists(), running)
        running.kill()
        assert running.wait() == -signal.SIGKILL
    before = {name: where for name, where in inodes(out).items() if name.endswith(".parquet")}
    assert 2 <= len(before) < 6, "killed too late to mean anything"
    table = sweep(slow_jobs(tmp_path), out, progress=False)
    assert before.items() <= inodes(out).items()
    assert all(len(processes) == 1 for name, processes in calls(tmp_path).items() if f"{name}.parquet" in before)
    assert table.to_dict("list") == {"job": list("abcdef"), "name": list("abcdef")}


def test_errors_are_told_at_the_end_with_the_names_of_their_jobs(tmp_path: Path) -> None:
    jobs = {"bad": partial(failing, "no such text"), "good": partial(squares, 2), "worse": partial(squares, "two")}
    with pytest.raises(
        ExceptionGroup, match=r"2 of 3 jobs failed \('bad', 'worse'\); the results .* are kept"
    ) as raised:
        sweep(jobs, tmp_path, progress=False)
    bad, worse = raised.value.exceptions
    assert (type(bad), str(bad), type(worse)) == (ValueError, "no such text", TypeError)
    assert [error.__notes__ for error in (bad, worse)] == [
        [f"in job '{name}' of the sweep in {tmp_path}"] for name in ("bad", "worse")
    ]
    assert bad.__traceback__.tb_next.tb_next.tb_frame.f_code.co_name == "failing"
    assert read_results(tmp_path)["job"].tolist() == ["good", "good"]
    kept = inodes(tmp_path)
    table = sweep(jobs | {"bad": partial(squares, 1), "worse": partial(squares, 1)}, tmp_path, progress=False)
    assert table["job"].tolist() == ["bad", "good", "good", "worse"]
    assert kept.items() <= inodes(tmp_path).items()


HELD: list[weakref.ref[Any]] = []


def fail_with_a_model() -> pd.DataFrame:
    model = np.ones(10)
    HELD.append(weakref.ref(model))
    try:
        raise LookupError
    except LookupError as error:
        raise ValueError("after loading") from error


def test_an_error_does_not_hold_the_model_of_its_job(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        sweep({"a": fail_with_a_model}, tmp_path, progress=False)
    gc.collect()
    assert HELD.pop()() is None
    assert raised.value.exceptions[0].__cause__ is not None


def interrupt() -> pd.DataFrame:
    raise KeyboardInterrupt


def test_ctrl_c_stops_and_keeps_results(tmp_path: Path) -> None:
    jobs = {"a": partial(squares, 1), "b": interrupt, "c": partial(squares, 1)}
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, tmp_path, progress=False)
    assert sorted(inodes(tmp_path)) == ["a.parquet"]


def test_a_disk_that_is_full_stops_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        sweep({name: partial(noted, tmp_path, name) for name in "ab"}, tmp_path / "out", progress=False)
    assert list(calls(tmp_path)) == ["a"]
    assert inodes(tmp_path / "out") == {}


@pytest.mark.parametrize("change", ["arguments", "function", "version"])
def test_a_result_of_another_call_is_refused(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep({"a": partial(squares, 2)}, tmp_path, progress=False)
    job = {"arguments": partial(squares, 2, start=1), "function": partial(measured, 24, [0])}.get(change)
    if change == "version":
        monkeypatch.setattr(results, "version", lambda name: "99.0")
    before, other = inodes(tmp_path), partial(noted, tmp_path, "b")
    with pytest.raises(
        ArgumentError, match=r"got 'a' as .* was made by support.swept.squares\(count=2\) with .*: choose another"
    ) as bad:
        sweep({"b": other, "a": job or partial(squares, 2)}, tmp_path, progress=False)
    said = {
        "arguments": "support.swept.squares(count=2, start=1)",
        "function": "support.swept.measured(length=24, layers=[0])",
        "version": "99.0",
    }
    assert said[change] in str(bad.value)
    assert inodes(tmp_path) == before, "no job ran"


def described(*positional: Any, **named: Any) -> str:
    return describe_jobs({"a": partial(squares, *positional, **named)})["a"]


def test_functions_of_one_name_in_two_modules_are_two() -> None:
    calls_of = [describe_jobs({"a": partial(copy_of, None)})["a"] for copy_of in (copy.copy, copy.deepcopy)]
    assert calls_of == ["copy.copy(x=None)", "copy.deepcopy(x=None)"]
    assert describe_jobs({"a": partial(shutil.copy, "x", "y")})["a"] == "shutil.copy(src='x', dst='y')"


def test_one_call_is_written_in_several_ways() -> None:
    """By position or by name, with numbers of numpy; a tuple is not a list, which may mean other heads."""
    ways = {described(2, 1), described(count=2, start=1), described(np.int64(2), start=1), described(2, start=1)}
    assert ways == {"support.swept.squares(count=2, start=1)"}
    assert len({described(heads) for heads in ([0, 1], (0, 1), [(0, 1)], [[0, 1]], range(2), (1,), "0", 0)}) == 8
    assert described(2) != described(2.0)
    plain = {"path": Path("a"), "none": None, "functions": [demo_tokens], "numbers": (0.5, True)}
    named = f"[{demo_tokens.__module__}.demo_tokens]"
    text = f"{{'path': {Path('a')!r}, 'none': None, 'functions': {named}, 'numbers': tuple([0.5, True])}}"
    assert described(plain) == f"support.swept.squares(count={text})"


@pytest.mark.parametrize("content", [b"", b"PAR1", "cut", "flipped", "of pandas"])
def test_damaged_and_other_files_are_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    sweep({"a": partial(squares, 5)}, tmp_path, progress=False)
    whole = bytearray(path.read_bytes())
    flipped = bytes([*whole[:40], whole[40] ^ 16, *whole[41:]])  # in the first page of numbers
    path.write_bytes({"cut": bytes(whole[:-9]), "flipped": flipped, "of pandas": b""}.get(content, content))
    if content == "of pandas":
        squares(5).to_parquet(path)
    for read in (partial(sweep, {"a": partial(squares, 5)}, progress=False), read_results):
        with pytest.raises(ArgumentError, match=r"out must hold results of a sweep, but .*a.parquet is damaged"):
            read(out=tmp_path)


def returns(value: Any) -> Any:
    return pd.DataFrame({value: [1]}) if value == "job" else value


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "a job must return a pandas.DataFrame, got int"), ("job", "must return a table without a column 'job'")],
)
def test_what_is_no_table_is_an_error_of_its_job(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        sweep({"a": partial(returns, value)}, tmp_path, progress=False)
    assert message in str(raised.value.exceptions[0])


@pytest.mark.parametrize("progress", [True, False])
def test_progress_can_be_switched_off(progress: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep({"a": partial(squares, 1)}, tmp_path, progress=progress)
    said = capsys.readouterr()
    assert said.out == ""
    assert ("1/1" in said.err) is progress
    assert progress or not said.err


class Callable_:
    def __call__(self) -> pd.DataFrame:
        return squares(1)


ONE = {"a": partial(squares, 1)}
REFUSED = [
    ({}, "jobs must be a dict of names and functions, got {}"),
    ([partial(squares, 1)], "jobs must be a dict of names and functions, got \\["),
    *(
        ({name: partial(squares, 1)}, "jobs must be named as files are: ")
        for name in (
            "../a",
            "a/b",
            "a\\b",
            "/a",
            ".a",
            "..",
            "",
            " ",
            " a",
            "a\n",
            "a\0",
            "C:a",
            "a?",
            "a\ud800",
            3,
            None,
        )
    ),
    ({"x" * 201: partial(squares, 1)}, "jobs must have names of at most 200 bytes, got 'xxx"),
    ({"ä" * 101: partial(squares, 1)}, "jobs must have names of at most 200 bytes"),
    ({"a": 3}, "jobs must be functions that a module defines"),
    ({"a": squares(1)}, "jobs must be functions that a module defines"),
    ({"a": Callable_()}, "jobs must be functions that a module defines"),
    ({"a": lambda: squares(1)}, "jobs must be functions that a module defines"),
    ({"a": partial(squares)}, "got 'a': missing a required argument: 'count'"),
    ({"a": partial(squares, counts=1)}, "got 'a': "),
    ({"a": partial(squares, demo_tokens(length=2))}, "got 'a': arguments must be numbers, words, .* got Tensor: load"),
    ({"a": partial(squares, {"x": [object()]})}, "got object: load models and make tensors"),
    ({"a": partial(squares, lambda x: x)}, "got function: load models"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("jobs", "message"), REFUSED, ids=range(len(REFUSED)))
def test_jobs_that_cannot_be_are_refused_before_one_runs(jobs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        sweep(jobs, tmp_path / "out")
    assert caught.value.argument == "jobs"
    assert len(str(caught.value)) < 600
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", ["aA", "ßſ", ("é", "e\u0301"), ("Straße", "STRASSE")])
def test_names_of_one_file_are_refused(names: Any, tmp_path: Path) -> None:
    if names == "ßſ":  # two files everywhere
        assert len(sweep({name: partial(squares, 1) for name in names}, tmp_path, progress=False)) == 2
        return
    with pytest.raises(ArgumentError, match="jobs must have names that differ in more than capitals"):
        sweep({name: partial(squares, 1) for name in names}, tmp_path)


def test_a_name_may_have_all_that_files_may(tmp_path: Path) -> None:
    names = ["SmolLM2, 64×8 tokens [L4H2]; a=b", "x" * 200, "ä" * 100, "-", "a.parquet", "a b.c"]
    assert sweep(dict.fromkeys(names, partial(squares, 1)), tmp_path, progress=False)["job"].tolist() == names
    assert sorted(read_results(tmp_path)["job"]) == sorted(names)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("client", [4, "localhost:8786", squares])
def test_what_is_no_client_is_refused(client: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"client must be None or a synchronous dask.distributed.Client, got "):
        sweep(ONE, tmp_path / "out", client)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("out", [__file__, __file__ + "/sweep", "/sys/sweep", 5, None])
def test_a_place_where_no_result_can_be_written_is_refused_before_a_job_runs(out: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="out must be ") as caught:
        sweep({"a": partial(noted, tmp_path, "a")}, out)
    assert caught.value.argument == "out"
    assert list(tmp_path.iterdir()) == []


def test_results_of_no_folder_and_of_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"out must be the folder of a sweep, got .*none"):
        read_results(tmp_path / "none")
    assert list(read_results(tmp_path).columns) == ["job"]
