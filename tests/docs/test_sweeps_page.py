"""The page on sweeps: its dask cluster does what it says, in processes of this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT, blocks
from support.processes import copies, time_limit
from support.swept import measured

from tl_posdisent.sweeps import sweep

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Port 8787:UserWarning")  # and then dask leaves a socket of its own open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_dask_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are copies of a process that has imported TransformerLens."""
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    (block,) = (block.text for block in blocks(PAGE, "py") if "LocalCluster" in block.text)
    jobs = {f"{length}": partial(measured, length, [4]) for length in (16, 24, 32, 40)}
    names: dict[str, Any] = {"sweep": sweep, "jobs": jobs}
    copies()
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}), time_limit():
        exec(compile(block, "<page>", "exec"), names)
    assert sorted(path.stem for path in Path("out/sweep").iterdir()) == sorted(jobs)
    pd.testing.assert_frame_equal(names["table"], sweep(jobs, "alone", progress=False), rtol=1e-5)
