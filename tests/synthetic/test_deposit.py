"""The deposit: entropies by hand, drops against a plain loop."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pandas as pd
import pytest

from tl_posdisent import ablate_heads
from tl_posdisent.synthetic import (
    SyntheticConfig,
    SyntheticModel,
    TriggerCount,
    deposit,
    evaluate,
    head_drops,
)

MEASURES = ["drop", "second", "share", "effective_heads"]


def table(drops: list[list[float]], baseline: float = 0.9) -> pd.DataFrame:
    """As ``head_ablation`` gives it; one list per layer."""
    rows = [(n, h, baseline, baseline - x, -x) for n, layer in enumerate(drops) for h, x in enumerate(layer)]
    return pd.DataFrame(rows, columns=["layer", "head", "baseline", "value", "effect"])


def measures(drops: pd.DataFrame, **options: Any) -> list[float]:
    report = deposit(drops, **options)
    return [getattr(report, name) for name in MEASURES]


# --- by hand ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ([[0.0, 0.0], [0.6, 0.0]], [0.6, 0.0, 1.0, 1.0]),
        ([[0.2, 0.2], [0.2, 0.2]], [0.2, 0.2, 0.25, 4.0]),
        ([[0.2, 0.2], [0.0, 0.0]], [0.2, 0.2, 0.5, 2.0]),
        ([[0.4, 0.2], [0.2, -0.5]], [0.4, 0.2, 0.5, 2**1.5]),  # ½ ln 2 + 2 · ¼ ln 4 = 1½ ln 2; a gain is no drop
    ],
)
def test_by_hand(drops: list[list[float]], expected: list[float]) -> None:
    assert measures(table(drops)) == pytest.approx(expected)


def test_where_it_is() -> None:
    report = deposit(table([[0.0, 0.1], [0.1, 0.6]]))
    assert (report.layer, report.head, report.baseline) == (1, 1, 0.9)
    assert report.drops.groupby("layer")["share"].sum().tolist() == pytest.approx([0.125, 0.875])
    assert "share by layer: 0.12 0.8" in repr(report)
    assert report.to_frame().loc[0, ["layer", "head", "drop"]].tolist() == [1, 1, 0.6]
    assert "layer 1, head 1" in repr(report)


def test_layers_that_help_nobody_have_no_share() -> None:
    assert "share by layer: 1.00 0.00" in repr(deposit(table([[0.3, -0.1], [-0.2, -0.4]])))


def test_no_head_costs_anything() -> None:
    report = deposit(table([[0.0, -0.1]]))
    assert (report.drop, report.second, report.layer, report.head) == (0.0, 0.0, None, None)
    assert math.isnan(report.share)
    assert math.isnan(report.effective_heads)
    assert report.to_frame()[["layer", "head"]].isna().all(axis=None)
    assert "no head has a drop" in repr(report)


# --- laws -------------------------------------------------------------------------------------------------------


def test_a_loss_is_better_the_lower() -> None:
    drops = table([[0.3, -0.1], [0.2, 0.05]])
    as_loss = drops.assign(effect=-drops["effect"])
    assert measures(as_loss, better="lower") == measures(drops)
    assert measures(as_loss) != pytest.approx(measures(drops))


# --- drops of a model -------------------------------------------------------------------------------------------

TASK = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=4, max_length=9, n_ctx=12)


def untrained(task: Any = TASK, **shape: Any) -> SyntheticModel:
    sizes = {"d_vocab": task.d_vocab, "n_ctx": task.n_ctx, "n_out": task.n_out, "pad_id": task.pad_id}
    return SyntheticModel(SyntheticConfig(n_layers=2, d_model=16, n_heads=2, d_mlp=16, seed=3, **sizes, **shape))


@pytest.mark.parametrize(
    "shape", [{}, {"read_out": "last"}, {"read_out": "token", "causal": True}, {"encoding": "mla"}]
)
def test_drops_are_what_evaluate_says_without_the_head(shape: Any) -> None:
    model = untrained(**shape)
    tokens, labels = TASK.batch(300, seed=1)
    drops = head_drops(model, tokens, labels, progress=False)
    assert drops["baseline"].tolist() == pytest.approx([evaluate(model, tokens, labels)[1]] * 4)
    expected = []
    for layer, head in zip(drops["layer"], drops["head"], strict=True):
        with model.hooks(fwd_hooks=ablate_heads(model, [(layer, head)])):
            expected.append(evaluate(model, tokens, labels)[1])
    assert drops["value"].tolist() == pytest.approx(expected, abs=1 / 300 + 1e-9)  # a tie may fall the other way
    assert len(set(drops["value"])) > 1


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_rows_of_heads_that_cannot_be_measured_are_named(nth: int) -> None:
    """A hook of the user's that raises on every nth call: the other rows are those without it."""
    model, samples = untrained(), TASK.batch(40, seed=1)
    expected, calls = head_drops(model, *samples, progress=False), itertools.count(1)

    def fail(x: Any, hook: Any) -> None:
        if next(calls) % nth == 0:
            raise RuntimeError("the disk is full")

    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", fail)]),
        pytest.warns(UserWarning, match=r"their rows are NaN: L\dH\d: RuntimeError: the disk is full"),
    ):
        drops = head_drops(model, *samples, progress=False)
    failed = drops["value"].isna()
    assert [*drops.attrs["failures"]] == [f"L{x.layer}H{x.head}" for x in drops[failed].itertuples()]
    assert 0 < failed.sum() < len(drops)
    assert drops.loc[failed, ["effect", "loss_value", "loss_effect"]].isna().all(axis=None)
    pd.testing.assert_frame_equal(drops[~failed], expected[~failed], atol=1e-6)
    with pytest.raises(ValueError, match="drops must have finite numbers as effect, got nan"):
        deposit(drops)
