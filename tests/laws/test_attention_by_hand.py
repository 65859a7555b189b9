"""Every tool on every mechanism of attention is attention summed by hand in float64: alone, in pairs and in triples.

The oracle is `support/edited_scores.py`. In one pass every head of a layer has calls of its own, so that heads which
share keys are edited apart.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import zoo, zoo_configs
from support.attention_law import LENGTH, TOKENS, Subject, compatible, conflict, fields, of_all_fields
from support.edited_scores import Call
from support.intervention_cases import hooks_of
from support.lanes import slow
from support.pages import ROOT
from support.tolerance import rounding

from tl_posdisent import dummy_distance, knock_out, read_model
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.hook_list import Hooks

sys.path.append(str(ROOT / "docs"))
import support_table

WRITTEN = support_table.from_markdown(support_table.written())
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

FAST = [  # grouped heads; windows and a soft cap; interleaved rotation of a part, and hidden scores
    *(("bridge", "llama-gqa", 0), ("hooked", "gemma2", 0), ("bridge", "gptj", 1)),
]
SLOW = [  # sinks, latents, partial rotation, q/k norms, no positions, attention factor, norms after rotation, a bias
    *(("bridge", "gpt_oss", 1), ("bridge", "deepseek_v3", 1), ("bridge", "neox", 0), ("bridge", "olmo2", 0)),
    *(("bridge", "smollm3", 1), ("bridge", "llama-yarn", 0), ("bridge", "nanochat", 1), ("bridge", "gemma4", 5)),
    *(("bridge", "gemma4-shared", 5), ("hooked", "gptj", 0), ("bridge", "afmoe", 0), ("bridge", "bloom", 1)),
    *(("bridge", "gemma2", 1), ("hooked", "llama-gqa", 1)),
]
MECHANISMS = pytest.mark.parametrize(("kind", "name", "layer"), [*FAST, *slow(SLOW)])


@pytest.fixture
def subject(kind: str, name: str, layer: int, shared_model: Callable[[str, str], Any]) -> Subject:
    return Subject(shared_model(kind, name), layer)


@MECHANISMS
@pytest.mark.filterwarnings("ignore:a static head.s direction of", "ignore:distance")
def test_calls_alone(subject: Subject) -> None:
    """On one head each, and some on all heads; those that share their keys with others too."""
    calls = [*subject.calls(), *subject.variants()]
    subject.check([call] for call in calls)
    for call in calls[::5]:
        subject.check([[call]] * subject.spec.n_heads)


@pytest.mark.parametrize(("kind", "name", "layer"), [FAST[0], *slow([*FAST[1:], *SLOW])])
def test_pairs(subject: Subject) -> None:
    subject.check(compatible(subject.calls(), 2))


@MECHANISMS
def test_triples(subject: Subject) -> None:
    """A triple of calls for each triple of fields."""
    subject.check(of_all_fields(compatible(subject.calls(), 3)))


@MECHANISMS
def test_pairs_that_conflict(subject: Subject) -> None:
    """They are refused when they are added, by the names of the layer, the head and both calls."""
    for a, b in itertools.combinations(subject.calls(), 2):
        if conflict(a, b):
            hooks = [subject.hooks_of(call.on([1])) for call in (a, b)]
            if not all(hooks):  # a band that removes nothing
                continue
            with pytest.raises(ValueError, match=f"layer {subject.layer}, head 1") as refused:
                hooks[0] + hooks[1]
            assert all(each.name in str(refused.value) for each in hooks), (a, b)


def rows() -> list[Any]:
    """All rows of the table; of TransformerLens 4 those that add a mechanism or differ from version 3."""
    return [
        pytest.param((name, code), id=f"{name}-{code}", marks=[pytest.mark.slow] * (code != "B4"))
        for name, code in support_table.cases()
        if code != "B4" or name in zoo_configs.MECHANISMS or WRITTEN[name, code] != WRITTEN.get((name, "B3"))
    ]


@pytest.mark.parametrize("row", rows())
def test_all_architectures(row: tuple[str, str], shared_model: Callable[[str, str], Any]) -> None:
    """What the page says of an architecture is what it does: a tool obeys the law, or it is refused for this reason."""
    name, code = row
    assert support_table.try_tools(shared_model(support_table.CLASSES[code], name)) == WRITTEN[row]


def test_the_table_has_these_rows_and_no_others() -> None:
    installed = {case for case in WRITTEN if case[1] in support_table.codes()}
    assert installed == set(support_table.cases())
    assert {code for _, code in WRITTEN} == set(support_table.CLASSES)
    assert support_table.to_markdown(WRITTEN) == support_table.written()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-gqa", *slow(["gptj", "gpt_oss", "deepseek_v3", "gemma2"])])
def test_in_16_bits(name: str, dtype: torch.dtype) -> None:
    subject = Subject(zoo.as_bridge(zoo.hf_model(name).to(dtype)), 0)
    calls = subject.calls()
    subject.check([call] for call in calls)
    subject.check(of_all_fields(compatible(calls, 2)))


SLOT = torch.arange(LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {
    "two-way prefix": CAUSAL | ((SLOT < 8) & (SLOT[:, None] < 8)),
    "cells at random": CAUSAL
    & ((torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3) | (SLOT < 2))
    | torch.eye(LENGTH, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["llama-gqa", *slow(["gpt_oss", "deepseek_v3"])])
def test_other_masks(name: str, mask: str, shared_model: Callable[[str, str], Any]) -> None:
    """What the scores of a pass hide stays hidden."""
    subject = Subject(shared_model("bridge", name), 0, seen=MASKS[mask])
    calls = [call for call in subject.calls() if not fields(call) & {"scores"}]
    subject.check([call] for call in calls)
    subject.check(of_all_fields(compatible(calls, 2)))


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, -50), (torch.float32, -1e4), (torch.bfloat16, -200), (torch.float16, -500)]
)
@pytest.mark.parametrize("name", ["llama-gqa", *slow(["gemma2", "gpt_oss"])])
def test_masks_of_any_size(name: str, dtype: torch.dtype, value: float) -> None:
    """New scores leave keys hidden whose mask is no infinity, also where scores are as large as that mask."""
    model = zoo.as_bridge(zoo.hf_model(name).to(dtype))
    with torch.no_grad():  # products up to 60
        model.original_model.model.layers[0].self_attn.q_proj.weight.mul_(4)
    reading, z = read_model(model), "blocks.0.attn.hook_z"
    (spec,) = reading.specs(0)
    mine = SLOT[:, None] - SLOT < (spec.window or LENGTH)

    def gathered(hooks: Hooks, value: float) -> torch.Tensor:
        mask = torch.zeros(len(TOKENS), 1, LENGTH, LENGTH, dtype=dtype)
        mask = mask.masked_fill(SLOT < 3, value).masked_fill(~(CAUSAL & mine), torch.finfo(dtype).min)
        with torch.no_grad(), applied(model, hooks):
            return model.run_with_cache(TOKENS, attention_mask=mask, names_filter=z)[1][z][:, 3:]

    calls = [call for call in Subject(reading, 0).calls() if fields(call) == {"scores"}]
    calls = [call for call in calls if call.tool != "component_patching"]
    assert len(calls) >= 4
    hidden = knock_out(reading, queries=[8, 9], keys=[5], layers=[0])
    for call in calls:
        made = hooks_of(reading, call, [0]) + hidden
        expected = gathered(made, torch.finfo(dtype).min)
        torch.testing.assert_close(gathered(made, value), expected, rtol=0, atol=rounding(expected, 8))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma2"))
def test_under_other_hooks(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    """Interventions on the layer before, and a hook of the user's own on the stream: the layer starts from them."""
    reading = read_model(shared_model(kind, name))
    before = dummy_distance(reading, 3, layers=[0]) + knock_out(reading, keys=[1], queries=[4, 5], layers=[0])
    own = ("blocks.1.hook_resid_pre", lambda x, hook: 1.5 * x)
    subject = Subject(reading, 1, under=before + [own])  # noqa: RUF005
    assert not torch.equal(subject.plain, Subject(reading, 1).plain)
    calls = subject.calls()
    subject.check([call] for call in calls)
    subject.check(of_all_fields(compatible(calls, 2)))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("keys", ["group", "head"])
def test_keys_that_heads_share(kind: str, name: str, keys: str, shared_model: Callable[[str, str], Any]) -> None:
    """Patched keys reach the heads that share them, or some heads alone."""
    subject = Subject(shared_model(kind, name), 0)
    (patch,) = (call for call in subject.calls() if fields(call) == {"k_rot"})
    patch = Call("patch_vectors", q_rot=None, k_rot=patch["k_rot"], keys=keys, heads=[1, 6])
    swapped = Call("swap_positions", positions=TOKENS, heads=[1, 2])
    for calls in ([patch], [patch, swapped]):
        got = subject.results(sum((subject.hooks_of(call) for call in calls[1:]), subject.hooks_of(calls[0])))
        assert (got - subject.expected(calls)).abs().max() < subject.tolerance


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_gradients_are_finite_differences(kind: str, name: str) -> None:
    """Of all edits but those in whose gradients a fit is a constant."""
    model = zoo.load(kind, name)
    subject = Subject(model, 0)
    fitted = {"substitute_additive", "substitute_attention", "drop_component", "component_patching"}
    parameter = next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB)  # the embedding
    for call in [call for call in subject.calls() if call.tool not in fitted][::2]:

        def value(call: Call = call) -> torch.Tensor:
            with applied(model, subject.hooks_of(call.on([1, 6]))):
                return model(TOKENS).double().pow(2).mean()

        (gradient,) = torch.autograd.grad(value(), parameter)
        step = 1e-3 * gradient / gradient.norm()
        with torch.no_grad():
            parameter.add_(step)
            up = value()
            parameter.sub_(2 * step)
            down = value()
            parameter.add_(step)
        torch.testing.assert_close((up - down) / (2 * step.norm()), gradient.norm().double(), rtol=2e-2, atol=0)


def test_a_layer_alone(shared_model: Callable[[str, str], Any]) -> None:
    """Hooks of one layer leave those before it as they are, to the last bit."""
    model = shared_model("bridge", "llama-gqa")
    first, second = Subject(model, 0), Subject(model, 1)
    for call in second.calls():
        assert torch.equal(first.results(second.hooks_of(call.on([3, 6]))), first.plain), call


@pytest.mark.parametrize("other", ["another call", "no hooks"])
def test_another_edit_is_found(other: str, shared_model: Callable[[str, str], Any]) -> None:
    subject = Subject(shared_model("bridge", "llama-gqa"), 0)
    for call, wrong in itertools.pairwise(subject.calls()):
        made = subject.hooks_of(wrong.on([0])) if other == "another call" else Hooks([])
        subject.hooks_of = lambda call, made=made: made  # type: ignore[method-assign, misc]
        with pytest.raises(AssertionError):
            subject.check([[call]])
        del subject.hooks_of
