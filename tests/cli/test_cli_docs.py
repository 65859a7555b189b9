"""The page on the command line shows what the commands print."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_command
from support.pages import ROOT, assert_prints, blocks

from tl_posdisent.models.loading.load import has_hooked

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
SHOWN = [block for block in blocks(PAGE, "bash") if block.printed is not None]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: shlex.split(block.text)[1])
def test_it_prints_what_the_page_says(block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(block.text)
    if not has_hooked() and "random" in block.printed:
        pytest.skip("the page shows random weights of a HookedTransformer")
    monkeypatch.chdir(tmp_path)
    result = run_command(shlex.join(words[1:]), "--no-progress")
    assert_prints(result.stdout, block.printed)
