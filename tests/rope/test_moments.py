"""Moments are those of the coordinates, and add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rotary_layers import LAYERS, draw, frequencies

from tl_posdisent.rope import moments as covariance
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary

HALF = LAYERS["half"][0]


def assert_equal_moments(a: Moments, b: Moments, close: float) -> None:
    for x, y in ((a.query, b.query), (a.key, b.key)):
        assert x.count == y.count
        torch.testing.assert_close(x.mean, y.mean, rtol=close, atol=close)
        torch.testing.assert_close(x.cov, y.cov, rtol=close, atol=close)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_moments_are_those_of_the_coordinates_in_order_of_subspaces(pairing: Any) -> None:
    q, k = draw("odd rest")
    moments = Moments.from_qk(q, k, Rotary(frequencies(2), pairing))
    order = [0, 2, 1, 3, 4, 5, 6] if pairing == "half" else list(range(7))
    for x, spread in ((q, moments.query), (k, moments.key)):
        torch.testing.assert_close(spread.mean, x.mean(0)[:, order])
        for head in range(x.shape[1]):
            torch.testing.assert_close(spread.cov[head], x[:, head, order].T.cov(correction=0))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    cuts=st.tuples(st.integers(1, 49), st.integers(1, 49)),
    mean=st.sampled_from([0.0, 1.0, 1e5]),
    chunk=st.sampled_from([1, 20, 2**22]),
)
def test_merged_parts_are_the_whole(cuts: tuple[int, int], mean: float, chunk: int) -> None:
    torch.manual_seed(cuts[0])
    rotary = LAYERS["grouped"][0]
    q, k = draw("grouped", 50, 50, mean=mean)
    whole = Moments.from_qk(q, k, rotary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(covariance, "NUMBERS_AT_ONCE", chunk)
        parts = Moments.from_qk(q[: cuts[0]], k[: cuts[1]], rotary) + Moments.from_qk(
            q[cuts[0] :], k[cuts[1] :], rotary
        )
    close = 1e-12 * max(1.0, mean)  # subtracting the mean costs the digits that float64 has not got
    assert_equal_moments(parts, whole, close)


def test_sum_over_texts_and_leading_axes() -> None:
    rotary = LAYERS["half"][0]
    q, k = (x.unflatten(0, (2, 3, 4)) for x in draw("half", 24, 24))
    whole = Moments.from_qk(q, k, rotary)
    assert_equal_moments(sum(Moments.from_qk(a, b, rotary) for a, b in zip(q, k, strict=True)), whole, 1e-12)
    other_layout = (x.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4) for x in (q, k))
    assert_equal_moments(Moments.from_qk(*other_layout, rotary), whole, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_run_in_float64_whatever_the_dtype(dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in draw("half", 200, 200, mean=1000.0))
    rotary = LAYERS["half"][0]
    assert_equal_moments(Moments.from_qk(q, k, rotary), Moments.from_qk(q.double(), k.double(), rotary), 0.0)


@pytest.mark.usefixtures("unchecked")
def test_moments_of_different_layers_are_not_added() -> None:
    one = Moments.from_qk(*draw("half"), HALF)
    changes: dict[str, Any] = {"frequencies": frequencies(4, 1e4), "pairing": "adjacent", "angle_dtype": torch.float32}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"must have the same rotary, got rotations that differ in {name}"):
            one + replace(one, rotary=replace(HALF, **{name: value}))
    with pytest.raises(ValueError, match=r"must have the same shape, got \(2, 8\) and \(4, 8\)"):
        one + Moments.from_qk(torch.randn(3, 4, 8), torch.randn(3, 2, 8), HALF)
    with pytest.raises(TypeError, match="unsupported operand"):
        one + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        sum([one], start=1)  # type: ignore[call-overload]
