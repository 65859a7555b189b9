"""Copies of models that tools make under hooks."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import ablate_heads, dummy_distance
from tl_posdisent.hooks import applied

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_copies_that_tools_make_are_made_under_hooks(kind: str, name: str, shared_model: Any) -> None:
    """Random copies are those of the bare model; what the hooks change is the model alone."""
    model = shared_model(kind, name)
    every: list[Any] = ["random", "shuffled"]

    def made() -> list[Tensor]:
        return [next(tp.random_control(model, [1], weights=weights))(TOKENS) for weights in every]

    bare = made()
    with torch.no_grad(), applied(model, dummy_distance(model, 5, layers=[1], heads=[3])):
        model(TOKENS)
        for under, control in zip(made(), bare, strict=True):
            assert torch.equal(under, control)
    with torch.no_grad(), applied(model, ablate_heads(model, [(0, 3)])):
        table = tp.head_labels(model, TOKENS, seeds=1, std=0.2, length=8, progress=False)
    plain = tp.head_labels(model, TOKENS, seeds=1, std=0.2, length=8, progress=False)
    assert len(table) == len(plain) == 16
    columns = [x for x in table.columns if x.endswith("random")]
    assert columns
    pd.testing.assert_frame_equal(table[columns], plain[columns])  # the copies are bare
    assert not table.equals(plain)
