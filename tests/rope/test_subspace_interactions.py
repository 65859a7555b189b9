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

from tl_posdisent.rope.factorial_variance_decomposition import COMPONENTS, decompose
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.subspaces import interaction_bound, subspace_patterns_qk

PARTS = ["distance", "semantic", "interaction"]


@pytest.mark.parametrize("layer", LAYERS)
def test_subspaces_sum_to_the_whole(layer: str) -> None:
    rotary, _, _, d_head = LAYERS[layer]
    q, k = draw(layer)
    table = subspace_patterns_qk(q, k, rotary, range(9), scale=SCALE)
    assert table["subspace"].nunique() == rotary.dim // 2 + math.ceil((d_head - rotary.dim) / 2)
    shares = decompose(Moments.from_qk(q, k, rotary), range(9), scale=SCALE).to_frame()
    shares["semantic"] = shares[["query", "key", "query:key"]].sum(axis=1)
    shares["interaction"] = shares[["distance:query", "distance:key", "distance:query:key"]].sum(axis=1)
    found = table.groupby("head")[PARTS].sum()
    assert float((found - shares[PARTS]).abs().max().max()) < 1e-12
    assert bool((table.loc[table["frequency"] == 0, ["distance", "interaction"]] == 0).all().all())


def test_a_pair_of_subspaces_is_shared_in_halves() -> None:
    rotary = LAYERS["half"][0]
    q, k = draw("half")
    table = subspace_patterns_qk(q, k, rotary, range(9), scale=SCALE)
    total = all_scores(q, k, rotary, range(9))[0].var(correction=0)

    def alone(*subspaces: int) -> Tensor:
        """Variance by the interactions with distance of scores that only these subspaces make."""
        kept = torch.zeros(8).double()
        kept[[i for c in subspaces for i in (c, c + 4)]] = 1
        found = anova(all_scores(q * kept, k, rotary, range(9)))
        return sum(x for name, x in found.items() if name.startswith("distance:"))[0]

    for c in range(4):
        shared = sum(alone(c, other) - alone(c) - alone(other) for other in range(4) if other != c)
        part = table["interaction"][c] * total
        torch.testing.assert_close(part, alone(c) + shared / 2, rtol=1e-9, atol=1e-12)


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
    bound = bounds(Moments.from_qk(q, k, rotary), distances, component=component)
    exact = anova(all_scores(q, k, rotary, distances))[component]
    rounding = 1e-9 * (1 + bound["total"])
    assert bool((exact <= bound["pairwise"] + rounding).all())
    assert bool((bound["pairwise"] <= bound["separate"] * (1 + 1e-12) + rounding).all())
    torch.testing.assert_close(bound["share"], exact, rtol=1e-7, atol=float(rounding.max()))


def bounds(moments: Moments, distances: Any, **options: Any) -> dict[str, Tensor]:
    """The table's columns in units of the scores squared; 0 where scores do not vary."""
    table = interaction_bound(moments, distances, scale=SCALE, **options)
    total = torch.tensor(table["total"])
    return {x: torch.tensor(table[x]).nan_to_num() * total for x in ("share", "pairwise", "separate")} | {
        "total": total
    }


def test_bound_is_the_product_of_three_standard_deviations() -> None:
    rotary = LAYERS["yarn"][0]
    q, k = draw("yarn")
    planes = [[c, c + 3] for c in range(3)]
    sd_key = torch.stack([k[:, :, p].var(0, correction=0).sum(-1).sqrt() for p in planes], -1)
    mean_query = torch.stack([q[:, :, p].mean(0).norm(dim=-1) for p in planes], -1)
    resultant = torch.polar(torch.ones(9, 3).double(), rotary.angles(torch.arange(9.0))).mean(0).abs()
    expected = SCALE * 1.2**2 * mean_query * sd_key * (1 - resultant**2).sqrt()
    separate = bounds(Moments.from_qk(q, k, rotary), range(9))["separate"]
    torch.testing.assert_close(separate, expected.sum(-1) ** 2, rtol=1e-10, atol=0)


def test_both_bounds_are_attained_by_subspaces_that_move_as_one() -> None:
    rotary = Rotary(torch.full((3,), torch.pi, dtype=torch.float64))  # turns over at every step: +1, −1
    size = torch.tensor([1.0, 2.0, 0.5, 0.0, 0.0, 0.0])  # real parts of three subspaces, different in size
    q = size.expand(5, 1, 6)
    k = torch.randn(40, 1, 1) * size  # all keys on one line
    bound = bounds(Moments.from_qk(q, k, rotary), [0, 1])
    torch.testing.assert_close(bound["pairwise"], bound["share"], rtol=1e-10, atol=0)
    torch.testing.assert_close(bound["separate"], bound["share"], rtol=1e-10, atol=0)


def test_pairwise_bound_is_attained_over_a_full_turn_where_the_separate_one_is_twice_too_large() -> None:
    rotary = Rotary(torch.tensor([torch.pi / 4], dtype=torch.float64))
    bound = bounds(Moments.from_qk(*torch.randn(2, 30, 2, 2), rotary), range(8))
    torch.testing.assert_close(bound["pairwise"], bound["share"], rtol=1e-10, atol=0)
    torch.testing.assert_close(bound["separate"], 2 * bound["share"], rtol=1e-10, atol=0)
