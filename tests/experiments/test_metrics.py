"""Metrics of every kind, the logit difference by hand, at any padding: the same in every experiment that takes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow
from support.public_calls import Function, call
from support.small_models import small_model
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import (
    attention_ladder,
    component_patching,
    head_ablation,
    head_patching,
    logit_difference,
    position_patching,
)
from tl_posdisent.experiments.measuring.metrics import as_numbers, next_token_loss
from tl_posdisent.utils.errors import ArgumentError

TOKENS = zoo.random_tokens(length=9, batch=3)
LENGTHS = [9, 6, 7]
RIGHT = torch.zeros_like(TOKENS)
for _row, _n in enumerate(LENGTHS):
    RIGHT[_row, :_n] = 1
LEFT = RIGHT.flip(1)
ANSWERS, WRONG = [3, 8, 11], [[5, 6], [7, 2], [9, 1]]
pytestmark = pytest.mark.usefixtures("unchecked")

EXPERIMENTS: dict[str, Callable[..., pd.DataFrame]] = {
    "ablation": lambda model, metric, **more: head_ablation(model, TOKENS, metric, layers=1, **more),
    "position": lambda model, metric, **more: position_patching(
        model, TOKENS, torch.arange(9) * 3, metric, layers=1, **more
    ),
    "component": lambda model, metric, **more: component_patching(
        model, TOKENS, "key", source=TOKENS.roll(1, 0) if not more else TOKENS + 1, metric=metric, layers=1, **more
    ),
    "head": lambda model, metric, **more: head_patching(model, TOKENS, TOKENS + 1, metric, layers=1, **more),
    "ladder": lambda model, metric, attention_mask=None, **more: attention_ladder(
        model,
        TOKENS if attention_mask is None else {"input_ids": TOKENS, "attention_mask": attention_mask},
        metric=metric,
        rungs=["first_token"],
        controls=[],
        layers=1,
        **more,
    ),
}


SOME = pytest.mark.parametrize("experiment", ["ablation", "ladder", *slow(["position", "component", "head"])])


def by_hand(logits: Tensor, tokens: Tensor) -> Tensor:
    """As a user would write it: NaN at padding shows where a text ends."""
    values = []
    for row, own in enumerate(logits):
        last = own[~own.isnan().any(-1)][-1].float()
        values.append(last[ANSWERS[row]] - last[WRONG[row]].mean())
    return torch.stack(values)


def test_by_hand() -> None:
    logits = torch.randn(3, 9, 20, generator=torch.Generator().manual_seed(0))
    metric = logit_difference(ANSWERS, WRONG)
    torch.testing.assert_close(metric(logits, TOKENS), by_hand(logits, TOKENS))
    torch.testing.assert_close(metric(logits), metric(logits, TOKENS))
    torch.testing.assert_close(logit_difference(4)(logits, TOKENS), logits[:, -1, 4] - logits[:, -1].mean(-1))
    at = logit_difference(torch.tensor(ANSWERS), 5, position=[0, 3, -2])(logits, TOKENS)
    wanted = [logits[0, 0, 3] - logits[0, 0, 5], logits[1, 3, 8] - logits[1, 3, 5], logits[2, 7, 11] - logits[2, 7, 5]]
    torch.testing.assert_close(at, torch.stack(wanted))
    torch.testing.assert_close(metric(logits + 7, TOKENS), metric(logits, TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("padding", ["left", *slow(["none", "right"])])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_every_experiment_takes_it(kind: str, name: str, padding: str, experiment: str, shared_reading: Any) -> None:
    model, call = shared_reading(kind, name), EXPERIMENTS[experiment]
    more = {"none": {}, "right": {"attention_mask": RIGHT}, "left": {"attention_mask": LEFT}}[padding]
    got = call(model, logit_difference(ANSWERS, WRONG), progress=False, **more)
    wanted = call(model, by_hand, progress=False, **more)
    pd.testing.assert_frame_equal(got, wanted, atol=1e-5)
    assert got["value"].std() > 1e-4


@SOME
def test_a_metric_of_logits_alone(experiment: str, shared_reading: Any) -> None:
    """As in TransformerLens's own examples, whose further parameters have defaults."""
    model, call = shared_reading("bridge", "llama-gqa"), EXPERIMENTS[experiment]
    wanted = call(model, lambda logits, tokens: logits[:, -1, 5], progress=False)

    def with_answer(logits: Tensor, answer: int = 5) -> Tensor:
        return logits[:, -1, answer]

    def any_order(logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        assert tokens is not None
        return logits[:, -1, 5]

    for metric in (lambda logits: logits[:, -1, 5], with_answer, any_order, partial(with_answer, answer=5)):
        pd.testing.assert_frame_equal(call(model, metric, progress=False), wanted)
    for wrong in (5, lambda: 0, lambda logits, tokens, answer: 0, lambda logits, *, answer: 0):
        with pytest.raises(ValueError, match=r"metric must be a function of \(logits\) or \(logits, tokens\), got"):
            call(model, wrong, progress=False)


def per_text(logits: Tensor) -> Tensor:
    return logits[:, -1, 5].double()


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda logits: per_text(logits).mean().item(),
    "a scalar": lambda logits: per_text(logits).mean(),
    "one per text": per_text,
    "a list": lambda logits: per_text(logits).tolist(),
    "an array": lambda logits: per_text(logits).numpy(),
}


@SOME
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_metrics_of_every_kind(kind: str, name: str, experiment: str, shared_reading: Any) -> None:
    """A number is the mean of one per text; anything else is refused with what was given and what is needed."""
    model, call = shared_reading(kind, name), EXPERIMENTS[experiment]
    tables = {kind: call(model, metric, progress=False) for kind, metric in KINDS.items()}
    values = tables["one per text"]["value"]
    assert values.std() > 1e-4
    for table in tables.values():
        assert table["value"].tolist() == pytest.approx(values.tolist(), abs=1e-9)
        if "se" in table:
            several = table is not tables["a number"] and table is not tables["a scalar"]
            assert table["blocks"].tolist() == [3 if several else 1] * len(table)
            assert table["error"].notna().all() == several
            assert table["recovered"].notna().any()
    for wrong, got in (
        (lambda logits: logits[..., 5], r"\(3, 9\): average it over each text's tokens"),
        (lambda logits: logits[:, -1], r"\(3, \d+\): average"),
        (lambda logits: logits[0, :, 5], r"\(9,\)$"),
        (lambda logits: logits, r"\(3, 9, \d+\)$"),
        (lambda logits: per_text(logits)[:1], r"\(1,\)$"),
    ):
        with pytest.raises(ValueError, match=rf"metric must return .* of shape \(\) or \(3,\), got .* shape {got}"):
            call(model, wrong, progress=False)
    for nothing, got in ((lambda logits: "high", "str"), (lambda logits: None, "NoneType")):
        with pytest.raises(ValueError, match=f"metric must return a number or one per text, got {got}"):
            call(model, nothing, progress=False)
    with pytest.raises(ValueError, match="metric must return finite numbers, got"):
        call(model, lambda logits: float("inf"), progress=False)


@pytest.mark.filterwarnings("ignore:tokens. recovered is NaN")
@pytest.mark.parametrize("tool", ["ladder", "ablation"])
def test_as_many_numbers_of_each_run(tool: str, shared_reading: Any) -> None:
    reading = shared_reading("bridge", "llama-gqa")
    with torch.no_grad():
        plain = reading.model(TOKENS)

    def metric(logits: Tensor) -> Tensor:
        values = per_text(logits)
        return values if torch.allclose(logits, plain, atol=1e-5) else values.mean()

    with pytest.raises(ValueError, match=r"metric must return the same number of values for each run, got 3 .* and 1"):
        EXPERIMENTS[tool](reading, metric, progress=False)


@pytest.mark.parametrize("metric", KINDS.values(), ids=KINDS.keys())
def test_tools_agree_on_a_metric(metric: Callable[[Tensor], Any], shared_reading: Any) -> None:
    """The ladder's untouched run is the baseline of ablation, and its mean output is ablation by the mean."""
    model = shared_reading("bridge", "llama-gqa")
    rows = EXPERIMENTS["ladder"](model, metric, progress=False).set_index(["rung", "head"])["value"]
    ablated = head_ablation(model, TOKENS, metric, mode="mean", layers=1, progress=False)
    assert rows["mean_output"].tolist() == pytest.approx(ablated["value"].tolist(), abs=1e-5)
    assert rows["untouched"].tolist() == pytest.approx(ablated["baseline"].tolist(), abs=1e-6)


OF_LOSSES = [
    *(tp.attention_ladder, tp.head_ablation, tp.head_effects, tp.length_generalization),
    *(tp.perturbation_curve, tp.position_patching),
    *(tp.experiments.intervention_losses, tp.viz.show_loss_change),
]


@pytest.mark.parametrize("function", OF_LOSSES, ids=lambda function: function.__name__)
def test_a_model_without_logits_of_each_token_has_no_losses(function: Function) -> None:
    """Every tool says the same, whichever loss it needs first."""
    model, tokens = small_model(n_out=6, causal=True), TOKENS % 20
    more = {"heldout": tokens} if "heldout" in signature(function).parameters else {}
    own: Any = {tp.length_generalization: {"lengths": [0, 3, 9]}, tp.position_patching: {"positions": range(9)}}
    with pytest.raises(
        ArgumentError,
        match=r"model must return logits \(batch, pos, vocabulary\) for losses of next tokens, got shape \(\d, 6\) .*: "
        "for other outputs pass metric= to a tool that takes it, such as head_ablation",
    ):
        call(function, model, tokens=tokens, **more, **own.get(function, {}))


def test_a_report_says_which_sections_need_logits(tmp_path: Path) -> None:
    model, sections = small_model(n_out=6, causal=True), ["distance", "perturbation"]
    page = tp.report(model, TOKENS % 20, tmp_path / "x.html", sections=sections, control=0, progress=False)
    assert "model must return logits (batch, pos, vocabulary)" in page.read_text()


def test_logits_of_too_few_tokens() -> None:
    """A vocabulary smaller than the ids, as a classifier of each token returns."""
    tokens = torch.tensor([[1, 9, 2]])
    for output in (torch.zeros(1, 3, 9), torch.zeros(1, 2), torch.zeros(2, 3, 10), torch.zeros(1, 5, 10), None):
        with pytest.raises(ArgumentError, match=r"model must return logits .* got (shape|NoneType)"):
            next_token_loss(output, tokens)
    assert next_token_loss(torch.zeros(1, 3, 10), tokens).item() == pytest.approx(math.log(10))


def test_it_can_be_compared() -> None:
    assert logit_difference(ANSWERS, WRONG) == logit_difference(torch.tensor(ANSWERS), torch.tensor(WRONG))


def test_numbers_of_every_kind() -> None:
    values = torch.tensor([0.5, 1.5, 4.0])
    for value in (values, values.tolist(), values.numpy(), values.bfloat16()):
        assert as_numbers(value, 3).tolist() == [0.5, 1.5, 4.0]
    assert [float(as_numbers(value, 3)) for value in (2, 2.0, torch.tensor(2), values.sum() / 3)] == [2] * 4
    assert as_numbers(values > 1, 3).tolist() == [0, 1, 1]


def test_refusals_when_called() -> None:
    logits = torch.zeros(3, 9, 20)
    for given, words in (
        ({"answers": [1, 2]}, "answers must be one for each text or one for all, got 2 for 3"),
        ({"answers": 1, "wrong": [1, 2]}, "wrong must be one for each text"),
        ({"answers": 1, "position": [1, 2]}, "position must be one for each text"),
        ({"answers": 20}, "answers must be token ids from 0 to 19, got 20"),
        ({"answers": 1, "position": 9}, "position must lie within each text, got 9 in a text of 9 tokens"),
        ({"answers": 1, "position": -10}, "position must lie within each text"),
    ):
        with pytest.raises(ValueError, match=words):
            logit_difference(**given)(logits, TOKENS)
    for wrong in (logits[0], None):
        with pytest.raises(ValueError, match="logits must have shape"):
            logit_difference(1)(wrong)
