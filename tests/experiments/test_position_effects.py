"""Effects at single positions: sums of those of whole heads, and equal to changes of one position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.untouched import state
from torch import Tensor

from tl_posdisent import ablate_heads, dummy_distance, head_effects
from tl_posdisent.experiments import position_effects
from tl_posdisent.hooks import substitute_attention

TOKENS = zoo.random_tokens(length=9, batch=3)
MECHANISMS = zoo.cases("llama-gqa", "gptj", "bloom", "gemma2", "opt")
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
HEAD = ["intervention", "layer", "head"]


def at_position(position: int, by: float) -> list[Any]:
    """A user's own hooks: the results of all heads at one position times a number."""

    def scale(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, position] *= by
        return z

    return [(f"blocks.{layer}.attn.hook_z", scale) for layer in range(2)]


def by_position(model: Any, interventions: Any, **options: Any) -> pd.DataFrame:
    options = {"tokens": TOKENS, "progress": False, "draws": 2} | options
    return position_effects(model, options.pop("tokens"), interventions, **options)


def by_head(model: Any, interventions: Any, **options: Any) -> pd.DataFrame:
    options = {"tokens": TOKENS, "progress": False, "draws": 2, "exact": 0} | options
    return head_effects(model, options.pop("tokens"), interventions, **options)


@pytest.mark.parametrize(("kind", "name"), MECHANISMS)
def test_first_order_effects_add_up_to_those_of_heads(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    interventions = {"zero": ablate_heads(model, None), "uniform": substitute_attention(model, "uniform")}
    table, expected = (f(model, interventions) for f in (by_position, by_head))
    assert len(table) == len(expected) * TOKENS.numel()
    sums = table.groupby(HEAD, sort=False)["first"].sum() / len(TOKENS)
    assert sums.index.tolist() == list(expected[HEAD].itertuples(index=False, name=None))
    assert sums.tolist() == pytest.approx(expected["first"].tolist(), rel=1e-4, abs=1e-7)
    assert expected["first"].abs().max() > 1e-4


def test_own_hooks_beside_those_of_the_package_act(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    five, own = dummy_distance(model, 5, layers=0), [("blocks.0.attn.hook_z", lambda z, hook: z * 0.3)]
    table, expected = (f(model, {"both": five + own}) for f in (by_position, by_head))
    sums = table.groupby(HEAD, sort=False)["first"].sum() / len(TOKENS)
    assert sums.tolist() == pytest.approx(expected["first"].tolist(), rel=1e-4, abs=1e-7)
    for alone in (five, own):
        assert not np.allclose(sums, by_head(model, {"both": alone})["first"], rtol=0.1)


@FEW
@pytest.mark.parametrize("position", [0, 4, 7])
def test_a_position_is_that_position_replaced_alone(kind: str, name: str, position: int, shared_model: Any) -> None:
    """The same labels are drawn, so the estimates are equal, not only close."""
    model = shared_model(kind, name)
    table = by_position(model, {"zero": ablate_heads(model, None)}, seed=3)
    at = table[table["position"] == position].groupby(HEAD[1:])[["first", "curvature"]].mean()
    expected = by_head(model, {"zero": at_position(position, 0.0)}, seed=3)
    assert at["first"].tolist() == pytest.approx(expected["first"].tolist(), rel=1e-4, abs=1e-8)
    assert at["curvature"].tolist() == pytest.approx(expected["curvature"].tolist(), rel=1e-4, abs=1e-10)
    assert at["curvature"].max() > 1e-5


def test_small_changes_have_the_exact_divergence() -> None:
    """The error of a mean over draws is that of 400 draws for each of three texts."""
    model = zoo.load("bridge", "llama-gqa").double()
    small, position = 1 - 1e-2, 5
    table = by_position(
        model, {"less": [(f"blocks.{n}.attn.hook_z", lambda z, hook: z * small) for n in (0, 1)]}, draws=400
    )
    at = table[table["position"] == position].groupby(HEAD[1:])["curvature"].mean()
    exact = by_head(model, {"less": at_position(position, small)}, draws=0, exact=16)["kl"]
    assert len(exact) == 16
    assert at.to_numpy() == pytest.approx(exact.to_numpy(), rel=0.3)
    assert np.log(at / exact.to_numpy()).abs().mean() < 0.1


def test_texts_of_unequal_length_and_other_metrics(shared_model: Any) -> None:
    """Each text is measured alone; a metric of all texts together is differentiated for each of them."""
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones_like(TOKENS)
    mask[1, 6:] = 0
    zero = ablate_heads(model, None)
    table = by_position(model, zero, attention_mask=mask)
    assert table.groupby("batch")["position"].nunique().tolist() == [9, 6, 9]
    alone = by_position(model, zero, tokens=TOKENS[1:2, :6], draws=0)
    second = table[table["batch"] == 1]
    assert second["first"].tolist() == pytest.approx(alone["first"].tolist(), rel=1e-4, abs=1e-8)
    assert alone["curvature"].isna().all()
    assert table["curvature"].notna().all()

    def last(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[:, -1].logsumexp(-1)

    table, expected = by_position(model, zero, metric=last), by_head(model, zero, metric=last)
    sums = table.groupby(HEAD, sort=False)["first"].sum() / len(TOKENS)
    assert sums.tolist() == pytest.approx(expected["first"].tolist(), rel=1e-4, abs=1e-7)


@pytest.mark.usefixtures("unchecked")
def test_refusals_and_the_model_is_as_it_was() -> None:
    model = zoo.load("bridge", "llama-gqa")
    before, zero = state(model), ablate_heads(model, None)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({}, {}, "interventions must be hooks by name"),
        (ablate_heads(model, None, mode="resample"), {}, "interventions must act on each text alone"),
        (zero, {"metric": lambda logits, tokens: 3.0}, "metric must return a tensor to be differentiated"),
        ([("blocks.0.attn.hook_z", lambda z, hook: z)], {}, "interventions must"),
        (dummy_distance(model, 2, layers=[0]), {"layers": 1}, "must act on the chosen heads"),
    ]
    for interventions, options, message in cases:
        with pytest.raises(ValueError, match=message):
            by_position(model, interventions, **options)
    by_position(model, zero)
    assert state(model) == before
    assert all(x.grad is None for x in model.parameters())
