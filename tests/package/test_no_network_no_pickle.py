"""Nothing is unpickled, no code of a model is trusted, and nobody asks a network who was given no name."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_posdisent

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for part in ("tl_posdisent", "tests", "benchmarks", "docs") for path in (ROOT / part).rglob("*.py")
)
UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
NETWORK = {"socket", "requests", "httpx", "aiohttp", "http", "ftplib", "smtplib", "telnetlib"}
LOADS = {f"{module}.load" for module in ("torch", "torch.jit", "pickle", "joblib", "yaml")}
LOADS |= {"pd.read_pickle", "pandas.read_pickle"}
TOLD = {"weights_only", "allow_pickle", "trust_remote_code", "use_safetensors"}  # by name, of how a file is read
RUNS = {"eval", "exec"}  # tests may: of the documentation's own code


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def breaches(name: str, source: str) -> list[str]:
    """What a file does that none may, with the line."""
    tree, found = ast.parse(source), []
    inside = name.startswith("tl_posdisent/")
    for line, module in imports(tree):
        first = module.split(".")[0]
        if inside and first in UNPICKLE:  # tests may pickle what goes to another process, and see it come back
            found.append(f"{line}: {module} unpickles")
        if inside and (first in NETWORK or module.startswith("urllib.request")):
            found.append(f"{line}: {module} asks a network")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, options = ast.unparse(node.func), {x.arg: ast.unparse(x.value) for x in node.keywords if x.arg in TOLD}
        if (called in LOADS or (inside and called in RUNS)) and not (
            called == "torch.load" and options.get("weights_only") == "True"
        ):
            found.append(f"{node.lineno}: {called} runs what it reads")
        if options.get("allow_pickle", "False") != "False" or options.get("trust_remote_code", "False") != "False":
            found.append(f"{node.lineno}: {called} trusts what it reads")
        if inside and called.endswith(("AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained")):
            wanted = {"trust_remote_code"} | ({"use_safetensors"} if "Model" in called else set())
            if wanted - {*options}:
                found.append(f"{node.lineno}: {called} must say {', '.join(sorted(wanted - {*options}))}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_keeps_the_rules(path: Path) -> None:
    assert not breaches(name_of(path), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import socket",
        "import urllib.request",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)",
        "exec(text)",
    ],
)
def test_the_rules_catch(line: str) -> None:
    assert breaches("tl_posdisent/x.py", line)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to reach another machine, or to look up its name, is an error and noted."""
    asked: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        raise AssertionError(f"a network was asked: {args[-1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


def test_nobody_asks_a_network(no_network: list[Any], tmp_path: Path) -> None:
    """Though they might: nothing says that they are offline."""
    model, tokens = tl_posdisent.load_demo_model(), tl_posdisent.demo_tokens(length=24)
    quiet: dict[str, Any] = {"layers": [0], "progress": False}
    tl_posdisent.additivity(model, "We the people of these states", **quiet)
    tl_posdisent.controlled_distance(model, tokens, **quiet)
    tl_posdisent.perturbation_curve(model, tokens, ["order"], [0.5], 1, progress=False)
    tl_posdisent.report(model, tokens, tmp_path / "r.html", sections=["additivity"], control=0, progress=False)
    next(tl_posdisent.random_control(model))
    fit = tl_posdisent.fit_additive(torch.randn(24, 24))
    tl_posdisent.show_scores(fit, [str(t) for t in range(24)]).save(tmp_path / "w.html")
    todo = tl_posdisent.sweeps.jobs(
        "demo", ("additivity", {"layers": [0]}), tl_posdisent.sweeps.Text.of("demo", length=24)
    )
    tl_posdisent.sweeps.sweep(todo, out=tmp_path / "sweep", progress=False)
    assert not no_network


def test_a_folder_is_read_without_a_network_and_a_name_is_not(no_network: list[Any], tmp_path: Path) -> None:
    """Also one that has its tokenizer with it, which TransformerLens reads again by its name."""
    from tl_posdisent.demo.demo_model import demo_hf_model

    demo_hf_model().save_pretrained(tmp_path)
    tl_posdisent.demo.demo_tokenizer().save_pretrained(tmp_path)
    model = tl_posdisent.load_model(tmp_path)
    assert model.to_tokens("the people").shape[1] > 2
    for path in ("./none", str(tmp_path / "none"), "~/none", "a/b/c"):
        with pytest.raises(ValueError, match="is neither a folder"):
            tl_posdisent.load_model(path)
    with pytest.raises(ValueError, match="must be a known name"):
        tl_posdisent.load_model("no-such-model-anywhere")
    assert not no_network
    with pytest.raises((ValueError, AssertionError)):
        tl_posdisent.load_model("no-one/no-such-model-anywhere")
    assert no_network, "only the name of a repository may ask"
