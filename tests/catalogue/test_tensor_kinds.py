"""Tensors of every kind in every function that takes tensors: right, or refused in words, never an error of torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import public_calls as calls
from support.intervention_cases import TOKENS
from torch import Tensor

from tl_posdisent import additivity, fit_additive, fit_attention, knock_out, remap_distance, swap_positions
from tl_posdisent.hooks import patch_vectors, phase_noise

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda x: x.to("meta"),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "complex": lambda x: x * 1j,
    "integers": lambda x: x.long(),
    "truth values": lambda x: x > 0,
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.flatten(0, -2).to_sparse_csr() if x.ndim > 1 else x.to_sparse(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
}
NUMBERS = {"positions", "tokens", "labels", "context", "answer"}  # integers are what these are


def takers() -> list[tuple[str, str, Tensor]]:
    """Functions of tensors alone, by name, with each parameter that is a tensor."""
    found = []
    for name, function in calls.callables().items():
        parameters = [*inspect.signature(function).parameters]
        if parameters[:1] == ["model"] or name in ("dynamics", "MultipleChoice"):
            continue
        good = calls.GOOD | calls.OWN.get(name, {})
        found += [(name, p, good[p]) for p in parameters if isinstance(good.get(p), Tensor)]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_tensors(kind: str) -> None:
    refused, given = 0, takers()
    for name, parameter, good in given:
        function = calls.callables()[name]
        try:
            found = calls.call(function, **{parameter: KINDS[kind](good)})
        except ValueError as error:
            refused += 1
            assert len(str(error)) < 400, (name, parameter)  # noqa: PT017 - no tensor printed
        else:
            shape_alone = kind == "meta" and isinstance(found, (Tensor, tuple))
            assert shape_alone or (kind in ("integers", "truth values") and parameter in NUMBERS), (name, parameter)
    assert refused > len(given) / 2 > 10


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "truth values"])
def test_masks(kind: str) -> None:
    scores, mask = torch.randn(2, 3, 6, 6), torch.ones(6, 6).tril()
    bad = (mask > 0).to("meta") if kind == "meta" else KINDS[kind](mask)
    for function in (fit_additive, fit_attention):
        with pytest.raises(ValueError, match="mask must"):
            function(scores, mask=bad)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_tensors_of_interventions(kind: str, shared_model: Any) -> None:
    """Each is read by the function that refuses all kinds."""
    model = shared_model("bridge", "llama-gqa")
    change, vectors = KINDS[kind], torch.ones(2, 12, 8, 8)
    makers: dict[str, Callable[[], Any]] = {
        "positions": lambda: swap_positions(model, change(torch.ones(12))),
        "noise": lambda: phase_noise(model, change(torch.ones(12, 4))),
        "distances": lambda: remap_distance(model, change(torch.ones(12, 12))),
        "cells": lambda: knock_out(model, cells=change(torch.ones(12, 12)).bool()),
        "keys": lambda: knock_out(model, keys=change(torch.ones(12)).bool()),
        "q_rot": lambda: patch_vectors(model, 0, change(vectors), None),
        "attention_mask": lambda: additivity(model, TOKENS, attention_mask=change(torch.ones(2, 12)), layers=0),
    }
    for name, make in makers.items():
        with pytest.raises(ValueError, match=name):
            make()
