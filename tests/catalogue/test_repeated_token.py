"""A text of one repeated token: what differs by rounding alone gives no share, no ratio and no effect."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.public_calls import call, callables

import tl_posdisent as tp

REPEATED = torch.full((2, 12), 7)
REFUSED = {
    "position_patching": "positions must change the metric",
    "positional_subspace": "tokens must be texts whose residual stream",
    "content_position_terms": "tokens must be at least two different texts",
}
BOUNDED = {
    **{"additivity": "r|share", "controlled_distance": "r_|distance|query|key", "disentanglement": "r"},
    **{"attention_ladder": "recovered", "length_generalization": "share"},
}
"""Columns that lie between -1 and 1, or are NaN."""


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("tool", [*BOUNDED, *REFUSED])
def test_shares_of_rounding(kind: str, name: str, tool: str) -> None:
    model: Any = zoo.load(kind, name)
    if tool in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[tool]):
            call(callables()[tool], model, tokens=REPEATED)
        return
    found = call(callables()[tool], model, tokens=REPEATED)
    table = found if isinstance(found, pd.DataFrame) else found.to_frame()
    shares = table.filter(regex=f"^({BOUNDED[tool]})")
    assert len(shares.columns)
    assert (shares.isna() | (shares.abs() <= 1 + 1e-6)).all(axis=None)
    if tool == "attention_ladder":
        assert shares.isna().all(axis=None)


def test_heads_have_no_effect_on_a_repeated_token() -> None:
    model = tp.load_demo_model()
    table = tp.attention_ladder(model, REPEATED, rungs=["distance"], controls=[], progress=False)
    assert set(tp.head_verdicts(table)["verdict"]) == {"not used"}
