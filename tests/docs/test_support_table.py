"""Which versions are allowed, and that the support table's trials can fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomllib
import torch
from packaging.requirements import Requirement
from support import zoo
from support.pages import ROOT

import tl_posdisent as tp

sys.path.append(str(ROOT / "docs"))
import support_trials

NEEDED = [
    Requirement(line)
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
]
PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def _lowest(requirement: Requirement) -> str:
    (lowest,) = [s.version for s in requirement.specifier if s.operator == ">="]
    return lowest


def test_the_oldest_lane_takes_what_pyproject_allows() -> None:
    lines = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line.split("#")[0])
    for requirement in NEEDED:
        if requirement.name == "torch":
            assert "torch" not in pinned  # the Makefile says, which lets a user say so too
            continue
        lowest = _lowest(requirement)
        assert re.fullmatch(re.escape(lowest) + r"(\.0)*", pinned[requirement.name]), requirement.name


def test_every_upper_bound_has_its_reason() -> None:
    upper = {r.name: str(s) for r in NEEDED for s in r.specifier if s.operator != ">="}
    assert upper == {"transformer-lens": "<5"}
    assert "`transformer-lens<5`" in PAGE


def test_the_page_names_the_lowest_versions() -> None:
    rows = dict(re.findall(r"^\| ([a-z_-]+) \| ([0-9.]+) \|", PAGE, re.MULTILINE))
    assert rows == {requirement.name: _lowest(requirement) for requirement in NEEDED}


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


def _another_head(model: Any, heads: Any, **options: Any) -> Any:
    return _REAL["ablate_heads"](model, [(layer, head + 1) for layer, head in heads], **options)


def _halved(tool: str, column: str) -> Callable[..., pd.DataFrame]:
    def table(*arguments: Any, **options: Any) -> pd.DataFrame:
        real = _REAL[tool](*arguments, **options)
        return real.assign(**{column: real[column] / 2})

    return table


def _nothing(*arguments: Any, **options: Any) -> list[Any]:
    return []


_REAL = {name: getattr(tp, name) for name in support_trials.TRIALS if hasattr(tp, name)}
_BROKEN: dict[str, Callable[..., Any]] = {
    "additivity": _halved("additivity", "r2"),
    "controlled_distance": _halved("controlled_distance", "total"),
    "swap_positions": _nothing,
    "dummy_distance": _nothing,
    "remap_distance": _nothing,
    "ablate_heads": _another_head,
    "head_patching": _halved("head_patching", "value"),
    "position_patching": _halved("position_patching", "value"),
    "component_patching": _halved("component_patching", "value"),
}


@pytest.mark.parametrize("tool", _BROKEN)
@pytest.mark.usefixtures("unchecked")
def test_a_tool_that_does_something_else_stops_the_support_table(
    tool: str, shared_model: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "bridge" if zoo.BRIDGE_NAMES else "hooked"
    model, tokens = shared_model(kind, "llama-gqa"), zoo.random_tokens(support_trials.LENGTH)
    support_trials.TRIALS[tool](model, tokens)
    monkeypatch.setattr(tp, tool, _BROKEN[tool])
    with pytest.raises(support_trials.Wrong):
        support_trials.TRIALS[tool](model, tokens)


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
def test_a_head_silenced_by_torch_is_gone_for_hooks_too(kind: str, shared_model: Callable[[str, str], Any]) -> None:
    """The two ways of the support table's ablation agree on what heads there are."""
    model, tokens = shared_model(kind, "llama"), zoo.random_tokens(support_trials.LENGTH)
    silent = support_trials._silenced(model, tokens, 0)
    for head, expected in ((support_trials.HEAD, True), (support_trials.HEAD + 1, False)):
        with torch.no_grad(), tp.hooks.applied(model, tp.ablate_heads(model, [(0, head)])):
            assert bool((model(tokens) - silent).abs().max() < 1e-4) == expected
