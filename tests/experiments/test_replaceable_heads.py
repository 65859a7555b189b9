"""Heads replaced together: the order by curvature, the measured curve, and the set within a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo

from tl_posdisent import ablate_heads, demo_tokens, dummy_distance, head_effects, load_demo_model, replaceable_heads
from tl_posdisent.hooks import applied, fitted_attention, lambda_mask, substitute_attention

TOKENS = zoo.random_tokens(length=9, batch=4)
FEW = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "bloom"))
QUIET: dict[str, Any] = {"heldout": TOKENS[2:], "progress": False}


def loss(model: Any, hooks: Any) -> torch.Tensor:
    """One number for each token."""
    with torch.no_grad(), applied(model, hooks):
        log_p = model(TOKENS[2:])[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, TOKENS[2:, 1:, None])[..., 0]


@FEW
def test_the_curve_is_that_of_a_loop(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = substitute_attention(model, "uniform")
    found = replaceable_heads(model, TOKENS[:2], hooks, counts=[1, 5, 16], beside=["random", "first order"], **QUIET)
    effects = head_effects(model, TOKENS[:2], {"x": hooks}, exact=0, progress=False)
    ordered = effects.sort_values("curvature")
    assert found.order[["layer", "head"]].values.tolist() == ordered[["layer", "head"]].values.tolist()
    assert found.order["rank"].tolist() == list(range(1, 17))
    assert found.curve["heads"].tolist() == [0, 1, 5, 16] * 3
    plain, curve = loss(model, []), found.curve.set_index(["order", "heads"])
    by_size = effects.sort_values("first", key=abs)
    assert by_size.index.tolist() != effects.sort_values("first").index.tolist()  # signs differ
    for by, order in (("curvature", ordered), ("first order", by_size)):
        for n in (1, 5, 16):
            pairs = [(int(layer), int(head)) for layer, head in order[["layer", "head"]].values[:n]]
            changed = loss(model, substitute_attention(model, "uniform", heads=pairs)) - plain
            assert curve.loc[(by, n), "added_loss"] == pytest.approx(changed.mean().item(), abs=2e-6)
    assert len({round(x, 6) for x in curve["added_loss"].xs(16, level=1)}) == 1  # all heads, in any order
    assert curve.loc[("random", 5), "added_loss"] != curve.loc[("curvature", 5), "added_loss"]
    assert curve["sd"].isna().sum() == 8  # of random orders alone
    assert curve.loc["random", "sd"][[1, 5]].min() > 1e-4
    assert curve.loc[("random", 16), "sd"] == pytest.approx(0, abs=1e-9)
    assert (curve["added_loss"].xs(0, level=1) == 0).all()
    assert (curve["kl"].drop(0, level=1) > 0).all()


@FEW
def test_the_set_within_the_budget_is_the_last_below_it(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = ablate_heads(model, None)
    whole = replaceable_heads(model, TOKENS[:2], hooks, counts=range(1, 17), budget=100, **QUIET)
    costs = whole.curve[whole.curve["order"] == "curvature"]["added_loss"].to_numpy()
    assert whole.n == 16
    for budget in np.quantile(costs[costs > 0], [0.3, 0.8]):
        found = replaceable_heads(model, TOKENS[:2], hooks, budget=float(budget), beside=[], **QUIET)
        own = found.curve.set_index("heads")["added_loss"]
        assert own[found.n] <= budget < own[found.n + 1]  # known to the head
        assert (own[own.index <= found.n] <= budget).sum() >= (own.index <= found.n).sum() - 1
        assert f"{found.n} of 16 heads within {budget:g} nats per token" in repr(found)
        assert (loss(model, found.hooks(hooks)) - loss(model, [])).mean().item() == pytest.approx(
            own[found.n], abs=2e-6
        )
        with pytest.raises(ValueError, match="n must be an integer from 0 to 16, got 17"):
            found.hooks(hooks, 17)


def test_heads_of_large_negative_first_order_come_last(shared_model: Any) -> None:
    """Attribution patching orders heads by the size of their effects: a large gain in the loss is a large change."""
    model = shared_model("bridge", "llama-gqa")
    zero = ablate_heads(model, None)
    effects = head_effects(model, TOKENS[:2], zero, exact=0, progress=False).set_index(["layer", "head"])["first"]
    lowest, least = effects.idxmin(), effects.abs().idxmin()
    assert effects[lowest] < -5 * abs(effects[least])
    two = {"heads": [(int(layer), int(head)) for layer, head in (lowest, least)], "counts": [1], **QUIET}
    found = replaceable_heads(model, TOKENS[:2], zero, beside=["first order"], **two)
    curve = found.curve.set_index(["order", "heads"])["added_loss"]
    alone = loss(model, ablate_heads(model, [two["heads"][1]])) - loss(model, [])
    assert curve["first order", 1] == pytest.approx(alone.mean().item(), abs=2e-6)


def test_random_orders_are_averaged_with_their_standard_deviation(shared_model: Any) -> None:
    """Of two heads, each order begins with one: the mean and the deviation are those of k of n orders."""
    model, n, pairs = shared_model("bridge", "llama-gqa"), 9, [(0, 1), (1, 4)]
    zero = ablate_heads(model, None)
    options: dict[str, Any] = {"heads": pairs, "counts": [1], "random_orders": n, **QUIET}
    found = replaceable_heads(model, TOKENS[:2], zero, **options)
    row = found.curve.set_index(["order", "heads"]).loc[("random", 1)]
    plain = loss(model, [])
    first, second = ((loss(model, ablate_heads(model, [pair])) - plain).double() for pair in pairs)
    k = round(float((row["added_loss"] - second.mean()) / (first.mean() - second.mean())) * n)
    assert 0 < k < n  # not all begin with the same head
    assert row["added_loss"] == pytest.approx(((k * first + (n - k) * second) / n).mean().item(), abs=2e-6)
    by_order = [first.mean().item()] * k + [second.mean().item()] * (n - k)
    assert row["sd"] == pytest.approx(np.std(by_order, ddof=1), abs=2e-6)
    again = replaceable_heads(model, TOKENS[:2], zero, **options)
    pd.testing.assert_frame_equal(again.curve, found.curve)
    one = replaceable_heads(model, TOKENS[:2], zero, **options | {"random_orders": 1}).curve
    assert one["sd"].isna().all()
    assert f"in random order {row['added_loss']:.3f} (standard deviation over orders {row['sd']:.3f})" in repr(found)


def test_the_seed_gives_the_random_orders(shared_model: Any) -> None:
    model, options = shared_model("bridge", "llama-gqa"), {"counts": [4], **QUIET}
    zero = ablate_heads(model, None)
    curves = [replaceable_heads(model, TOKENS[:2], zero, seed=seed, **options).curve for seed in (0, 0, 1)]
    costs = [curve.set_index(["order", "heads"])["added_loss"]["random", 4] for curve in curves]
    assert costs[0] == costs[1] != costs[2]


def test_each_head_takes_its_cheapest_intervention(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    several = {
        "zero": ablate_heads(model, None),
        "near": dummy_distance(model, 1, layers=0),
        "window": lambda_mask(model, 1, 3, 9),
    }
    found = replaceable_heads(model, TOKENS[:2], several, counts=[8], **QUIET)
    effects = head_effects(model, TOKENS[:2], several, exact=0, progress=False)
    cheapest = effects.loc[effects.groupby(["layer", "head"])["curvature"].idxmin()].set_index(["layer", "head"])
    for row in found.order.itertuples():
        assert cheapest.loc[(row.layer, row.head), "intervention"] == row.intervention
        assert cheapest.loc[(row.layer, row.head), "curvature"] == row.curvature
    assert len(set(found.order["intervention"])) > 1
    frame = found.hooks(several, 8).to_frame()
    assert sorted(map(tuple, frame[["layer", "head"]].drop_duplicates().values.tolist())) == sorted(
        map(tuple, found.order[["layer", "head"]].values[:8].tolist())
    )


def test_hooks_need_the_interventions_of_the_order(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    named = {"a": ablate_heads(model, None, layers=0), "b": ablate_heads(model, None, layers=1)}
    found = replaceable_heads(model, TOKENS[:2], named, counts=[3], **QUIET)
    assert len(found.hooks(named, 3).to_frame()) == 3
    for wrong in ({"a": named["a"]}, named["a"], {"a": named["a"], "b": "ablate_heads"}):
        with pytest.raises(ValueError, match="interventions must be the hooks of"):
            found.hooks(wrong)
    beside = named | {"b": named["b"] + [("blocks.1.attn.hook_z", lambda z, hook: z * 0)]}
    with pytest.raises(ValueError, match=r"package alone, got functions of your own in ablate_heads.* \+ 1 more"):
        found.hooks(beside)
    layer, head = found.order[["layer", "head"]].values[2]
    others = [h for h in range(8) if h != head]
    fewer = named | {"ab"[layer]: ablate_heads(model, others, layers=int(layer))}
    with pytest.raises(
        ValueError, match=rf"must act on the first 3 heads of the order, but none acts on L{layer}H{head}"
    ):
        found.hooks(fewer, 3)
    assert len(found.hooks(fewer, 2).to_frame()) == 2


def test_static_heads_of_the_demo_model_diverge_least_by_curvature_and_most_at_random() -> None:
    model, tokens = load_demo_model(), demo_tokens(length=12 * 64).view(12, 64)
    static = fitted_attention(model, tokens[:6])
    options: dict[str, Any] = {"heldout": tokens[9:], "progress": False, "counts": [10, 20, 30]}
    options["beside"] = ["random", "first order"]
    found = replaceable_heads(model, tokens[6:9], static, **options)
    kl = found.curve.pivot(index="heads", columns="order", values="kl").loc[[10, 20, 30]]
    assert (kl["curvature"] < kl["first order"]).all()
    assert (kl["first order"] < kl["random"]).all()


@pytest.mark.usefixtures("unchecked")
def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    hooks = ablate_heads(model, None)
    own = {"x": [("blocks.0.attn.hook_pattern", lambda x, hook: x)]}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (own, {}, "interventions must be hooks of this package alone, got functions of your own in 1 more"),
        (hooks, {"counts": [17]}, "counts must be an integer from 1 to 16, got 17"),
        (hooks, {"counts": []}, "counts must be numbers of heads"),
        (hooks, {"budget": 0}, "budget must be"),
        (hooks, {"draws": 0}, "draws must be"),
        (hooks, {"random_orders": 0}, "random_orders must be an integer of at least 1, got 0"),
        (hooks, {"beside": ["best"]}, "beside must be"),
    ]
    for interventions, options, message in cases:
        with pytest.raises(ValueError, match=message):
            replaceable_heads(model, TOKENS[:2], interventions, **QUIET | options)
