"""Results show themselves: every result with a table has one in a notebook, and draws what its function draws."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.public import public_names

import tl_posdisent as tp
from tl_posdisent.rope import decompose
from tl_posdisent.utils.tables import HasTable

SCORES = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 2, 8, generator=generator), torch.randn(12, 2, 8, generator=generator)


def test_every_result_with_a_table_shows_it_in_a_notebook() -> None:
    results = [x for x in public_names().values() if inspect.isclass(x) and hasattr(x, "to_frame")]
    assert len(results) >= 10
    assert not [x.__name__ for x in results if not issubclass(x, HasTable) and not hasattr(x, "_repr_html_")]


def test_a_notebook_shows_the_first_line_and_the_table() -> None:
    fit = tp.fit_additive(SCORES)
    page = fit._repr_html_()
    assert repr(fit).splitlines()[0] in page
    for r in fit.r.tolist():
        assert f"<td>{round(r, 3)}</td>" in page
    many = tp.fit_additive(torch.randn(30, 4, 4, generator=torch.Generator().manual_seed(0)))._repr_html_()
    assert many.count("<tr") == 21
    assert "The first 20 of 30 rows" in many


def test_plot_is_the_function_of_the_result() -> None:
    fit, attention = tp.fit_additive(SCORES), tp.fit_attention(SCORES)
    assert fit.plot(top=1).to_dict() == tp.plot_distance(fit, top=1).to_dict()
    assert attention.plot(title="Mine").to_dict() == tp.plot_distance(attention, title="Mine").to_dict()
    q, k = vectors()
    rotary = tp.rope.Rotary(torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64))
    shares = decompose(tp.rope.Moments.from_qk(q, k, rotary), range(8), scale=1.0)
    assert shares.plot().to_dict() == tp.plot_shares(shares.to_frame()).to_dict()


def test_show_is_the_widget_of_the_result() -> None:
    fit = tp.fit_additive(SCORES)
    shown: Any = fit.show([*"abcdefghijkl"], "distance", heads=[1])
    assert shown.title == tp.show_scores(fit, [*"abcdefghijkl"], "distance", heads=[1]).title
    with pytest.raises(ValueError, match="tokens must be as many as the keys"):
        fit.show(["a"])
