"""What is handed out: wheel and sdist are whole and hold nothing else, what they say of themselves agrees, and
importing the package imports nothing that a user may never need. ``tests/support/smoke.py`` tests the installed wheel.
"""

from __future__ import annotations

import email
import hashlib
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.pages import ROOT
from support.processes import run

import tl_posdisent as tp

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
PAPERS = {"2503.13305": "Computation Mechanism Behind LLM", "2505.13027": "Deconstructing Positional Information"}


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


def test_the_wheel_says_what_it_is(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        folder = f"tl_posdisent-{tp.__version__}.dist-info"
        said = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        commands = wheel.read(f"{folder}/entry_points.txt").decode()
        assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (said["Name"], said["Version"]) == ("tl-posdisent", tp.__version__)
    assert said["License-Expression"] == "MIT"
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert "tl-posdisent = tl_posdisent.cli:app" in commands
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])


def test_the_sdist_can_be_built_tested_and_documented(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    wanted = _here("tl_posdisent", "tests", "docs", "examples", "benchmarks", "requirements")
    wanted |= {"pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}
    assert wanted <= names
    extra = names - wanted
    assert extra <= {"PKG-INFO", ".gitignore", ".ci/run"}, "something is handed out that nobody needs"


def test_every_page_agrees_on_version_licence_and_papers() -> None:
    cited = dict(re.findall(r"^([a-z-]+): (\S+)$", CITATION, re.MULTILINE))
    assert PROJECT["version"] == tp.__version__ == cited["version"]
    assert PROJECT["license"] == cited["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
    page = (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")
    for number, title in PAPERS.items():
        assert f"arXiv:{number}" in CITATION
        assert f"arXiv:{number}" in page
        assert title in CITATION
        assert title in page.replace("{LLM}", "LLM")
    software = page[page.index("@software{") :]
    assert f"version = {{{tp.__version__}}}" in software
    assert f"license = {{{cited['license']}}}" in software
    assert re.search(r"author  = \{\{tl\\_posdisent contributors\}\}", software)
    assert "  - name: tl_posdisent contributors" in CITATION
    assert tp.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


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
