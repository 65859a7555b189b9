"""Shares of the variance by subspace add up to the whole, and a pair of subspaces is shared in halves."""

from __future__ import annotations

import math

import pytest
import torch
from support.rotary_layers import LAYERS, SCALE, all_scores, anova, draw
from torch import Tensor

from tl_posdisent.rope.factorial_variance_decomposition import decompose
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.subspaces import subspace_patterns_qk

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
