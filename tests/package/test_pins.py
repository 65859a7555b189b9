"""Every environment of the checks holds fixed versions alone, so that a release of others cannot fail them."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.pages import ROOT

pytestmark = pytest.mark.tl4

PINS = {".venv": "dev", ".venv-tl4": "tl4"}
# What Python's own venv brings, and torch, which a user of the Makefile may choose.
FREE = {"pip", "setuptools", "torch", "tl-posdisent"}


def pinned(environment: str) -> dict[str, str]:
    """Name and version of each line of an environment's constraints."""
    text = (ROOT / "requirements" / f"{PINS[environment]}.txt").read_text(encoding="utf-8")
    return {canonicalize_name(name): number for name, number in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)}


@pytest.mark.skipif(
    "CI" not in os.environ or Path(sys.prefix).name not in PINS, reason="not an environment of the checks, made anew"
)
def test_whatever_is_installed_has_the_version_that_is_written_down() -> None:
    expected = pinned(Path(sys.prefix).name)
    found = {canonicalize_name(x.metadata["Name"]): x.version.split("+")[0] for x in distributions()}
    assert len(found) > 50
    assert {name: number for name, number in found.items() if name not in FREE and expected.get(name) != number} == {}
