"""Every study is listed with what it is, can be imported, and has one function that runs it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.pages import ROOT

STUDIES = ROOT / "docs" / "studies"
NAMES = sorted(path.stem for path in STUDIES.glob("*.py") if path.stem != "__main__")
KINDS = ("rows", "synthetic_rows", "table", "figure", "main")


@pytest.fixture(autouse=True)
def path_of_studies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        yield


def test_the_list_names_every_study() -> None:
    command = [sys.executable, str(STUDIES), "--list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_study_has_one_function_that_runs_it(name: str) -> None:
    module = importlib.import_module(name)
    assert sum(callable(getattr(module, kind, None)) for kind in KINDS) == 1
    if hasattr(module, "figure"):
        assert (STUDIES.parent / "figures" / f"{name.removesuffix('_figure')}.svg").is_file()


def test_findings_are_the_studies_of_the_page_of_results() -> None:
    from shared.writing import FINDINGS, SYNTHETIC

    assert sorted(FINDINGS) == [name for name in NAMES if hasattr(importlib.import_module(name), "rows")]
    assert sorted(SYNTHETIC) == [name for name in NAMES if hasattr(importlib.import_module(name), "synthetic_rows")]
