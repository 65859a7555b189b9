"""Components by subspace add up to the whole, and bounds hold and are attained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rotary_layers import LAYERS, SCALE, all_scores, anova, draw
from torch import Tensor

from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.subspaces import interaction_bound, interaction_by_subspace
from tl_posdisent.rope.variance_decomposition import COMPONENTS, decompose


@pytest.mark.parametrize("layer", LAYERS)
def test_subspaces_sum_to_the_whole(layer: str) -> None:
    rotary, _, _, d_head = LAYERS[layer]
    moments = Moments.from_qk(*draw(layer), rotary)
    whole = decompose(moments, range(9), scale=SCALE)
    parts = interaction_by_subspace(moments, range(9), scale=SCALE, components=COMPONENTS)
    assert parts.variances.shape[-1] == rotary.dim // 2 + math.ceil((d_head - rotary.dim) / 2)
    error = (parts.variances.sum(-1) - whole.variances).abs() / whole.total
    assert float(error.max()) < 1e-12
    for component in ("distance", "distance:query", "distance:key", "distance:query:key"):
        assert bool((parts.share(component)[:, parts.frequencies == 0] == 0).all())


def test_a_pair_of_subspaces_is_shared_in_halves() -> None:
    rotary = LAYERS["half"][0]
    q, k = draw("half")
    parts = interaction_by_subspace(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)

    def alone(*subspaces: int) -> Tensor:
        """distance:key variance of scores that only these subspaces make."""
        kept = torch.zeros(8).double()
        kept[[i for c in subspaces for i in (c, c + 4)]] = 1
        return anova(all_scores(q * kept, k, rotary, range(9)))["distance:key"]

    for c in range(4):
        shared = sum(alone(c, other) - alone(c) - alone(other) for other in range(4) if other != c)
        torch.testing.assert_close(parts.variances[0, :, c], alone(c) + shared / 2, rtol=1e-9, atol=1e-12)


def test_subspace_table_has_its_frequencies_and_adds_up() -> None:
    rotary = LAYERS["yarn"][0]
    moments = Moments.from_qk(*draw("yarn"), rotary)
    parts = interaction_by_subspace(moments, range(9), scale=SCALE)
    table = parts.to_frame()
    assert list(table)[:4] == ["head", "subspace", "frequency", "wavelength"]
    assert table["frequency"].tolist() == [*rotary.frequencies.tolist(), 0.0, 0.0] * 2
    assert table["wavelength"].tolist() == [*rotary.wavelengths.tolist(), math.inf, math.inf] * 2
    by_head = table.groupby("head")["distance:key"].sum()
    assert by_head.tolist() == pytest.approx(decompose(moments, range(9), scale=SCALE).share("distance:key").tolist())
    assert f"distance:key {by_head.mean():.3f}" in repr(parts)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    distances=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    mean=st.floats(0, 10),
    component=st.sampled_from([component for component in COMPONENTS if "distance:" in component]),
    seed=st.integers(0, 1000),
)
def test_bound_holds(layer: str, distances: list[float], mean: float, component: Any, seed: int) -> None:
    torch.manual_seed(seed)
    rotary = LAYERS[layer][0]
    q, k = draw(layer, mean=mean)
    bound = interaction_bound(Moments.from_qk(q, k, rotary), distances, scale=SCALE, component=component)
    exact = anova(all_scores(q, k, rotary, distances))[component]
    rounding = 1e-9 * (1 + bound.total)
    assert bool((exact <= bound.pairwise + rounding).all())
    assert bool((bound.pairwise <= bound.separate * (1 + 1e-12) + rounding).all())
    torch.testing.assert_close(bound.variance, exact, rtol=1e-7, atol=float(rounding.max()))


def test_bound_is_the_product_of_three_standard_deviations() -> None:
    rotary = LAYERS["yarn"][0]
    q, k = draw("yarn")
    bound = interaction_bound(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)
    planes = [[c, c + 3] for c in range(3)]
    sd_key = torch.stack([k[:, :, p].var(0, correction=0).sum(-1).sqrt() for p in planes], -1)
    mean_query = torch.stack([q[:, :, p].mean(0).norm(dim=-1) for p in planes], -1)
    resultant = torch.polar(torch.ones(9, 3).double(), rotary.angles(torch.arange(9.0))).mean(0).abs()
    expected = SCALE * 1.2**2 * mean_query * sd_key * (1 - resultant**2).sqrt()
    torch.testing.assert_close(bound.spreads[:, :3], expected, rtol=1e-10, atol=0)
    assert bound.spreads[:, 3:].count_nonzero() == 0  # what does not turn cannot interact with the distance
    torch.testing.assert_close(bound.separate, expected.sum(-1) ** 2, rtol=1e-10, atol=0)


def test_both_bounds_are_attained_by_subspaces_that_move_as_one() -> None:
    rotary = Rotary(torch.full((3,), torch.pi, dtype=torch.float64))  # turns over at every step: +1, −1
    size = torch.tensor([1.0, 2.0, 0.5, 0.0, 0.0, 0.0])  # real parts of three subspaces, different in size
    q = size.expand(5, 1, 6)
    k = torch.randn(40, 1, 1) * size  # all keys on one line
    bound = interaction_bound(Moments.from_qk(q, k, rotary), [0, 1], scale=SCALE)
    torch.testing.assert_close(bound.pairwise, bound.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(bound.separate, bound.variance, rtol=1e-10, atol=0)


def test_pairwise_bound_is_attained_over_a_full_turn_where_the_separate_one_is_twice_too_large() -> None:
    rotary = Rotary(torch.tensor([torch.pi / 4], dtype=torch.float64))
    bound = interaction_bound(Moments.from_qk(*torch.randn(2, 30, 2, 2), rotary), range(8), scale=SCALE)
    torch.testing.assert_close(bound.pairwise, bound.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(bound.separate, 2 * bound.variance, rtol=1e-10, atol=0)


def test_bound_tables() -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    bound = interaction_bound(moments, range(9), scale=SCALE)
    table = bound.to_frame()
    shares = decompose(moments, range(9), scale=SCALE)
    assert table["share"].tolist() == shares.share("distance:key").tolist()
    assert table["separate"].tolist() == (bound.separate / shares.total).tolist()
    assert bound.frequencies.tolist() == LAYERS["half"][0].frequencies.tolist()
    assert f"{table['pairwise'].mean():.3g} (pairwise)" in repr(bound)
