"""Copies of public values, by ``copy.deepcopy`` and pickle, and copies of models that tools make under hooks."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import public_calls as calls
from support import zoo
from support.intervention_cases import TOKENS, TOOLS
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import ablate_heads, dummy_distance
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

# Refused in words, or not of this package: plotly's figures, and a model that is returned.
LONG = {"sweep", "train", "run_study", "report", "dynamics"}
NO_VALUES = {"applied", "random_control", "load_demo_model", "read_model", "run_hf"}


def same(a: Any, b: Any) -> bool:
    """Equal in all that they hold; functions of a model (norms, hook points) are not compared."""
    if type(a) is not type(b):
        return isinstance(a, np.generic) and bool(a == b)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.allclose(a, b, 0, 0, equal_nan=True))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
        return same(a.attrs, b.attrs)
    if is_dataclass(a):
        skipped = {"points", "norm"} if isinstance(a, (AttentionSpec, Tap)) else set()
        return all(same(getattr(a, x.name), getattr(b, x.name)) for x in fields(a) if x.name not in skipped)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.nn.Module):
        return same(a.state_dict(), b.state_dict())
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b) or repr(a) == repr(b)


def values(reading: Any) -> dict[str, Any]:
    """What every public function returns, as far as ``public_calls`` can call it alone."""
    found = {}
    for name, function in calls.callables().items():
        if name in LONG | NO_VALUES:
            continue
        of_model = [*inspect.signature(function).parameters][:1] == ["model"]
        try:
            found[name] = calls.call(function, *([calls.model_for(function, reading)] if of_model else []))
        except (AssertionError, ValueError):  # it takes what another one returns; these are called in other tests
            continue
    return found


@pytest.mark.slow
def test_every_public_value_is_equal_after_a_copy(shared_reading: Any) -> None:
    found = values(shared_reading("bridge", "llama-gqa"))
    assert len(found) > 80
    for name, value in found.items():
        if isinstance(value, Hooks):
            continue
        for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert same(value, copied), name


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_interventions_are_values(kind: str, name: str, shared_model: Any) -> None:
    """Edits are equal if they were made by equal calls, and after copies."""
    model = shared_model(kind, name)
    for tool, make in TOOLS.items():
        one, other = (make(model, layers=[0], heads=[1, 6]) for _ in range(2))
        for mine, twin in zip(one.interventions, other.interventions, strict=True):
            by_function = tool in ("swap", "remap")  # which are equal if they are the same function
            assert by_function or mine.edit == twin.edit, tool
            assert hash(mine.edit) == hash(twin.edit)
            assert copy.deepcopy(mine.edit) == mine.edit, tool
            if tool != "remap":  # a lambda, which cannot be pickled
                assert pickle.loads(pickle.dumps(mine.edit)) == mine.edit, tool
    assert dummy_distance(model, 5).interventions[0].edit != dummy_distance(model, 6).interventions[0].edit


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
