"""Laws of ``read_model``: one reading serves many calls, and one that no longer fits its model is noticed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import slow

from tl_posdisent import (
    additivity,
    capture,
    controlled_distance,
    dummy_distance,
    head_ablation,
    read_attention,
    read_model,
    remap_distance,
    swap_positions,
)

pytestmark = pytest.mark.tl4


def count_passes(model: Any, call: Callable[[], Any]) -> int:
    """Forward passes of the model on texts as short as those on which it is read."""
    passes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[-1]))
    try:
        call()
    finally:
        handle.remove()
    return sum(length < 16 for length in passes)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_reading_is_kept_with_its_model(kind: str, name: str) -> None:
    """And goes with it."""
    model = zoo.load(kind, name)
    assert count_passes(model, lambda: read_model(model)) == 2
    assert count_passes(model, lambda: read_model(model)) == 0
    reading = read_model(model)
    assert read_model(model).specs() == reading.specs()
    assert all(a is b for a, b in zip(read_model(model).specs(), reading.specs(), strict=True))
    assert read_model(reading) is reading
    gone = weakref.ref(model)
    del model, reading
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2", "gptj", "gpt2", "bloom"))
def test_the_table_of_a_reading_is_what_the_configuration_says(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table, arguments = read_model(model).to_frame(), zoo.ARCHITECTURES[name].arguments
    assert table["layer"].tolist() == list(range(model.cfg.n_layers))
    assert (table["n_heads"] == 8).all()
    assert (table["n_kv_heads"] == arguments.get("num_key_value_heads", 8)).all()
    windows = [spec.window for spec in read_model(model).specs()]
    assert [None if pd.isna(x) else x for x in table["window"]] == windows
    assert table["attention"].tolist() == ["global" if x is None else "local" for x in windows]
    assert set(table["attention"]) == ({"local", "global"} if name == "gemma2" else {"global"})
    if name in ("gpt2", "bloom"):
        assert (table["rotated"] == 0).all()
        assert table["base"].isna().all()
    else:
        rotated = arguments.get("rotary_dim", arguments.get("head_dim", table["d_head"].iloc[0]))
        assert (table["rotated"] == rotated).all()
        base = 10_000.0 if name == "gptj" else 500.0  # what the zoo sets
        assert table["base"].to_numpy() == pytest.approx(base, rel=1e-4)
    assert read_model(model)._repr_html_().startswith("<p>ModelReading(")


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_layers_as_in_python(kind: str, name: str, shared_model: Any) -> None:
    reading = read_model(shared_model(kind, name))
    assert [spec.layer for spec in reading.specs([1, 0])] == [1, 0]
    assert reading.specs([1, 0]) == [*reading.specs(-1), read_attention(reading, 0)]
    assert reading.heads(0, -1) == {0: [reading.specs()[0].n_heads - 1]}
    assert reading.heads(heads=[(1, 2), (0, 1)]) == {0: [1], 1: [2]}
    assert [spec.layer for spec in reading.rotary(-1, "a tool")] == [1]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_copied_reading_is_not_that_of_its_model(kind: str, name: str, shared_model: Any) -> None:
    """The model is copied with it, and is read again."""
    reading = read_model(shared_model(kind, name))
    copied = copy.deepcopy(reading)
    assert copied.model is not reading.model
    with pytest.raises(ValueError, match=r"has changed in (.*, )?modules(, .*)?: read it again"):
        dummy_distance(copied, 5)
    assert str(read_model(copied, fresh=True).specs()) == str(reading.specs())


def _another_module(model: Any) -> None:
    model.blocks[1].attn.hook_q = copy.deepcopy(model.blocks[1].attn.hook_q)


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: setattr(m.cfg, "ungroup_grouped_query_attention", True), "grouping of keys"),
    (lambda m: m.to(torch.bfloat16), "dtypes"),
    (lambda m: m.hook_dict["blocks.0.attn.hook_q"].add_hook(lambda x, hook: x, is_permanent=True), "permanent hooks"),
    (_another_module, "modules"),
    (lambda m: setattr(m.cfg, "attn_scores_soft_cap", 7.0), "settings"),
]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_changed_model_is_noticed(kind: str, name: str, change: Any, what: str) -> None:
    """A reading that was kept is made anew, one that is passed on is refused."""
    model = zoo.load(kind, name)
    reading = read_model(model)
    change(model)
    with pytest.raises(ValueError, match=rf"has changed in (.*, )?{what}(, .*)?: read it again"):
        read_model(reading)
    assert count_passes(model, lambda: read_model(model)) > 0
    assert read_model(model).specs()[0] is not reading.specs()[0]


def _shared_weights(model: Any, other: Any) -> None:
    """Put the weights of another model into this one, past torch's count of changes."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)


def _other_weights(kind: str, name: str) -> Any:
    model = zoo.load(kind, name)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def _without_scores(kind: str, name: str) -> Any:
    """A model whose matrices are 0, as some are before they are trained: every explanation fits its scores."""
    model = zoo.load(kind, name)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.zero_()
    return model


@pytest.mark.parametrize("before", [zoo.load, _without_scores])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma2", "olmo2"))
def test_other_weights_need_no_other_reading(kind: str, name: str, before: Any) -> None:
    """A reading holds what the architecture does; what the weights give is that of a fresh model with them."""
    model, fresh, tokens = before(kind, name), _other_weights(kind, name), zoo.random_tokens()
    reading = read_model(model)
    _shared_weights(model, fresh)
    reading = read_model(reading)
    for found, expected in zip(capture(reading, tokens), capture(fresh, tokens), strict=True):
        assert torch.equal(found.q_rot, expected.q_rot)
        assert torch.equal(found.scores, expected.scores)
    tools: list[Callable[[Any], Any]] = [
        lambda m: dummy_distance(m, 5),
        lambda m: swap_positions(m, torch.arange(12).flip(0), heads=[1]),
        lambda m: remap_distance(m, lambda d: d.sqrt(), heads=[0, 6]),
    ]
    with torch.no_grad():
        for tool in tools:
            found, expected = (m.run_with_hooks(tokens, fwd_hooks=tool(m)) for m in (model, fresh))
            assert torch.equal(found, expected)
    found, expected = (additivity(m, tokens, progress=False) for m in (model, fresh))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_hooks_of_a_model_without_scores_go_together(kind: str, name: str) -> None:
    """Though its layers are read again each time."""
    model = _without_scores(kind, name)
    assert [spec.limits.certain for spec in read_model(model).specs()] == [False, False]
    assert count_passes(model, lambda: read_model(model)) > 0
    both = dummy_distance(model, 5, heads=[0]) + swap_positions(model, lambda p: 2 * p, heads=[1])
    assert len(both.to_frame()) == 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_fresh_reading_on_request(kind: str, name: str) -> None:
    """For what cannot be noticed: here the function of a module."""
    model = zoo.load(kind, name)
    reading = read_model(model)
    assert count_passes(model, lambda: read_model(model)) == 0
    assert count_passes(model, lambda: read_model(model, fresh=True)) > 0
    assert read_model(model).specs()[0] is not reading.specs()[0]
    assert str(read_model(model).specs()) == str(reading.specs())
    assert read_model(reading, fresh=True) is not reading
    with pytest.raises(ValueError, match="fresh must be True or False, got 1"):
        read_model(model, fresh=1)


def test_a_copy_of_a_model_is_another_model(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    spec = read_model(model).specs()[0]
    assert read_model(copy.deepcopy(model)).specs()[0] is not spec


def test_another_attention_implementation_is_noticed() -> None:
    model = zoo.bridge("llama-gqa")
    reading = read_model(model)
    model.original_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="has changed in attention implementation: read it again"):
        read_model(reading)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "capture": lambda model, tokens: capture(model, tokens),
    "additivity": lambda model, tokens: additivity(model, tokens, progress=False),
    "controlled_distance": lambda model, tokens: controlled_distance(model, tokens, progress=False),
    "head_ablation": lambda model, tokens: head_ablation(model, tokens, progress=False),
    "swap_positions": lambda model, tokens: swap_positions(model, torch.arange(tokens.shape[1])),
    "remap_distance": lambda model, tokens: remap_distance(model, lambda d: d),
}


@pytest.mark.parametrize("name", [*list(READERS)[:1], *slow(list(READERS)[1:])])
def test_a_public_call_reads_its_model_once(name: str) -> None:
    """The first one; later ones not at all."""
    model, tokens = zoo.bridge("llama-gqa"), zoo.random_tokens(16)
    first = count_passes(model, lambda: READERS[name](model, tokens))
    given = count_passes(model, lambda: READERS[name](model, tokens))
    assert first >= given + 2
    assert count_passes(model, lambda: READERS[name](read_model(model), tokens)) == given
