"""README and documentation do what they say: Python runs and prints what stands there, commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.packaged_models import needs
from support.pages import PAGES, ROOT, blocks, run_python

from tl_posdisent.cli import app

WITH_PYTHON = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"), "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
@pytest.mark.usefixtures("unchecked")
def test_python_runs_as_printed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if any('load_model("smollm2")' in block.text for block in blocks(text, "python")) and page.name != "README.md":
        needs("smollm2")
    assert run_python(text) > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(text, "bash") for line in block.text.splitlines()]
    inline = re.findall(r"`((?:make|tl-posdisent) [^`]*)`", text)
    for line in [*lines, *inline]:
        words = shlex.split(line, comments=True)
        if words:
            check_command(words)


def check_command(words: list[str]) -> None:
    """A line for the shell must be one of those that a reader can type here, with targets and options that exist."""
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        variables = set(re.findall(r"^([A-Z_]+)\s*\??=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        for word in words[1:]:
            name, _, value = word.partition("=")
            assert (name in variables) if value else (name in targets), f"make has no {word}"
    elif words[0] == "tl-posdisent":
        group: Any = typer.main.get_command(app)
        name = words[1] if len(words) > 1 else "--help"
        if name == "--help":
            return
        command = group if name.startswith("-") else group.commands[name]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words[1:]:
            assert not word.startswith("--") or word.split("=")[0] in options | {"--help"}, f"{name} has no {word}"
    elif words[:4] == ["python", "-m", "pip", "install"]:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        extras = re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1], re.MULTILINE)
        for extra in re.findall(r"\[([\w,]+)\]", words[-1]):
            assert set(extra.split(",")) <= set(extras), f"there is no extra {extra}"
    elif words[:3] == ["python", "-m", "venv"] or words[0] in ("cd", "."):
        return
    else:
        script = words[1] if words[0] == "python" else words[0]
        assert (ROOT / script).is_file(), f"unknown command: {shlex.join(words)}"
