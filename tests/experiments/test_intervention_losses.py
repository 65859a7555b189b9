"""Losses under interventions are those of the model's own runs, token by token, and errors those of blocks by hand."""

from __future__ import annotations

import re
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from support.tolerance import rounding

import tl_posdisent as tp
from tl_posdisent.experiments import intervention_losses

TOKENS = zoo.random_tokens(length=24, batch=4)
CLOSE = rounding(log(61), 2)  # of the difference of two losses of logits in float32
QUIET: dict[str, Any] = {"progress": False}


def interventions(model: Any) -> dict[str, Any]:
    return {
        "same distances": tp.remap_distance(model, lambda d: d),
        "one distance": tp.dummy_distance(model, 1),
        "no head 3": tp.ablate_heads(model, [3], layers=[0, 1]),
        "of one's own": [("blocks.1.hook_resid_pre", lambda x, hook: 0.5 * x)],
    }


def by_token(model: Any, texts: list[torch.Tensor], hooks: Any) -> tuple[np.ndarray, list[torch.Tensor], np.ndarray]:
    """Losses, log-probabilities and correct predictions, each text by itself and in float64."""
    with torch.no_grad():
        log_p = [model.run_with_hooks(x[None], fwd_hooks=hooks)[0, :-1].double().log_softmax(-1) for x in texts]
    losses = [-p.gather(-1, x[1:, None])[:, 0] for p, x in zip(log_p, texts, strict=True)]
    right = [p.argmax(-1) == x[1:] for p, x in zip(log_p, texts, strict=True)]
    return torch.cat(losses).numpy(), log_p, torch.cat(right).double().numpy()


def error(values: np.ndarray, sizes: list[int]) -> float:
    """Standard error of the mean from sums over blocks of these sizes, whose variance is like their size."""
    sums = np.array([some.sum() for some in np.split(values, np.cumsum(sizes)[:-1])])
    weights = np.array(sizes) / len(values)
    return float((np.square(sums - weights * values.sum()) / (1 - weights)).sum() ** 0.5 / len(values))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_losses_are_those_of_runs_with_hooks(kind: str, name: str, shared_model: Any) -> None:
    """Of texts of unequal length, and of an intervention that changes nothing; the model is as before."""
    model, mask = shared_model(kind, name), torch.ones_like(TOKENS)
    mask[2, :9] = 0
    texts = [row[real.bool()] for row, real in zip(TOKENS, mask, strict=True)]
    texts = [texts[n] for n in (0, 1, 3, 2)]  # by length, as blocks are
    named = interventions(model)
    clean, before, _ = by_token(model, texts, [])
    table = intervention_losses(model, TOKENS, named, attention_mask=mask, **QUIET).set_index("intervention")
    assert (by_token(model, texts, [])[0] == clean).all()
    assert list(table.index) == ["unmodified", *named]
    sizes = [*3 * [8, 8, 7], 7, 7]  # parts of texts: at most a tenth of 83 tokens each
    for label, row in table.iterrows():
        losses, after, right = by_token(model, texts, named.get(str(label), []))
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)]).numpy()
        assert row["loss"] == pytest.approx(losses.mean(), abs=CLOSE)
        assert row["added_loss"] == pytest.approx((losses - clean).mean(), abs=CLOSE)
        assert row["added_loss_se"] == pytest.approx(error(losses - clean, sizes), abs=CLOSE)
        assert row["kl"] == pytest.approx(kl.mean(), abs=2e-6)
        assert row["kl_se"] == pytest.approx(error(kl, sizes), abs=2e-6)
        assert row["accuracy"] == right.mean()
    assert table["kl"].iloc[:2].abs().max() < 1e-6
    assert table["kl"].iloc[2:].min() > 1e-5


def test_one_list_of_hooks_and_a_reading() -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=64).view(2, 32)
    one = intervention_losses(model, tokens, tp.dummy_distance(model, 5, layers=2), **QUIET)
    named = {"five": tp.dummy_distance(model, 5, layers=2)}
    assert one["intervention"].tolist() == ["unmodified", "dummy_distance(5)"]
    again = intervention_losses(tp.read_model(model), tokens, named, **QUIET)
    assert again.drop(columns="intervention").equals(one.drop(columns="intervention"))


def test_a_sum_is_named_after_all_its_edits() -> None:
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=64).view(2, 32)
    half, limited = tp.position_interpolation(model, 2), tp.limit_frequencies(model, 0.01)
    mine = [("blocks.1.hook_resid_pre", lambda x, hook: x)]
    for hooks, name in (
        (half + limited, "position_interpolation(2) + limit_frequencies(low=0.01)"),
        (limited + mine, "limit_frequencies(low=0.01) + 1 more"),
    ):
        assert intervention_losses(model, tokens, hooks, **QUIET)["intervention"].tolist() == ["unmodified", name]
    by_distance = tp.experiments.attention_by_distance(model, tokens, half + limited, layers=[0], **QUIET)
    assert by_distance["intervention"].unique().tolist() == [
        "unmodified",
        "position_interpolation(2) + limit_frequencies(low=0.01)",
    ]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": []}, "interventions must have hooks, got [] for 'x'"),
        (
            {"unmodified": [("hook_embed", print)]},
            "interventions must not be named 'unmodified', the run without hooks",
        ),
        ({"x": [("blocks.9.hook_z", print)]}, "interventions must be hooks by name; 'x': "),
        (
            {"x": ("no_such_tool", {})},
            "interventions must be hooks by name; 'x': hooks must be a list of (hook name or filter, function), got ",
        ),
    ],
)
def test_refusals(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        intervention_losses(tp.load_demo_model(), TOKENS, given, **QUIET)
