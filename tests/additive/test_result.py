"""Results of fits: tables, components laid out, another device, and what they print."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.masks import FIELDS, every_option, noise

from tl_posdisent import AdditiveFit, fit_additive


def assert_equal(found: AdditiveFit, expected: AdditiveFit) -> None:
    """To the last bit."""
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True, msg=name
        )


@every_option
@pytest.mark.parametrize("pool", [False, True])
def test_to_moves_everything_and_changes_nothing(options: dict[str, Any], pool: bool) -> None:
    scores = noise(2, 3, 9, 9)
    fit = fit_additive(scores, pool=pool, **options)
    there = fit.to("meta")
    assert {getattr(there, name).device.type for name in FIELDS} == {"meta"}
    assert there.mask.device.type == "meta"
    assert there.fitted().device.type == "meta"
    back = fit.to("cpu")
    assert_equal(back, fit)
    torch.testing.assert_close(back.residual(scores), fit.residual(scores), rtol=0, atol=0)
    assert back.pooled is pool


def test_the_summary_table_holds_the_fields() -> None:
    fit = fit_additive(noise(2, 3, 9, 9))
    table = fit.to_frame()
    columns = ["r", "r2", "r2_adjusted", "share_distance", "share_query", "share_key"]
    assert list(table.columns) == ["batch", "head", *columns]
    assert len(table) == 6
    for row in table.itertuples():
        for name in columns:
            assert getattr(row, name) == getattr(fit, name)[row.batch, row.head].item()
    assert list(fit_additive(noise(9, 9)).to_frame().columns) == columns
    assert list(fit_additive(noise(3, 9, 9)).to_frame().columns) == ["head", *columns]
    assert list(fit_additive(noise(1, 2, 3, 4, 4)).to_frame().columns[:3]) == ["axis_0", "axis_1", "axis_2"]


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("part", ["distance", "query", "key"])
def test_a_component_table_has_a_row_for_each_coefficient(part: Any, pool: bool) -> None:
    fit = fit_additive(noise(2, 3, 7, 9), mask="full", pool=pool)
    table, values = fit.to_frame(part), getattr(fit, part)
    batch = ["head"] if pool and part == "distance" else ["batch", "head"]
    assert list(table.columns) == [*batch, part, "value"]
    assert len(table) == values.numel()
    for row in table.itertuples():
        index = [getattr(row, name) for name in batch]
        at = getattr(row, part) - (int(fit.distances[0]) if part == "distance" else 0)
        assert row.value == values[(*index, at)].item()


def test_methods_refuse(unchecked: None) -> None:
    fit: Any = fit_additive(noise(2, 5, 5))
    with pytest.raises(
        ValueError, match=r"name cannot be 'keys': did you mean 'key'\? It must be 'distance', 'query' or"
    ):
        fit.component("keys")
    with pytest.raises(ValueError, match="component must be 'summary', 'distance', 'query' or 'key', got 'all'"):
        fit.to_frame("all")
    with pytest.raises(ValueError, match=r"scores must have the fitted shape \(2, 5, 5\), got \(5, 5\)"):
        fit.residual(noise(5, 5))
    with pytest.raises(ValueError, match=r"scores of layer 0 must be a floating point tensor, got float"):
        fit.residual([1.0])
