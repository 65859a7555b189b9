"""Projected attention outputs: numpy's principal components, and the outputs under hooks on the same axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import zoo

from tl_posdisent import lambda_mask
from tl_posdisent.experiments import output_projection

TOKENS = zoo.random_tokens(30, batch=2)
NAMES = ["pc1", "pc2", "pc3"]


def outputs(model: Any, tokens: torch.Tensor, hooks: Any, layer: int) -> np.ndarray:
    name = f"blocks.{layer}.attn.hook_z"
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(tokens, names_filter=[name])
    return cache[name].flatten(2).double().numpy()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_coordinates_are_those_of_the_reference_in_standard_deviations(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = lambda_mask(model, 1, 4, 5)
    table = output_projection(model, TOKENS, hooks, in_range=20, start=3, layers=1)
    reference = outputs(model, TOKENS[:, :20], [], 1)[:, 3:].reshape(34, -1)
    variances, axes = np.linalg.eigh(np.cov(reference.T, ddof=0))
    points = outputs(model, TOKENS, hooks, 1)[:, 3:] - reference.mean(0)
    for n, column in enumerate(NAMES[:2], start=1):
        axis = axes[:, -n] * np.sign(axes[np.abs(axes[:, -n]).argmax(), -n])
        expected = points @ axis / np.sqrt(variances[-n])
        np.testing.assert_allclose(table[column].to_numpy().reshape(2, 27), expected, atol=1e-3)
    np.testing.assert_allclose(table.attrs["explained"][1], variances[:-3:-1] / variances.sum(), atol=1e-5)
    assert table["in_range"].tolist() == [pos < 20 for pos in table["pos"]]
    assert table["pos"].tolist() == [*range(3, 30)] * 2
    plain = output_projection(model, TOKENS, in_range=20, start=3, layers=[1])
    inside = plain[plain["in_range"]][NAMES[:2]]
    np.testing.assert_allclose(inside.mean(), 0, atol=1e-4)
    np.testing.assert_allclose(inside.std(ddof=0), 1, atol=1e-4)
