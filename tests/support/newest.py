"""The newest versions of what the package needs: their names for pip, and a page of the tests that failed with them.

``names`` prints what pyproject.toml needs, without its bounds and without torch. ``write JUNIT PAGE`` turns pytest's
report into the page that ``docs/support.md`` includes.
"""

from __future__ import annotations

import sys
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NAMED = ("transformer-lens", "transformers", "torch", "numpy", "pandas", "plotly", "typer", "circuitsvis")


def names() -> list[str]:
    """Run-time dependencies and those of the tests, unbounded; torch is installed before."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    needed = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]
    extras = {x.name: f"[{','.join(sorted(x.extras))}]" if x.extras else "" for x in needed if x.name != "torch"}
    return [name + extra for name, extra in sorted(extras.items())]


def page(report: Path, versions: dict[str, str], day: date) -> str:
    """What passed and what failed, by file and test, as Markdown."""
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    tests = Counter(
        (
            str(case.get("classname")).removeprefix("tests.").replace(".", "/") + ".py",
            str(case.get("name")).split("[")[0],
        )
        for case in failed
    )
    installed = ", ".join(f"{name} {number}" for name, number in versions.items())
    passed = len(cases) - len(failed) - skipped
    lines = [f"On {day.isoformat()}, with {installed}: {passed} tests passed, {len(failed)} failed."]
    if tests:
        lines += ["", "| failed | test | file |", "|---|---|---|"]
        lines += [f"| {n} | `{test}` | `{file}` |" for (file, test), n in sorted(tests.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "names":
        sys.stdout.write(" ".join(names()) + "\n")
    else:
        found = page(Path(sys.argv[2]), {name: version(name) for name in NAMED}, date.today())
        Path(sys.argv[3]).write_text(found, encoding="utf-8")
        sys.stdout.write(found)
