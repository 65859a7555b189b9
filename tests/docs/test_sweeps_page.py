"""The page on sweeps: its job array and its dask cluster do what it says, in processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.command_line import run_command
from support.pages import ROOT, blocks
from support.processes import copies, run, started, time_limit, wait_until
from support.swept import LAST, imitate, inodes

from tl_posdisent.sweeps import Text, jobs, sweep

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
(SCRIPT,) = blocks(PAGE, "sh")


def words_of_task(script: str, number: int, folder: Path) -> list[str]:
    """Return the arguments with which ``bash`` calls ``tl-posdisent`` in a task of the array."""
    stub = folder / "tl-posdisent"
    stub.write_text(
        f'#!/bin/bash\nexec "{sys.executable}" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n'
    )
    stub.chmod(0o755)
    (folder / "sweep.sh").write_text(script, encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    done = run("bash", folder / "sweep.sh", env={**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": str(number)})
    words: list[str] = json.loads(done.stdout)
    return words


def run_task(words: list[str], folder: Path) -> None:
    imitate(folder)
    run_command(shlex.join(words))


def test_the_job_array_with_a_killed_part(tmp_path: Path) -> None:
    """Its four parts side by side, the third killed after its first job and started again; the whole joins them."""
    out = tmp_path / "out"
    script = SCRIPT.text.replace("/shared/sweep", str(out))
    (first, last), (count,) = re.findall(r"--array=(\d+)-(\d+)", script)[0], re.findall(r"TASK_ID/(\d+)", script)
    assert (first, last) == ("1", count)
    tasks = [words_of_task(script, number, tmp_path) for number in range(1, int(last) + 1)]
    assert [task[-2:] for task in tasks] == [["--part", f"{n}/4"] for n in (1, 2, 3, 4)]
    texts = Text.of("demo", length=32, count=8).split(8)
    todo = jobs("demo", ("head_labels", {"layers": [4], "seeds": 3}), texts)
    third = [out / "parts" / f"{job.hash}.parquet" for job in todo[4:6]]
    with contextlib.ExitStack() as held, time_limit():
        running = [held.enter_context(started(run_task, task, tmp_path)) for task in tasks]
        wait_until(lambda: any(path.exists() for path in third), running[2])
        running[2].kill()
        running[2].join()
        before = {path: path.stat().st_ino for path in third if path.exists()}
        assert len(before) < 2, "killed too late to mean anything"
        again = held.enter_context(started(run_task, tasks[2], tmp_path))
        for process in (running[0], running[1], running[3], again):
            process.join()
            assert process.exitcode == 0
    assert {path: path.stat().st_ino for path in before} == before
    devices = Counter(path.read_text(encoding="utf-8").strip() for path in tmp_path.glob("*.txt"))
    assert set(devices) == {"imitated:0", "imitated:1"}
    assert devices.total() == 5
    kept = inodes(out)
    assert len(kept) == 8
    (line,) = (block.text for block in blocks(PAGE, "bash") if "/shared/sweep" in block.text)
    line = line.replace("/shared/sweep", str(out)).replace("table.csv", str(tmp_path / "table.csv"))
    run_command(line.removeprefix("tl-posdisent "))
    assert inodes(out) == kept
    whole = sweep(todo, out=out, progress=False)
    assert whole["job"].drop_duplicates().tolist() == [job.hash for job in todo]
    assert len(pd.read_csv(tmp_path / "table.csv")) == len(whole)
    alone = sweep(todo[4:5], out=tmp_path / "alone", progress=False)
    of_third = whole[whole["job"].isin(alone["job"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_third, alone, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")  # and then dask leaves a socket of its own open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_dask_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are copies of a process that has imported TransformerLens."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    (block,) = (block.text for block in blocks(PAGE, "py") if "LocalCluster" in block.text)
    names: dict[str, Any] = {
        "sweep": sweep,
        "todo": jobs("demo", LAST, Text.of("demo", length=32, count=4).split(4)),
    }
    copies()
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}), time_limit():
        exec(compile(block, "<page>", "exec"), names)
    pd.testing.assert_frame_equal(names["table"], sweep(names["todo"], out="alone", progress=False), check_exact=True)
    assert len(list(Path("out/sweep/parts").iterdir())) == 4
