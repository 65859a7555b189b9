"""README's findings are measured again by one command: on a text that everyone has, by the calls that it prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pages import ROOT

import tl_posdisent as tp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "figures"))
        import findings

        yield findings


@pytest.mark.usefixtures("unchecked")
def test_numbers_are_those_of_their_calls(script: Any) -> None:
    model = tp.load_demo_model()
    texts = script.demo_texts(model, 4, 48)
    assert texts.shape == (4, 48)
    assert len({tuple(row) for row in texts[:, 1:].tolist()}) == 4
    table = script.table_of(model, texts).set_index("finding")
    names = {"model": model, "texts": texts, **{name: getattr(tp, name) for name in tp.__all__}}
    for name in ("r with the profile of other texts, trained", "r at controlled distances, trained"):
        assert eval(table["call"][name], names).mean() == pytest.approx(table["value"][name])
    for name in ("every distance 5", "distances at most 16"):
        hooks = eval(table["call"][f"added loss, {name}"], names)
        with torch.no_grad():
            added = model.run_with_hooks(texts, return_type="loss", fwd_hooks=hooks) - model(texts, return_type="loss")
        assert table["value"][f"added loss, {name}"] == pytest.approx(added.item(), abs=1e-5)
    kept = table.filter(like="attention kept", axis=0)["value"]
    assert kept["attention kept, static"] < kept["attention kept, banded"] <= 1.05
    assert table["value"].notna().all()
