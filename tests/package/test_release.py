"""What is handed out: wheel and sdist are whole and hold nothing else, what they say of themselves agrees, and
importing the package imports nothing that a user may never need. ``tests/support/smoke.py`` tests the installed wheel.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from support.pages import ROOT
from support.processes import run

import tl_posdisent as tp

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist, by the backend that pyproject.toml names, in a process of their own."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; it comes with [dev]")
    out = tmp_path_factory.mktemp("dist")
    code = "import sys; from hatchling import build as b; b.build_wheel(sys.argv[1]); b.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, str(out), cwd=ROOT)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def _here(*folders: str) -> set[str]:
    """Files of the source tree that are meant to be handed out, as paths from its root."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    unwanted = {"__pycache__", "_build", ".ipynb_checkpoints"}
    return {path.relative_to(ROOT).as_posix() for path in files if not unwanted & set(path.parts)}


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == _here("tl_posdisent")
        assert "tl_posdisent/py.typed" in names  # or type checkers ignore every annotation
        for name in ("weights.safetensors", "tokenizer.json", "config.json", "text.txt"):
            there, here = wheel.read(f"tl_posdisent/demo/{name}"), (ROOT / "tl_posdisent" / "demo" / name).read_bytes()
            assert hashlib.sha256(there).digest() == hashlib.sha256(here).digest()
    assert built[0].name.endswith("-py3-none-any.whl")
    assert built[0].stat().st_size < 5e6


def test_the_wheel_works_without_the_sources(built: tuple[Path, Path], tmp_path: Path) -> None:
    """What ``smoke.py`` tries before a release in an environment of its own."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    alone = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run(sys.executable, ROOT / "tests" / "support" / "smoke.py", cwd=tmp_path, env=alone)
    assert f"from  {tmp_path / 'tl_posdisent'}\n" in done.stdout


def test_the_sdist_can_be_built_tested_and_documented(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    wanted = _here("tl_posdisent", "tests", "docs", "examples", "benchmarks", "requirements")
    wanted |= {"pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}
    assert wanted <= names
    extra = names - wanted - {"PKG-INFO", ".gitignore", ".ci/run", ".github/workflows/checks.yml"}
    assert not extra, "something is handed out that nobody needs"


def test_every_page_agrees_on_the_version() -> None:
    assert PROJECT["version"] == tp.__version__ == CITATION["version"]
    assert f"version = {{{tp.__version__}}}" in (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")
    assert tp.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_says_what_the_package_says() -> None:
    assert [CITATION[name] for name in ("license", "keywords")] == [PROJECT[name] for name in ("license", "keywords")]
    assert CITATION["title"] == "tl_posdisent"
    assert [each["name"] for each in CITATION["authors"]] == [each["name"] for each in PROJECT["authors"]]
    cited = {x["value"].removeprefix("arXiv:") for each in CITATION["references"] for x in each["identifiers"]}
    assert cited == {url.split("/")[-1] for url in PROJECT["urls"].values() if "arxiv" in url}
    assert CITATION.get("repository-code") == PROJECT["urls"].get("Repository")


def test_importing_the_public_names_leaves_heavy_modules_alone() -> None:
    """Beyond torch and TransformerLens; what a function needs, it imports when called."""
    code = """
import sys, torch, transformer_lens
from transformer_lens.model_bridge import TransformerBridge
before = set(sys.modules)
from tl_posdisent import fit_additive
print(*sorted(set(sys.modules) - before))
"""
    new = run(sys.executable, "-c", code, cwd=ROOT).stdout.split()
    assert "tl_posdisent.additive.fit" in new, "it was imported already, or not at all"
    heavy = {"dask", "distributed", "matplotlib", "narwhals", "IPython", "scipy", "sklearn", "playwright", "kaleido"}
    assert not heavy & set(new)
    slow = ("plotly.subplots", "plotly.graph_objs._figure", "transformers.models.llama.modeling_llama")
    assert not [name for name in new if name in slow]
    assert not [name for name in new if name.startswith("transformers.models.")]
