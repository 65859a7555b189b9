"""Every study is listed with what it is, can be imported, and has one function that runs it."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from collections.abc import Iterator

import pandas as pd
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


def test_the_list_names_every_study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(STUDIES), "--list"])
    runpy.run_path(str(STUDIES), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
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


def test_tables_of_the_page_on_the_deposit_are_those_of_its_studies() -> None:
    """The first one, of the two tasks of [B], has none; its numbers of two encodings on one task are in another's."""
    import deposit_96_tables
    import deposit_correlations
    import deposit_positions
    import deposit_small
    from shared.deposits import SMALL_NAMES, markdown, spread

    small, positions, length, large = (
        pd.read_csv(STUDIES / "tables" / f"deposit_{name}.csv")
        for name in ("small", "positions", "and_length", "96_heads")
    )
    large = large[large["task"] != "count"]
    correlations = deposit_correlations.correlations(length).query("concentration == 'share' and length == '1.5'")
    shown = [
        deposit_positions.summary(positions),
        deposit_small.summary(small),
        deposit_96_tables.summary(large),
        deposit_96_tables.by_distances(large),
        deposit_correlations.by_encoding(length),
        correlations.drop(columns=["concentration", "length", deposit_correlations.CONTROLS[0]]),
    ]
    page = (STUDIES.parent / "deposit.md").read_text(encoding="utf-8")
    written = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert [table.rstrip() for table in written[1:]] == [markdown(table) for table in shown]

    assert sorted(positions["encoding"].unique()) == ["mla", "rope"]
    for encoding, seeds in positions.groupby("encoding"):
        accuracy, largest, second = (spread(seeds[name]) for name in ("accuracy", "zero_drop", "zero_second"))
        heads = spread(seeds["zero_effective_heads"], 1)
        assert f"\n| {SMALL_NAMES[str(encoding)]} | {accuracy} | {largest} | {second} | {heads} |" in written[0]
