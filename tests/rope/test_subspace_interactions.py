"""A pair of subspaces is shared in halves; that shares add up to the whole is in test_subspaces.py."""

from __future__ import annotations

import torch
from support.rotary_layers import LAYERS, SCALE, all_scores, anova, draw
from torch import Tensor

from tl_posdisent.rope.subspaces import subspace_patterns_qk


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
