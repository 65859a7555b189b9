"""The page of results is written from the tables of studies, and says nothing that they do not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from support.pages import ROOT

STUDIES = ROOT / "docs" / "studies"


@pytest.fixture(scope="module")
def findings() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDIES))
        import results_page
        from shared import claims

        yield SimpleNamespace(claims=claims, page=results_page)


@pytest.fixture(scope="module")
def shown(findings: Any) -> dict[str, list[tuple[str, str, str, int]]]:
    """What is measured, study, row and length, of each claim and each finding."""
    parts = {"A": findings.claims.CLAIMS_A, "findings": findings.claims.FINDINGS}
    numbered = [(part, n, claim[0]) for part, claims in parts.items() for n, claim in enumerate(claims, 1)]
    tables = {claim: findings.page.lines(part, n).drop(columns=["part", "number"]) for part, n, claim in numbered}
    return {claim: list(table.itertuples(index=False, name=None)) for claim, table in tables.items()}


def test_the_page_is_what_the_tables_give(findings: Any) -> None:
    """Otherwise: python docs/studies results_page"""
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == findings.page.page()


def test_every_line_is_a_row_of_a_table(findings: Any, shown: dict[str, Any]) -> None:
    known = set().union(*findings.page.tables().values())
    assert len(pd.read_csv(STUDIES / "tables" / "results_page.csv")) == sum(map(len, shown.values()))
    for claim, lines in shown.items():
        assert lines
        for label, *key in lines:
            assert tuple(key) in known, (claim, label)


def test_every_line_is_a_row_of_the_page(findings: Any, shown: dict[str, Any]) -> None:
    tables = re.findall(r"^\| measured \|.*\n\|-.*\n((?:\|.*\n)+)", findings.page.page(), re.MULTILINE)
    written = [[row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()] for table in tables]
    assert written == [[label for label, *_ in lines] for lines in shown.values()]


def test_a_control_stands_beside_trained_weights_at_the_same_setting(findings: Any, shown: dict[str, Any]) -> None:
    """A claim that prints a row of other weights prints it for each row that it has of trained ones, and vice versa."""
    of_weights = [findings.claims.TRAINED, *findings.claims.CONTROLS]
    compared = 0
    for claim, lines in shown.items():
        settings: dict[str, set[Any]] = {}
        for _, study, row, length in lines:
            what, _, weights = row.rpartition(", ")
            if weights in of_weights:
                settings.setdefault(weights, set()).add((study, what, length))
        compared += len(settings) > 1
        for weights in set(settings) - {findings.claims.TRAINED}:
            assert settings[weights] == settings[findings.claims.TRAINED], (claim, weights)
    assert compared >= 5


def test_what_changes_two_things_at_once_stands_beside_what_changes_one(findings: Any, shown: dict[str, Any]) -> None:
    """In the same table, for the same text and length."""
    for both, controls in findings.claims.TWO_AT_ONCE.items():
        changed = [(key, lines) for lines in shown.values() for _, *key in lines if both in key[1]]
        assert changed, both
        for (study, name, length), lines in changed:
            keys = {tuple(key) for _, *key in lines}
            for control in controls:
                assert (study, name.replace(both, control), length) in keys, (name, control)


def test_there_are_at_most_eight_findings_and_each_names_its_attack(findings: Any) -> None:
    assert len(findings.claims.FINDINGS) <= 8
    assert all(each.attack for each in findings.claims.FINDINGS)
    assert all(each.why for each in [*findings.claims.CLAIMS_A, *findings.claims.CLAIMS_B])


def test_tables_of_another_folder_take_the_place_of_ours(findings: Any, tmp_path: Path) -> None:
    rows = pd.read_csv(STUDIES / "tables" / "smollm2_demo.csv")
    rows.loc[rows["name"] == "r_two_axis, trained", ["value", "error"]] = 0.123, 0.04
    rows.to_csv(tmp_path / "smollm2_demo.csv", index=False)
    assert "0.12±0.04" in findings.page.page(tmp_path)
    assert "0.12±0.04" not in findings.page.page()


def test_numbers_of_synthetic_models_are_those_of_their_page(findings: Any) -> None:
    page = (ROOT / "docs" / "deposit.md").read_text(encoding="utf-8")
    for each in findings.claims.CLAIMS_B:
        for number in re.findall(r"\d\.\d+", re.sub("{.*?}", "", each.here + each.why)):
            assert number in page, (each.claim, number)
