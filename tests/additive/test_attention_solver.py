"""Where the importances of keys alone have a closed form, Newton's method has nothing left to do."""

from __future__ import annotations

import pytest
import torch
from support.masks import CASES

from tl_posdisent.additive.attention.attention_solver import Design, solve_attention
from tl_posdisent.additive.attention.attention_sums import AttentionSums, Layout
from tl_posdisent.additive.cells import make_cells


@pytest.mark.parametrize("name", ["causal-40", "fewer-queries"])
@pytest.mark.parametrize("span", [1, 3])
def test_importances_alone_in_closed_form(name: str, span: int) -> None:
    case = CASES[name]
    cells = make_cells(case.shape, "causal", None)
    layout = Layout.of(cells, (), (2,), pool=False, named=True)
    stacked = torch.zeros(2, 1, layout.n_coefficient, dtype=torch.float64)
    key = layout.split(stacked)[1]
    key.copy_(span * torch.randn(key.shape, dtype=torch.float64))
    wanted = AttentionSums(layout, stacked, direct=True)
    found = solve_attention(Design(layout, 1, distance=False), wanted.marginals)
    assert found.steps == found.products == 0
    torch.testing.assert_close(
        found.sums.marginals[..., layout.n_distance :], wanted.marginals[..., layout.n_distance :]
    )
    recovered = layout.split(found.stacked)[1]
    torch.testing.assert_close(recovered - recovered[..., :1], key - key[..., :1], rtol=0, atol=1e-6)
