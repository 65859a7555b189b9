"""Sweeps in one process: equal work has equal names, results are those of direct calls, what was done stays done."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import json
import os
import pickle
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.processes import started
from support.swept import LAST, SLOW, inodes, wait_for_parts

import tl_posdisent
from tl_posdisent import demo_text, demo_tokens, load_demo_model
from tl_posdisent.sweeps import Job, Text, failures, jobs, sweep
from tl_posdisent.sweeps import runner as worker
from tl_posdisent.sweeps.jobs import experiments_by_name
from tl_posdisent.sweeps.sources import named
from tl_posdisent.sweeps.versions import digest_of, installed_versions
from tl_posdisent.utils.errors import ArgumentError

pytestmark = pytest.mark.slow

TABLES = {"pd.DataFrame", "ContentPosition", "RopeHadamard", "ScoreSources"}
TABLES |= {"SufficientHeads"}
JOB_COLUMNS = ["model", "checkpoint", "step", "text", "seed", "experiment", "arguments", "backend", "dtype", "job"]


def measured(table: pd.DataFrame) -> pd.DataFrame:
    arguments = {name for one in table["arguments"] for name in json.loads(one)} & set(table)
    return table.drop(columns=[*JOB_COLUMNS, *arguments]).reset_index(drop=True)


def test_hash_is_the_same_in_every_process_and_version_of_python() -> None:
    """A stored one, of stored versions."""
    text = Text.of("We hold these truths to be self-evident", length=8)
    job = jobs("EleutherAI/pythia-70m", [("controlled_distance", {"sinks": 1})], text, checkpoints=[1000])[0]
    stored = dataclasses.replace(job, versions="tl-posdisent 0.1.0, torch 2.13.0")
    assert stored.hash == "348050332b6087d001876f7dd5e63d81fda20d17bbc09fedc2777f48be5a4954"


def test_hash_knows_what_is_different_and_nothing_else(tmp_path: Path) -> None:
    base = Job("m", "step1", "", Text.of("some words"), "additivity", "{}")
    changes = {"model": "n", "checkpoint": "step2", "weights": "0" * 64, "text": Text.of("other words"), "seed": 0}
    changes |= {
        "experiment": "disentanglement",
        "arguments": '{"layers":[0]}',
        "backend": "bridge",
        "dtype": "bfloat16",
    }
    changes["versions"] = "tl-posdisent 0.1.1"
    others = [dataclasses.replace(base, **{name: value}) for name, value in changes.items()]
    others.append(dataclasses.replace(base, text=Text.of("some words", length=3)))
    assert len({job.hash for job in [base, *others]}) == 12
    forward, backward = {"sinks": 2, "layers": range(2)}, {"layers": [0, 1], "sinks": 2}
    one, two = (jobs("demo", ("controlled_distance", x), "demo")[0] for x in (forward, backward))
    assert one == two
    assert one.hash == two.hash == pickle.loads(pickle.dumps(one)).hash
    for name in ("a.txt", "b.txt"):  # the same words elsewhere are the same text, also when not in a file
        (tmp_path / name).write_text("some words", encoding="utf-8")
    found = {jobs("demo", "additivity", x)[0].hash for x in (tmp_path / "a.txt", tmp_path / "b.txt", "some words")}
    assert len(found) == 1
    ids, words = Text.of([[1, 2]]), Text.of("[[1, 2]]")
    assert (ids.sha256, ids.described()) != (words.sha256, words.described())  # same bytes, not the same text


@pytest.fixture
def upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Install another version of transformers, or remove it again, as far as metadata tell."""
    metadata = tmp_path / "site" / "transformers-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n", encoding="utf-8")

    def change(to_newer: bool) -> None:
        if to_newer:
            monkeypatch.syspath_prepend(tmp_path / "site")
        else:
            monkeypatch.undo()
        installed_versions.cache_clear()

    yield change
    change(False)


def test_results_of_other_versions_are_not_used_and_said(tmp_path: Path, upgraded: Callable[[bool], None]) -> None:
    out = tmp_path / "out"
    before = jobs("demo", LAST, Text.of("demo", length=32, count=2).split(2))
    old = sweep(before, out=out, progress=False)
    (first,) = {job.versions for job in before}
    upgraded(True)
    todo = jobs("demo", LAST, Text.of("demo", length=32, count=2).split(2))
    assert "transformers 99.0" in todo[0].versions
    assert not {job.hash for job in before} & {job.hash for job in todo}
    with pytest.warns(UserWarning, match="2 of 2 jobs have results of other versions") as warned:
        new = sweep(todo, out=out, progress=False)
    assert all(versions in str(warned[0].message) for versions in (first, todo[0].versions))
    assert len(inodes(out)) == 4
    pd.testing.assert_frame_equal(old.drop(columns="job"), new.drop(columns="job"), check_exact=True)
    with pytest.warns(UserWarning, match="1 of 1 jobs failed"):  # a worker with other versions than the caller
        sweep([dataclasses.replace(before[0], seed=1)], out=out, progress=False)
    (row,) = failures(out).to_dict("records")
    assert row["message"].startswith(f"the versions of the job, {first}, are not those of the process that runs it")
    assert row["versions"] == first
    upgraded(False)
    kept = inodes(out)
    pd.testing.assert_frame_equal(
        sweep(before, out=out, progress=False), old, check_exact=True
    )  # found, without a warning
    assert inodes(out) == kept


def test_sources_are_part_of_the_version(tmp_path: Path) -> None:
    package = Path(tl_posdisent.__file__).parent
    copy = shutil.copytree(package, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    assert digest_of(package) == digest_of(copy)
    assert f"tl-posdisent {version('tl-posdisent')} (sources {digest_of(package)})" in installed_versions()
    file = copy / "additive" / "cells.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert digest_of(package) != digest_of(copy)


@pytest.mark.parametrize(("seeds", "drawn"), [([3, 5], [3, 5]), (2, [0, 1])])
def test_product_is_complete_and_seeds_go_where_they_are_taken(seeds: Any, drawn: list[int]) -> None:
    todo = jobs("demo", [LAST, ("perturbation_curve", {"fractions": [0.5]})], ["demo", "words"], seeds=seeds)
    runs = [("additivity", None), *(("perturbation_curve", seed) for seed in drawn)]
    assert [(job.text.kind, job.experiment, job.seed) for job in todo] == [
        (kind, *run) for kind in ("demo", "words") for run in runs
    ]


def test_experiments_are_the_public_functions_that_make_a_table_of_a_model_and_tokens() -> None:
    """Found by their signatures: all that need no metric, which JSON cannot give, and no other kind of result."""
    found = experiments_by_name()
    rooms = (tl_posdisent, tl_posdisent.experiments, tl_posdisent.synthetic, tl_posdisent.sweeps)
    for name in {name for room in rooms for name in room.__all__}:
        public = next(getattr(room, name) for room in rooms if name in room.__all__)
        parameters = list(inspect.signature(public).parameters) if inspect.isfunction(public) else []
        result = inspect.signature(public).return_annotation if parameters else None
        tabulates = parameters[:2] == ["model", "tokens"] and result in TABLES
        assert (found.get(name) is public) == (tabulates and name != "head_patching"), name


def test_results_are_those_of_direct_calls_to_the_last_bit(tmp_path: Path) -> None:
    texts = Text.of("demo", length=64, count=2).split(2)
    curve = ("perturbation_curve", {"fractions": [0.5], "kinds": ["order"]})
    todo = jobs("demo", ["controlled_distance", curve], texts, seeds=[7])
    table = sweep(todo[::-1], out=tmp_path, progress=False)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo[::-1]]
    assert list(table.columns[:10]) == JOB_COLUMNS
    model = load_demo_model()
    ids = model.to_tokens(demo_text(), truncate=False)[0, 1:]
    for n, text in enumerate(texts):
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), ids[63 * n : 63 * (n + 1)]])[None]
        assert torch.equal(text.tokens(model), tokens)
        mine = table[table["text"] == text.name]
        direct = tl_posdisent.controlled_distance(model, tokens, progress=False)
        shown = measured(mine[mine["experiment"] == "controlled_distance"])[direct.columns]
        pd.testing.assert_frame_equal(shown.astype(direct.dtypes), direct, check_exact=True)
        direct = tl_posdisent.perturbation_curve(model, tokens, **curve[1], seeds=[7], progress=False)
        of_curve = mine[mine["experiment"] == "perturbation_curve"]
        assert set(of_curve["seed"]) == {7}
        shared = [name for name in direct.columns if name != "seed"]
        shown = measured(of_curve)[shared].astype(direct[shared].dtypes)
        pd.testing.assert_frame_equal(shown, direct[shared], check_exact=True)


def test_interventions_by_name_are_arguments_of_a_job(tmp_path: Path) -> None:
    interventions = {"d": ["dummy_distance", {"distance": 5}], "mean": ["ablate_heads", {"mode": "mean"}]}
    arguments = {"interventions": interventions, "layers": [4], "draws": 1, "exact": 2}
    todo = jobs("demo", ("head_effects", arguments), Text.of("demo", length=32, count=2), seeds=[3])
    table = sweep(todo, out=tmp_path, progress=False)
    tokens = Text.of("demo", length=32, count=2).tokens(load_demo_model())
    direct = tl_posdisent.head_effects(load_demo_model(), tokens, **arguments, seed=3, progress=False)
    pd.testing.assert_frame_equal(table[[*direct]].astype(direct.dtypes), direct, rtol=1e-5)


def test_beginnings_of_the_demo_text_are_demo_tokens() -> None:
    assert torch.equal(Text.of("demo", length=100).tokens(load_demo_model()), demo_tokens(length=100))
    later = Text.of("demo", length=51, count=2, first=1).tokens(load_demo_model())
    assert torch.equal(later[:, 1:].flatten(), demo_tokens(length=151)[0, 51:])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "of another job"])
def test_damaged_parts_are_noticed_and_done_again(tmp_path: Path, damage: str) -> None:
    todo = jobs("demo", LAST, Text.of("demo", length=32, count=2).split(2))
    whole = sweep(todo, out=tmp_path, progress=False)
    parts = [tmp_path / "parts" / f"{job.hash}.parquet" for job in todo]
    kept, content = inodes(tmp_path)[parts[1].name], bytearray(parts[0].read_bytes())
    if damage == "flipped":
        content[40] ^= 16  # in the first page of numbers
    parts[0].write_bytes({"cut": content[: len(content) * 2 // 3], "empty": b""}.get(damage, bytes(content)))
    if damage == "of another job":
        shutil.copy(parts[1], parts[0])
    pd.testing.assert_frame_equal(sweep(todo, out=tmp_path, progress=False), whole, check_exact=True)
    assert inodes(tmp_path)[parts[1].name] == kept


def test_failed_jobs_are_written_down_and_retried_on_request(tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "out"
    file.write_text(demo_text(), encoding="utf-8")
    todo = jobs("demo", LAST, [Text.of(file, length=32), Text.of("demo", length=32, first=3)])
    file.write_text("changed", encoding="utf-8")
    with pytest.warns(UserWarning, match="1 of 2 jobs failed"):
        table = sweep(todo, out=out, progress=False)
    assert table.attrs["failed"] == [todo[0].hash]
    assert set(table["job"]) == {todo[1].hash}  # the other did not suffer
    (row,) = failures(out).to_dict("records")
    assert (row["job"], row["error"], row["experiment"]) == (todo[0].hash, "ValueError", "additivity")
    written = json.loads((out / "failed" / f"{todo[0].hash}.json").read_text(encoding="utf-8"))
    assert written["arguments"] == '{"layers":[4]}'
    with pytest.warns(UserWarning, match="1 of 1 jobs failed"):
        nothing = sweep(todo[:1], out=out, progress=False)
    assert nothing.empty
    assert list(nothing.columns) == JOB_COLUMNS
    assert "has changed since this job was created" in row["message"]
    assert "sources.py" in row["traceback"]
    file.write_text(demo_text(), encoding="utf-8")  # the cause is removed, but a retry is not requested
    with pytest.warns(UserWarning, match="1 of 2 jobs failed"):
        sweep(todo, out=out, progress=False)
    kept = inodes(out)
    table = sweep(todo, out=out, retry=True, progress=False)
    assert set(table["job"]) == {job.hash for job in todo}
    assert failures(out).empty
    assert table.attrs["failed"] == []
    assert kept.items() <= inodes(out).items()


def test_one_model_at_a_time_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Any]] = []

    def load(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        assert not [model for model in models if model() is not None]
        model = loads(*arguments, **options)
        models.append(weakref.ref(model))
        return model

    worker.forget()  # what another test has left
    loads = worker.load
    monkeypatch.setattr(worker, "load", load)
    texts = Text.of("demo", length=16, count=2).split(2)
    backends = [jobs("demo", LAST, text, dtype=dtype) for text in texts for dtype in ("float32", "float64")]
    # Asked for in turns, and done model by model.
    table = sweep([*itertools.chain(*backends)], out=tmp_path, progress=False)
    assert len(models) == 2
    assert table["job"].drop_duplicates().tolist() == [job.hash for pair in backends for job in pair]
    gc.collect()
    assert not [model for model in models if model() is not None]


def six_slow_jobs(out: Path) -> None:
    sweep(jobs("demo", SLOW, Text.of("demo", length=32, count=6).split(6)), out=out)


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    with started(six_slow_jobs, tmp_path) as process:
        wait_for_parts(tmp_path, 2, process)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    before = inodes(tmp_path)
    todo = jobs("demo", SLOW, Text.of("demo", length=32, count=6).split(6))
    assert 2 <= len(before) < 6, "killed too late to mean anything"
    assert all(tl_posdisent.sweeps.runner.read_part(tmp_path, job) is not None for job in todo[: len(before)])
    (tmp_path / "parts" / f".{todo[-1].hash}.0123.unfinished").write_bytes(b"PAR1")  # killed while writing
    table = sweep(todo, out=tmp_path, progress=False)
    assert before.items() <= inodes(tmp_path).items()
    assert sorted(os.listdir(tmp_path / "parts")) == sorted(f"{job.hash}.parquet" for job in todo)
    assert table["job"].drop_duplicates().tolist() == [job.hash for job in todo]
    direct = tl_posdisent.head_labels(load_demo_model(), demo_tokens(length=32), **SLOW[1], progress=False)
    mine = table[table["job"] == todo[0].hash]
    pd.testing.assert_frame_equal(measured(mine).astype(direct.dtypes), direct, check_exact=True)


def test_a_second_sweep_on_a_folder_is_refused(tmp_path: Path) -> None:
    """Unless all of its jobs are done. Nothing of the first is deleted, and what it is writing is finished."""
    todo = jobs("demo", SLOW, Text.of("demo", length=32, count=6).split(6))
    with started(six_slow_jobs, tmp_path) as process:
        wait_for_parts(tmp_path, 2, process)
        os.kill(process.pid, signal.SIGSTOP)
        (tmp_path / "parts" / f".{todo[-1].hash}.0123.unfinished").write_bytes(b"PAR1")  # being written
        with pytest.raises(ValueError, match=r"out must be a folder that no other process writes to, .* another sweep"):
            sweep(todo, out=tmp_path, progress=False)
        assert (tmp_path / "parts" / f".{todo[-1].hash}.0123.unfinished").exists()
        assert sweep(todo[:1], out=tmp_path, progress=False)["job"].unique() == [todo[0].hash]
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == 0
    assert sweep(todo, out=tmp_path, progress=False)["job"].nunique() == 6


@pytest.mark.parametrize("content", [b"{", b"[]", None])
def test_a_damaged_reason_of_a_failure_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "failed" / "0123.json"
    path.parent.mkdir()
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"out must be the folder of a sweep, but .*0123.json in it is damaged"):
        failures(tmp_path)


def test_a_file_where_a_folder_of_the_sweep_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "parts").write_bytes(b"")
    with pytest.raises(FileExistsError, match="parts"):
        sweep(jobs("demo", LAST, Text.of("demo", length=32)), out=tmp_path, progress=False)


class Submits:
    """What has only the method of an executor that is called first, as submitit's executor has."""

    def submit(self, function: Any, *arguments: Any) -> Any:
        raise AssertionError("it is asked")


class Asynchronous(Submits):
    """A client of dask whose results an event loop awaits."""

    asynchronous = True

    def get_executor(self) -> Any:
        raise AssertionError("it is asked")


class NoFutures(Executor):
    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
        return object()


BAD = [
    (lambda: jobs("demo", "load_model", "demo"), "experiment"),
    (lambda: jobs("demo", ("additivity", {"layer": 3}), "demo"), "arguments"),
    (lambda: jobs("demo", "content_position_terms", "demo"), "arguments"),
    (lambda: jobs("demo", ("additivity", {"mask": torch.ones(2)}), "demo"), "arguments"),
    (lambda: jobs("demo", ("additivity", 3), "demo"), "experiments"),
    (lambda: jobs(3, "additivity", "demo"), "models"),
    (lambda: jobs("demo", "additivity", 3), "texts"),
    (lambda: jobs("demo", "additivity", {"demo": 1}), "texts"),
    (lambda: jobs("demo", "additivity", [1, 2, 3]), "texts"),
    (lambda: jobs("demo", "additivity", torch.tensor([1, 2])), "texts"),
    (lambda: jobs("demo", "additivity", [[2**70]]), "text"),
    (lambda: jobs("demo", "perturbation_curve", "demo", seeds=10**9), "seeds"),
    (lambda: jobs("demo", "perturbation_curve", "demo", seeds=range(10**30)), "seeds"),
    (lambda: jobs("demo", "perturbation_curve", "demo", seeds=10**6), "must make at most 100000 jobs, got 1000000"),
    (
        lambda: Text.of("demo", length=8, count=10**12).split(10**12),
        "parts",
    ),
    (lambda: jobs("demo", "additivity", "demo", seeds=[1]), "seeds"),
    (lambda: jobs("demo", ("perturbation_curve", {"seeds": [1]}), "demo", seeds=[1]), "seeds"),
    (lambda: jobs("demo", "additivity", "demo", checkpoints=[3]), "checkpoint"),
    (lambda: jobs("demo", "additivity", "demo", checkpoints="all"), "folder"),
    (lambda: jobs("./nowhere", "additivity", "demo"), "model"),
    (lambda: jobs([], "additivity", "demo"), "must each have at least one entry, got none"),
    (lambda: jobs("demo", "additivity", "demo", dtype="int8"), "dtype"),
    (lambda: Text.of(Path("nowhere.txt")), "text"),
    (lambda: Text.of(__file__), "text"),
    (lambda: Text.of([1.5]), "text"),
    (lambda: Text.of("demo", count=2), "length"),
    (lambda: Text.of("demo", length=1), "length"),
    (lambda: Text.of("demo", length=8, count=0), "count"),
    (lambda: Text.of([1, 2], length=8), "length"),
    (lambda: Text.of("demo", length=8).split(0), "parts"),
    (lambda: Text.of("demo", length=4000).tokens(load_demo_model()), "text"),
    (lambda: sweep([], out="nowhere"), "jobs"),
    (lambda: sweep(["additivity"], out="nowhere"), "jobs"),
    (lambda: sweep(jobs("demo", LAST, "demo"), 4, out="nowhere"), "executor"),
    (lambda: sweep(jobs("demo", LAST, "demo"), Submits(), out="nowhere"), "executor"),
    (lambda: sweep(jobs("demo", LAST, "demo"), Asynchronous(), out="nowhere"), "executor"),
    (lambda: sweep(jobs("demo", LAST, "demo"), out=__file__), "out"),
    (lambda: sweep(jobs("demo", LAST, "demo"), out=__file__ + "/sweep"), "out"),
    (lambda: sweep(jobs("demo", LAST, "demo"), out="/sys/sweep"), "out"),
    (lambda: sweep(jobs("demo", LAST, "demo"), out=5), "out"),
    (lambda: Text.of(" "), "text"),
    (lambda: failures("nowhere"), "out"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "named"), BAD)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(call: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        call()
    assert getattr(caught.value, "argument", named) == named
    assert not Path("nowhere").exists()


def test_a_mistyped_number_of_parts_takes_no_memory() -> None:
    text = Text.of("demo", length=8, count=3)
    assert text.split(10**12) == text.split(3)


def test_threads_run_jobs_too(tmp_path: Path) -> None:
    todo = jobs("demo", LAST, Text.of("demo", length=16))
    with ThreadPoolExecutor(1) as threads:
        assert sweep(todo, threads, out=tmp_path, progress=False)["job"].unique() == [todo[0].hash]


def test_an_executor_whose_jobs_are_no_futures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"executor must be .* got NoFutures: .* calls sweep\(..., part=\(i, n\)\)"):
        sweep(jobs("demo", LAST, Text.of("demo", length=16)), NoFutures(), out=tmp_path, progress=False)


@pytest.mark.parametrize("length", [255, 5000])
def test_words_of_any_length_are_words(length: int) -> None:
    """Also where no file may have so long a name, with characters that no name has, and as the name of a model."""
    words = ("a word " * length)[:length]
    for text in (words, words.replace(" ", "/"), words.replace(" ", "\0"), "x" * length):
        assert Text.of(text).source == text
    assert named("x" * length, None) == ("x" * length, None, "")
    with pytest.raises(ValueError, match="text must be a readable UTF-8 file"):
        Text.of(Path("x" * length))
