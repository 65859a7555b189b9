"""The workflow for a code host runs what ``.ci/run`` runs, on every Python that the package names."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from support.pages import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
(JOB,) = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))["jobs"].values()
MATRIX: dict[str, Any] = JOB["strategy"]["matrix"]
COMMANDS = [*MATRIX["target"], *(each["target"] for each in MATRIX["include"])]
ARGS = r"""ARGS=(['"])(.*?)\1"""


def words(commands: list[str]) -> list[str]:
    """The targets in arguments of make: neither variables nor options."""
    return " ".join(re.sub(ARGS, "", command).replace("$together", "") for command in commands).split()


def test_tests_run_on_every_python_of_the_classifiers() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    named = [found[1] for x in classifiers if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", x))]
    assert MATRIX["python"] == named
    assert MATRIX["target"] == ["test"]
    assert {each["python"] for each in MATRIX["include"]} == {named[0]}  # .ci/run is for the lowest


def test_every_target_is_one_of_the_makefile() -> None:
    left_sides = " ".join(re.findall(r"^([\w.][\w./ -]*):(?!=)", MAKEFILE, re.MULTILINE)).split()
    runs = [step["run"].removeprefix("make ") for step in JOB["steps"] if "run" in step]
    assert "${{ matrix.target }}" in runs
    assert {*words([*COMMANDS, *(run for run in runs if "$" not in run)])} <= {*left_sides}


def test_all_steps_of_ci_are_run() -> None:
    """But for environments by name, which other targets make."""
    steps = re.findall(r"^step (.*)", CI, re.MULTILINE)
    assert len(steps) >= 5
    assert {*words(COMMANDS)} == {word for word in words(steps) if not word.startswith(".")}
    assert re.findall(ARGS, " ".join(COMMANDS))[0][1] == re.findall(ARGS, " ".join(steps))[0][1]
    needed = re.findall(r"\.venv/(?:smollm2|gemma3)\.stamp", CI)
    assert [run for step in JOB["steps"] if (run := step.get("run")) and run.split()[1:] == needed]
