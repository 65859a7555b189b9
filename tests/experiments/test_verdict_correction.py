"""Verdicts of many heads: how many are called used by chance, with and without the correction for their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tl_posdisent import head_verdicts

BLOCKS, ERROR = 10, 0.01


def ladders(worth: np.ndarray, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """A ladder of heads that are worth so much, measured with Student's noise of ``BLOCKS`` blocks; and t values."""
    draws = np.random.default_rng(seed).normal(0, ERROR * BLOCKS**0.5, (len(worth), BLOCKS))
    gap = worth + draws.mean(1)
    error = draws.std(1, ddof=1) / BLOCKS**0.5
    rows = []
    for head, (mean, se) in enumerate(zip(gap, error, strict=True)):
        for rung, loss in {"mean_output": 2 + mean, "uniform": 9.0, "untouched": 2.0}.items():
            rows.append({"head": head, "rung": rung, "loss": loss, "error": se if rung == "mean_output" else 0.1})
    table = pd.DataFrame(rows).assign(layer=0, control="none", recovered=0.0, se=0.1, blocks=BLOCKS, causal=True)
    return table, gap / error


def of_loss(table: pd.DataFrame, correction: Any) -> pd.Series:
    return head_verdicts(table, measure="loss", correction=correction)["verdict"]


def test_the_false_discovery_rate_is_held_and_by_chance_as_many_pass_as_the_page_says() -> None:
    """Twelve tables of 100 heads, ten of them used: without the correction 2.5 % of the others are called used."""
    worth = np.where(np.arange(100) < 10, 0.08, 0.0)
    plain, shares = 0, []
    for seed in range(12):
        table, _ = ladders(worth, seed)
        used = {x: of_loss(table, x).ne("not used") for x in ("none", "fdr")}
        plain += used["none"][10:].sum()
        shares.append(used["fdr"][10:].sum() / max(1, used["fdr"].sum()))
        assert used["fdr"][:10].sum() >= 7
    expected = 12 * 90 * 0.025
    assert plain == pytest.approx(expected, abs=4 * expected**0.5)
    assert np.mean(shares) <= 0.05
    assert max(shares) > 0  # it can fail


@pytest.mark.parametrize("n", [1, 7, 60])
def test_what_passes_is_what_the_step_up_procedure_passes(n: int) -> None:
    table, t = ladders(np.linspace(0, 0.05, n), n)
    p = np.where(t > 0, 2 * stats.t.sf(np.abs(t), BLOCKS - 1), 1.0)
    limits = 0.05 * np.arange(1, n + 1) / n
    n_passed = max(np.flatnonzero(np.sort(p) <= limits) + 1, default=0)
    found = head_verdicts(table, measure="loss", correction="fdr")
    np.testing.assert_array_equal(found["verdict"].ne("not used"), p <= limits[n_passed - 1] if n_passed else p < 0)
    assert found.attrs["confidence"] == pytest.approx(1 - 0.05 * max(1, n_passed) / n)
    assert head_verdicts(table, measure="loss").attrs["confidence"] == 0.95


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match="correction must be"):
        head_verdicts(ladders(np.zeros(2), 0)[0], correction="holm")  # type: ignore[arg-type]
