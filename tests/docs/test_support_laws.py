"""The laws behind the table of support: they hold where tools work, and find those that do something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from support import support_laws, zoo
from support.support_laws import INTERVENTIONS, TOOLS, try_laws

from tl_posdisent import read_model

pytestmark = [pytest.mark.tl4, pytest.mark.usefixtures("unchecked")]

_REAL = {name: getattr(support_laws, name) for name in dir(support_laws)}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_tools_obey_their_laws_or_refuse(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    table = try_laws(shared_model(kind, name), length=20)
    assert set(table["tool"]) == set(TOOLS)
    assert set(table["verdict"]) <= {"works", "refused"}
    works, refused = (table[table["verdict"] == verdict] for verdict in ("works", "refused"))
    assert works["error"].max() < 2e-4
    assert (works["reason"] == "").all()
    assert refused["error"].isna().all()
    assert (refused["reason"].str.len() > 30).all()
    texts = table.loc[table["tool"] == "remap_distance", ["text", "verdict"]].values.tolist()
    acts = [["whole", "works"], ["padded", "works"]]
    assert texts == (acts if name == "llama-gqa" else [["whole", "refused"]])


def _another_head(model: Any, heads: Any, **options: Any) -> Any:
    return _REAL["ablate_heads"](model, [(layer, head + 1) for layer, head in heads], **options)


def _halved(tool: str, column: str) -> Callable[..., pd.DataFrame]:
    def table(*arguments: Any, **options: Any) -> pd.DataFrame:
        real = _REAL[tool](*arguments, **options)
        return real.assign(**{column: real[column] / 2})

    return table


def _nothing(*arguments: Any, **options: Any) -> list[Any]:
    return []


_BROKEN: dict[str, Callable[..., Any]] = {
    "additivity": _halved("additivity", "r2"),
    "controlled_distance": _halved("controlled_distance", "total"),
    **dict.fromkeys(INTERVENTIONS, _nothing),
    "ablate_heads": _another_head,
    "knock_out": _nothing,
    "head_ablation": _halved("head_ablation", "value"),
    "head_patching": _halved("head_patching", "value"),
    "position_patching": _halved("position_patching", "value"),
    "component_patching": _halved("component_patching", "value"),
}


@pytest.mark.parametrize("tool", _BROKEN)
def test_a_tool_that_does_something_else_is_found(
    tool: str, shared_model: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model("bridge" if zoo.BRIDGE_NAMES else "hooked", "llama-gqa")
    monkeypatch.setattr(support_laws, tool, _BROKEN[tool])
    table = try_laws(model, [tool], length=8)
    assert (table["verdict"] == "wrong").any()
    assert (table.loc[table["verdict"] == "wrong", "reason"] != "").all()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_tools_refuse_a_model_that_is_not_as_it_was_read(
    kind: str, name: str, shared_model: Callable[[str, str], Any]
) -> None:
    """Whatever computes with the rotation notices that it is another; the rest obeys its laws."""
    reading = read_model(shared_model(kind, name))
    specs = tuple(replace(x, rotary=replace(x.require_rotary(""), pairing="adjacent")) for x in reading.specs())
    table = try_laws(replace(reading, attention=specs))
    refused = set(table.loc[table["verdict"] == "refused", "tool"])
    needs = ("capture", "controlled_distance", "dummy_distance", "remap_distance", "single heads", "patch_vectors")
    assert refused >= set(needs)
    assert "wrong" not in set(table["verdict"])
