"""Every study is listed with what it is, can be imported, imports public names, and has one function that runs it."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from support.pages import ROOT

STUDIES = ROOT / "docs" / "studies"
NAMES = sorted(path.stem for path in STUDIES.glob("*.py") if path.stem != "__main__")
KINDS = ("rows", "synthetic_rows", "table", "main")


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


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("*.py")), ids=lambda path: path.stem)
def test_a_study_imports_names_of_the_stubs(path: Path) -> None:
    """No name of a module, and nothing private."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tl_posdisent":
            folder = ROOT.joinpath(*node.module.split("."))
            assert (folder / "__init__.pyi").is_file(), node.module
            public = {alias.asname for x in stub(folder) for alias in x.names}
            assert {alias.name for alias in node.names} <= public, node.module


def stub(folder: Path) -> list[ast.ImportFrom]:
    tree = ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ImportFrom)]


def test_every_figure_is_shown_by_a_page() -> None:
    from figures import FIGURES

    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for draw in FIGURES:
        assert (STUDIES.parent / "figures" / f"{draw.__name__}.svg").is_file()
        assert f"figures/{draw.__name__}.svg" in pages


def test_every_table_is_read() -> None:
    """By a page, a notebook or a study; a study ``NAME`` of one model writes ``MODEL/NAME.csv``."""
    readers = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.ipynb"), *STUDIES.rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in readers)
    for table in (STUDIES / "tables").rglob("*.csv"):
        assert table.stem in NAMES or f"{table.stem}.csv" in text or f'"{table.stem}"' in text, table


def test_findings_are_the_studies_of_the_page_of_results() -> None:
    from shared.running import FINDINGS, SYNTHETIC

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
    shown = [
        deposit_positions.summary(positions),
        deposit_small.summary(small),
        deposit_96_tables.summary(large),
        deposit_96_tables.by_distances(large),
        deposit_correlations.by_encoding(length),
        deposit_correlations.correlations(length),
    ]
    page = (STUDIES.parent / "deposit.md").read_text(encoding="utf-8")
    written = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert [table.rstrip() for table in written[1:]] == [markdown(table) for table in shown]

    assert sorted(positions["encoding"].unique()) == ["mla", "rope"]
    for encoding, seeds in positions.groupby("encoding"):
        accuracy, largest, second = (spread(seeds[name]) for name in ("accuracy", "zero_drop", "zero_second"))
        heads = spread(seeds["zero_effective_heads"], 1)
        assert f"\n| {SMALL_NAMES[str(encoding)]} | {accuracy} | {largest} | {second} | {heads} |" in written[0]
