"""Lists of hooks: added or installed one after the other, what they say of themselves, and what is no list."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from support import zoo
from support.attention_law import Subject
from support.intervention_cases import (
    TOKENS,
    close,
    logits,
    mixed_of,
)
from support.untouched import state
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import (
    ablate_heads,
    dummy_distance,
    knock_out,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
)
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.usefixtures("unchecked")
MODELS = zoo.cases("llama-gqa")
NO_HOOKS = r"hooks must be a list of \(hook name or filter, function\), got "


def nested(model: Any, outer: Hooks, inner: Hooks) -> Tensor:
    with model.hooks(fwd_hooks=outer):
        return mixed_of(model, inner)


def separately(model: Any, first: Hooks, second: Hooks) -> Tensor:
    try:
        for name, function in [*first, *second]:
            model.add_hook(name, function)
        return mixed_of(model, [])
    finally:
        model.reset_hooks()


def copied(model: Any, first: Hooks, second: Hooks) -> Tensor:
    return mixed_of(model, [*first, *second])


WAYS = {"nested": nested, "separately": separately, "copied": copied}


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_separate_lists_on_different_heads_act_as_if_added(kind: str, name: str, shared_model: Any) -> None:
    """Also on heads that share their keys; some pairs, in one way in turn."""
    model = shared_model(kind, name)
    subject = Subject(model, 0)
    for n, (a, b) in [*enumerate(combinations(subject.calls(), 2))][::25]:
        first, second = (subject.hooks_of(call.on(heads)) for call, heads in ((a, [1, 6]), (b, [0, 2])))
        together, way = mixed_of(model, first + second), WAYS[list(WAYS)[n % 3]]
        close(way(model, first, second), together, 1e-6)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_hooks_are_applied_once(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = state(model)
    subject = Subject(model, 0)
    for call in subject.calls():
        hooks = subject.hooks_of(call.on([1]))
        for way in WAYS.values():
            with pytest.raises(ValueError, match="from its beginning, or see it twice: apply them once"):
                way(model, hooks, hooks)
        with pytest.raises(ValueError, match="applied once: they cannot be multiplied"):
            2 * hooks
    resampled = ablate_heads(model, [(0, 1)], mode="resample")
    with pytest.raises(ValueError, match="see it twice: apply them once"):
        mixed_of(model, [resampled[0], *resampled])
    assert state(model) == before


def test_hooks_describe_themselves(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    hooks = dummy_distance(model, 5) + limit_frequencies(model, 0.05, heads=[(0, 1)])
    assert repr(hooks) == "dummy_distance(5) on 2 layers × 8 heads + limit_frequencies(low=0.05) on L0H1"
    assert hooks.to_frame().groupby("edit").size().to_dict() == {
        "dummy_distance(5)": 16,
        "limit_frequencies(low=0.05)": 1,
    }
    mine = ("blocks.0.attn.hook_z", lambda x, hook: None)
    for both in (hooks + [mine], [mine] + hooks):  # noqa: RUF005
        assert isinstance(both, Hooks)
        assert torch.equal(logits(model, both), logits(model, hooks))
    changed = dummy_distance(model, 5)
    changed.append(mine)
    assert (changed + limit_frequencies(model, 0.05))[1] is mine  # what was done to the list is not lost
    del changed[0]
    assert repr(changed) == "1 more"
    assert (changed + limit_frequencies(model, 0.05)).to_frame()["edit"].unique().tolist() == [
        "limit_frequencies(low=0.05)"
    ]
    ablated = ablate_heads(model, [(0, 1)])
    assert torch.equal(logits(model, sum((hooks, ablated), [])), logits(model, hooks + ablated))  # noqa: RUF017


def test_what_lists_say_of_themselves(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    layers = "2 layers × 8 heads"
    one = position_interpolation(model, 2)
    by_layer = [position_interpolation(model, 2, layers=layer) for layer in (0, 1)]
    assert repr(by_layer[0] + by_layer[1]) == repr(one) == f"position_interpolation(2) on {layers}"
    mask = lambda_mask(model, 1, 4, 4)  # one call, which edits distances and scores
    assert repr(mask) == f"lambda_mask(1, 4, 4) on {layers}"
    hidden = mask + knock_out(model, queries=5, keys=[2, 3], heads=[(1, 0)])
    assert repr(hidden) == f"lambda_mask(1, 4, 4) on {layers} + knock_out(queries=5, keys=[2, 3]) on L1H0"
    assert repr(hidden.only((0, 3))) == "lambda_mask(1, 4, 4) on L0H3"
    mine = ("blocks.0.attn.hook_z", lambda x, hook: None)
    assert (dummy_distance(model, 5) + one + [mine]).name == "dummy_distance(5) + position_interpolation(2) + 1 more"
    assert repr(ablate_heads(model, 0, mode="resample")) == "ablate_heads(resample) on L0H0, L1H0"
    further = [*dummy_distance(model, 5, layers=1)]
    assert (mask + further).name == "lambda_mask(1, 4, 4) + 1 more"


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_list_of_hooks_is_refused(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    five, double = dummy_distance(model, 5), position_interpolation(model, 2)
    nested = (
        r"hooks must be a list of \(hook name or filter, function\), got a list of hooks in it, .*: add the lists, a"
    )
    for lists in ([five], [five, double], (five, double)):
        for refuse in (
            lambda hooks: double + hooks,
            lambda hooks: hooks + double,
            lambda hooks: check_hooks(model, hooks),
            lambda hooks: tp.experiments.intervention_losses(model, TOKENS, {"both": hooks}, progress=False),
            lambda hooks: tp.experiments.attention_by_distance(model, TOKENS, {"both": hooks}, progress=False),
            lambda hooks: tp.head_effects(model, TOKENS, {"both": hooks}, exact=1, progress=False),
            lambda hooks: tp.experiments.length_generalization(model, TOKENS, [0, 4, 8], hooks, progress=False),
            lambda hooks: tp.viz.show_loss_change(model, TOKENS, hooks),
            lambda hooks: tp.viz.show_interventions(model, TOKENS, hooks, layer=0),
        ):
            with pytest.raises(ValueError, match=nested):
                refuse(lists)
    function = lambda x, hook: x  # noqa: E731
    wrong = [(model, 3), (3, function), ("blocks.0.attn.hook_z",), function, five[0][1], "blocks.0.attn.hook_z", None]
    for given in (*([entry] for entry in wrong), "blocks.0.attn.hook_z", 3, None, {"a": five}):
        for refuse in (lambda hooks: five + hooks, lambda hooks: hooks + five):
            with pytest.raises(ValueError, match=NO_HOOKS):
                refuse(given)


def test_lists_of_different_times_are_not_added() -> None:
    model, refused = zoo.load("bridge", "llama-gqa"), "made for different models, or some of them before the model was"
    hooks = dummy_distance(model, 5, layers=[0], heads=[0])
    model.to(torch.float16)  # in which mask values are others; other weights alone need no other hooks
    with pytest.raises(ValueError, match=refused):
        hooks + limit_frequencies(model, 0.05, heads=[1])


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gemma2", "gptj", "deepseek_v3"))
@pytest.mark.parametrize("at", ["q", "k", "v"])
def test_own_hooks_on_vectors_act_with_interventions_or_are_noticed(name: str, at: str, shared_model: Any) -> None:
    """Installed before, so that the edits start from the patched vectors; installed later, they raise."""
    model, tokens = shared_model("bridge", name), zoo.random_tokens(64)
    spec = read_model(model).specs(0)[0]
    tap = {"q": spec.taps.q, "k": spec.taps.k}.get(at)
    place = f"blocks.0.attn.hook_{at}" if tap is None else tap.name

    def patch(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x.select(next(n for n in range(1, x.ndim) if x.shape[n] == 64), 10).mul_(-3)
        return x

    own, ours = (place, patch), dummy_distance(model, 5, layers=[0])
    with torch.no_grad():
        with model.hooks(fwd_hooks=[own]):
            expected = model.run_with_hooks(tokens, fwd_hooks=ours)
        assert (expected - model.run_with_hooks(tokens, fwd_hooks=ours)).abs().max() > 1e-3
        close(model.run_with_hooks(tokens, fwd_hooks=[own, *ours]), expected)
        if at != "v" or spec.taps.scores is None:
            with model.hooks(fwd_hooks=ours), pytest.raises(ValueError, match="or other hooks act"):
                model.run_with_hooks(tokens, fwd_hooks=[own])
