"""Nobody asks a network who was given no name of a repository.

Ruff refuses imports that unpickle or ask a network; files with code and pickles are in catalogue/test_damaged_files.py.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.swept import measured

import tl_posdisent


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
    str(tl_posdisent.show_scores(fit, [str(t) for t in range(24)]))
    tl_posdisent.sweeps.sweep({"a": partial(measured, 24, [0])}, tmp_path / "sweep", progress=False)
    assert not no_network


def test_a_folder_is_read_without_a_network_and_a_name_is_not(no_network: list[Any], tmp_path: Path) -> None:
    """Also one that has its tokenizer with it, which TransformerLens reads again by its name."""
    from tl_posdisent.demo.demo_model import demo_hf_model

    demo_hf_model().save_pretrained(tmp_path)
    tl_posdisent.demo.demo_tokenizer().save_pretrained(tmp_path)
    model = tl_posdisent.load_model(tmp_path)
    assert model.to_tokens("the people").shape[1] > 2
    for path in ("./none", str(tmp_path / "none"), "~/none", "a/b/c"):
        with pytest.raises((ValueError, OSError), match=r"none|a/b/c"):
            tl_posdisent.load_model(path)
    assert not no_network
    with pytest.raises((OSError, AssertionError)):
        tl_posdisent.load_model("no-one/no-such-model-anywhere")
    assert no_network, "only the name of a repository may ask"


def test_offline_a_cached_repository_is_read(
    no_network: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tl_posdisent.demo.demo_model import demo_hf_model

    repository = tmp_path / "models--some--name"
    demo_hf_model().save_pretrained(repository / "snapshots" / "abc")
    tl_posdisent.demo.demo_tokenizer().save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokens = torch.tensor([[1, 2, 3]])
    expected = tl_posdisent.load_model(repository / "snapshots" / "abc")(tokens)
    assert torch.equal(tl_posdisent.load_model("some/name", device="cpu")(tokens), expected)
    assert not no_network
