"""Which versions are allowed."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from support import zoo
from support.pages import ROOT

import tl_posdisent as tp

pytestmark = pytest.mark.tl4

NEEDED = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
]


def test_the_page_has_every_upper_bound() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    bounds = [f"{x.name}{s}" for x in NEEDED for s in x.specifier if s.operator == "<"]
    assert len(bounds) == 2
    assert [bound for bound in bounds if f"`{bound}`" not in page] == []


def test_auto_takes_the_class_that_is_there() -> None:
    expected = "HookedTransformer" if zoo.TL_MAJOR < 4 else "TransformerBridge"
    assert type(tp.load_demo_model(backend="auto")).__name__ == expected
