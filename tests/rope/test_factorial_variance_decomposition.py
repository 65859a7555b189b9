"""Variance at controlled distances: against the tensor of all scores, and against what algebra demands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rotary_layers import DISTANCES, LAYERS, SCALE, all_scores, anova, draw, frequencies
from torch import Tensor

from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS, VarianceShares, decompose
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary


def assert_same(ours: VarianceShares, theirs: dict[str, Tensor], close: float = 1e-12) -> None:
    total = sum(theirs[component] for component in COMPONENTS)
    torch.testing.assert_close(ours.total, total, rtol=close, atol=0)
    torch.testing.assert_close(ours.mean, theirs["mean"], rtol=close, atol=close * float(total.max()) ** 0.5)
    for component in COMPONENTS:
        error = (ours.variance(component) - theirs[component]).abs() / total
        assert float(error.max()) < close, component


@pytest.mark.parametrize("at", DISTANCES)
@pytest.mark.parametrize("layer", LAYERS)
def test_decomposition_is_the_anova_of_all_scores(layer: str, at: str) -> None:
    rotary, distances = LAYERS[layer][0], DISTANCES[at]
    q, k = draw(layer)
    ours = decompose(Moments.from_qk(q, k, rotary), distances, scale=SCALE)
    assert_same(ours, anova(all_scores(q, k, rotary, distances)))
    torch.testing.assert_close(ours.shares.sum(0), torch.ones(q.shape[1]).double())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    n_q=st.integers(1, 6),
    n_k=st.integers(2, 6),
    distances=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    log_mean=st.floats(-3, 3),
    scale=st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3),
    seed=st.integers(0, 1000),
)
def test_decomposition_of_anything(
    layer: str, n_q: int, n_k: int, distances: list[float], log_mean: float, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rotary = LAYERS[layer][0]
    q, k = draw(layer, n_q, n_k, mean=10**log_mean)
    ours = decompose(Moments.from_qk(q, k, rotary), distances, scale=scale)
    assert_same(ours, anova(all_scores(q, k, rotary, distances, scale)), close=1e-9)


def test_means_far_larger_than_the_spread() -> None:
    rotary = LAYERS["half"][0]
    q, k = draw("half", mean=1e6)
    ours = decompose(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)
    # The oracle cancels: its interactions come from differences of scores of 1e13. Centre what it sees instead.
    q0, k0 = (x.mean(0, keepdim=True) for x in (q, k))
    pure = anova(all_scores(q - q0, k - k0, rotary, range(9)))
    for component in ("query:key", "distance:query:key"):
        torch.testing.assert_close(ours.variance(component), pure[component], rtol=1e-9, atol=0)
    one_side = anova(all_scores(q0, k - k0, rotary, range(9)))
    for component in ("key", "distance:key"):
        torch.testing.assert_close(ours.variance(component), one_side[component], rtol=1e-9, atol=0)


def test_both_r_are_correlations_of_fitted_scores() -> None:
    rotary = LAYERS["grouped"][0]
    q, k = draw("grouped")
    shares = decompose(Moments.from_qk(q, k, rotary), range(10), scale=SCALE)
    w = all_scores(q, k, rotary, range(10))
    additive = w.mean((2, 3), True) + w.mean((1, 3), True) + w.mean((1, 2), True)
    two_axis = w.mean(3, True) + w.mean(1, True) - w.mean((1, 3), True)
    for fitted, r in ((additive, shares.r_three_axis), (two_axis, shares.r_two_axis)):
        expected = [
            torch.corrcoef(torch.stack([x.expand_as(y).flatten(), y.flatten()]))[0, 1]
            for x, y in zip(fitted, w, strict=True)
        ]
        torch.testing.assert_close(r, torch.stack(expected), rtol=1e-10, atol=0)


def test_many_distances_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    whole = decompose(moments, range(1000), scale=SCALE)
    monkeypatch.setattr("tl_posdisent.rope.factorial_variance_decomposition.ANGLES_AT_ONCE", 400)
    parts = decompose(moments, range(1000), scale=SCALE)
    torch.testing.assert_close(parts.variances, whole.variances, rtol=1e-12, atol=1e-15)


def test_table_has_a_row_per_head_and_says_what_the_result_says() -> None:
    moments = Moments.from_qk(*draw("grouped"), LAYERS["grouped"][0])
    shares = decompose(moments, range(6), scale=SCALE)
    table = shares.to_frame()
    assert table["head"].tolist() == list(range(6))
    assert table["distance:key"].tolist() == shares.share("distance:key").tolist()
    assert table["r_two_axis"].tolist() == shares.r_two_axis.tolist()
    assert f"r two-axis {shares.r_two_axis.mean().item():.3f}" in repr(shares)


def test_heads_whose_scores_do_not_vary_have_no_shares() -> None:
    q, k = draw("half")
    q[:, 1] = 0
    moments = Moments.from_qk(q, k, LAYERS["half"][0])
    shares = decompose(moments, range(9), scale=SCALE)
    assert shares.total[0] > 0
    assert shares.total[1] == 0
    for values in (shares.shares.T, shares.r_three_axis, shares.r_two_axis):
        assert not bool(values[0].isnan().any())
        assert bool(values[1].isnan().all())


def test_scores_that_vary_by_rounding_alone_do_not_vary() -> None:
    q, k = torch.zeros(9, 1, 4), torch.ones(7, 1, 4)
    q[:, 0, 0], k[:, 0, 0] = torch.randn(9), 0.0  # queries vary where keys are nothing
    q[:, 0, 1:] = 0.1
    shares = decompose(Moments.from_qk(q, k, Rotary(frequencies(0))), range(9), scale=SCALE)
    assert shares.total.tolist() == [0.0]
    assert bool(shares.shares.isnan().all())


def test_no_correlation_is_above_one_whatever_rounding_does() -> None:
    """Shares of a sum of parts add up to 1, or to a little more where the total was rounded down."""
    variances = torch.zeros(len(COMPONENTS), 1, dtype=torch.float64)
    variances[:3, 0] = torch.tensor([0.3, 0.3, 0.4])
    shares = VarianceShares(torch.zeros(1, dtype=torch.float64), variances, variances.sum(0) * (1 - 1e-12))
    assert float(shares.r_three_axis) == 1
    assert float(shares.r_two_axis) == 1
