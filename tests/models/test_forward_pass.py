"""Laws of ``running``: what is set in a block acts on its outermost passes alone, and nothing of it stays."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import zoo
from support.untouched import state
from torch import Tensor

from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import hook_name

TOKENS = zoo.random_tokens()
OTHER = TOKENS.flip(1)
SOME = zoo.cases("llama-gqa", "gptj")


def zero(x: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(x)


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(tokens)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), SOME)
def test_a_pass_is_that_of_transformerlens(kind: str, name: str, shared_model: Any) -> None:
    """With hooks by name and by filter, in one pass and not in the next."""
    model = shared_model(kind, name)
    before, names = state(model), [hook_name(layer, "hook_z") for layer in range(2)]
    for hooks in ([(names[1], zero)], [(lambda name: name in names, zero)]):
        with torch.no_grad():
            expected = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        with running(model) as p:
            assert torch.equal(p.run(TOKENS, hooks), expected)
            assert torch.equal(p.run(TOKENS), logits(model))
            assert not p.run(TOKENS).requires_grad
            assert not model.training
    assert state(model) == before


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_a_pass_ends_after_a_layer_or_a_module(kind: str, name: str, shared_model: Any) -> None:
    model, seen = shared_model(kind, name), []
    hooks = [(hook_name(layer, "hook_z"), lambda x, hook: seen.append(hook.name)) for layer in range(2)]
    with running(model) as p:
        for stop, n in ((1, 1), (2, 2), (model.blocks[0].attn, 1), (None, 2)):
            seen.clear()
            assert (p.run(TOKENS, hooks, stop=stop) is None) == (stop is not None)
            assert len(seen) == n


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), SOME)
def test_kept_outputs_stand_in_for_their_modules(kind: str, name: str, shared_model: Any) -> None:
    """Of another text: then the logits are that text's, since blocks see nothing else."""
    model = shared_model(kind, name)
    before, blocks, ran = state(model), list(model.blocks), []
    expected, other = logits(model), logits(model, OTHER)
    hooks = [(hook_name(layer, "hook_z"), lambda x, hook: ran.append(hook.name)) for layer in range(2)]
    with running(model) as p:
        with p.keeping(blocks[-1:]) as kept:
            p.run(OTHER)
        with p.skipping(blocks, lambda: kept[blocks[-1]]):
            assert torch.equal(p.run(TOKENS, hooks), other)
            assert not ran
        assert torch.equal(p.run(TOKENS), expected)
    assert state(model) == before


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_an_inner_pass_is_whole_and_plain(kind: str, name: str, shared_model: Any) -> None:
    """However it is made: the outer block's hooks, skipped modules and stops are the outer pass's."""
    model, found = shared_model(kind, name), []
    plain, name_of_z = logits(model, OTHER), hook_name(0, "hook_z")
    ways = [
        lambda: model(OTHER),
        lambda: model.run_with_hooks(OTHER, fwd_hooks=[]),
        lambda: model.run_with_cache(OTHER)[0],
        lambda: nested(model),
    ]

    def nested(model: Any) -> Tensor:
        with running(model) as inner, running(model, bare=True) as bare:
            assert torch.equal(inner.run(OTHER), bare.run(OTHER))
            return inner.run(OTHER)

    def look(x: Tensor, hook: Any) -> Tensor:
        found.extend(way() for way in ways)
        return torch.zeros_like(x)

    blocks = list(model.blocks)
    with running(model) as p, p.keeping(blocks[:1]) as kept, p.skipping(blocks[1:], lambda: kept[blocks[0]]):
        p.run(TOKENS, [(name_of_z, look)], stop=2)
    assert len(found) == 4
    assert all(torch.equal(each, plain) for each in found)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), SOME)
def test_a_block_leaves_nothing_whatever_ends_it(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    model.train()
    before, blocks = state(model), list(model.blocks)

    def fail(x: Tensor, hook: Any) -> None:
        raise ValueError("in a hook")

    for bare in (False, True):
        with (
            pytest.raises(ValueError, match="in a hook"),
            running(model, bare=bare) as p,
            p.skipping(blocks[1:], lambda: None),
        ):
            p.run(TOKENS, [(hook_name(0, "hook_z"), fail)])
        assert state(model) == before
    model.eval()


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_the_signature_of_a_model_stays_in_a_block(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    expected = inspect.signature(model.forward)
    with running(model), running(model):
        assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize(("kind", "name"), SOME)
def test_a_bare_model_has_permanent_hooks_alone(kind: str, name: str) -> None:
    """Hooks of TransformerLens and of torch, at a hook point, come back."""
    model, fired = zoo.load(kind, name), []
    point = model.hook_dict[hook_name(0, "hook_z")]
    point.add_hook(lambda x, hook: fired.append("mine"))
    point.register_forward_hook(lambda module, inputs, x: fired.append("torch's"))
    point.add_hook(lambda x, hook: fired.append("permanent"), is_permanent=True)
    for bare, expected in ((True, ["permanent"]), (False, ["mine", "torch's", "permanent"])):
        fired.clear()
        with running(model, bare=bare) as p:
            p.run(TOKENS, [(hook_name(0, "hook_z"), lambda x, hook: fired.append("of the pass"))])
        assert fired == [*expected, "of the pass"]
    fired.clear()
    logits(model)
    assert fired == ["mine", "torch's", "permanent"]
