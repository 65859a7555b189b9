"""How the tests choose tolerances, and how the recorder measures what they leave."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.margins import Margins, margin
from support.tolerance import TIMES, of_float32, of_rounded_weights, rounding

EPS = torch.finfo(torch.float32).eps


def test_a_margin_is_the_largest_ratio_of_an_error_to_its_tolerance() -> None:
    inf = torch.inf
    found = margin(torch.tensor([1.0, 3.5, inf, torch.nan]), torch.tensor([1.5, 3.0, inf, torch.nan]), 0.5, 0.25)
    assert found == (0.5, 0.5, 1.0)  # the other is 0.5 of 1.75
    assert margin(torch.tensor([1 + 1j]), np.array([1 + 2j]), 0, 4.0) == (0.25, 1.0, 4.0)
    assert margin(2, 3, 0, 0) is None
    assert margin("a", "b", 0, 1) is None


def test_comparisons_of_all_libraries_are_recorded(tmp_path: Path) -> None:
    recorder = Margins(tmp_path / "margins.csv")
    with pytest.MonkeyPatch.context() as patch:
        recorder.replace(patch)
        torch.testing.assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), rtol=0, atol=10.0)
        assert torch.allclose(torch.tensor(1.0), torch.tensor(1.1), 0, 10.0)
        assert not torch.allclose(torch.tensor(1.0), torch.tensor(99.0), 0, 10.0)
        np.testing.assert_allclose(1.0, 1.1, rtol=0, atol=10.0)
        assert np.allclose([1.0], [1.1], rtol=0, atol=10.0)
        found = [1.0, 1.1, np.nan]
        assert found == pytest.approx([1.0, 1.0, np.nan], abs=10.0, nan_ok=True)
        pd.testing.assert_frame_equal(pd.DataFrame({"x": [1.0]}), pd.DataFrame({"x": [1.1]}), rtol=0, atol=10.0)
    ratios = [float(row[0]) for row in recorder.rows.values()]
    assert ratios == pytest.approx([0.01] * 6, rel=1e-3)
    assert all(at.startswith("package/test_tolerances.py:") for at in recorder.rows)


def test_a_row_says_which_test_compares(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    recorder = Margins(tmp_path / "margins.csv")
    call = recorder.pytest_runtest_call(request.node)
    next(call)
    value = 1.0
    assert value == pytest.approx(1.25, abs=5.0)
    with pytest.raises(StopIteration):
        next(call)
    with recorder.path.open(newline="") as file:
        ((ratio, error, tolerance, _, test, _),) = csv.reader(file)
    assert (ratio, error, tolerance, test) == ("0.05", "0.25", "5", request.node.nodeid)


def test_a_tolerance_follows_the_error() -> None:
    double = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert rounding(double, 2) == TIMES * 2 * EPS * 4
    assert of_float32(double.float(), double) == rounding(double)  # no error by luck
    assert of_float32(torch.tensor([3.0, -4.5]), double) == TIMES * 0.5


def test_rounded_weights_have_the_error_of_float32() -> None:
    """Also of the small difference of two large numbers."""
    model, x = torch.nn.Linear(256, 8, bias=False).double().requires_grad_(False), torch.randn(4, 256).double()
    weights = model.weight.clone()
    near = weights * (1 + 1e-3 * torch.randn_like(weights))
    for scale in (1, 1000):
        single = scale * (torch.nn.functional.linear(x.float(), weights.float()) - x.float() @ near.T.float())
        double = scale * (model(x) - x @ near.T)
        error = float((single - double).abs().max())
        found = of_rounded_weights(model, lambda scale=scale: scale * (model(x) - x @ near.T))
        assert 0.1 < found / TIMES / error < 10
        assert found > 10 * rounding(double)  # which sees no cancellation
    assert torch.equal(model.weight, weights)
