"""Which versions are allowed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import zoo
from support.pages import ROOT

import tl_posdisent as tp

pytestmark = [pytest.mark.tl4, pytest.mark.oldest]

NEEDED = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
]


def _lowest(requirement: Requirement) -> str:
    (lowest,) = [s.version for s in requirement.specifier if s.operator == ">="]
    return lowest


def test_the_oldest_lane_takes_what_pyproject_allows() -> None:
    lines = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("#")[0].strip().lower().split("==") for line in lines if "==" in line.split("#")[0])
    for requirement in NEEDED:
        if requirement.name == "torch":
            assert "torch" not in pinned  # the Makefile says, which lets a user say so too
            continue
        lowest = _lowest(requirement)
        assert re.fullmatch(re.escape(lowest) + r"(\.0)*", pinned[requirement.name]), requirement.name


def test_the_page_has_every_upper_bound() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    bounds = [f"{x.name}{s}" for x in NEEDED for s in x.specifier if s.operator == "<"]
    assert len(bounds) == 3
    assert [bound for bound in bounds if f"`{bound}`" not in page] == []


def test_auto_takes_the_class_that_is_there() -> None:
    expected = "HookedTransformer" if zoo.TL_MAJOR < 4 else "TransformerBridge"
    assert type(tp.load_demo_model(backend="auto")).__name__ == expected


def test_a_transformer_lens_without_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tl_posdisent.models.loading.load.has_bridge", lambda: False)
    falcon = zoo.hf_model("falcon")
    for ask in (lambda: tp.load_demo_model(backend="bridge"), lambda: tp.bridge_from_hf(falcon)):
        with pytest.raises(ValueError, match=r"backend='bridge' needs TransformerLens 3\.4 or newer, \d.* is inst"):
            ask()
    if zoo.TL_MAJOR < 4:
        falcon.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="cannot convert FalconForCausalLM to a HookedTransformer"):
            tp.load_model(tmp_path)
