"""The two checks of every pass: what comes in is what was read, and what was edited is what the model uses.

Each case is a wrong pass that only they can notice. It is refused, or the result is that of the edit on what came in.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.attention_law import Subject, fields
from support.lanes import slow
from torch import Tensor

from tl_posdisent import dummy_distance, read_model, swap_positions
from tl_posdisent.hooks import ablate_heads, applied, drop_component, knock_out, substitute_attention
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models import ModelReading
from tl_posdisent.models.running.forward_pass import running

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

TOKENS = zoo.random_tokens()
REVERSED = torch.arange(TOKENS.shape[1]).flip(0)
IN, OUT = "are not what its queries, keys and rotation give", "is not the softmax of its edited scores"
OTHERS = [  # hidden scores; an additive bias, without products that could be compared; sinks
    *(("bridge", "gptj", 1), ("bridge", "bloom", 1), ("bridge", "gpt_oss", 1), ("hooked", "llama-gqa", 1)),
]
KINDS = pytest.mark.parametrize("kind", zoo.KINDS)


def run(model: Any, hooks: Any, **more: Any) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(TOKENS, **more)


# --- hooks of one's own on queries, keys and scores


def double(x: Tensor, hook: Any = None) -> Tensor:
    return 2 * x


def halved(x: Tensor, hook: Any = None) -> Tensor:
    return torch.where(x > -1e4, x / 2, x)


@KINDS
@pytest.mark.parametrize("name", ["hook_rot_q", "hook_rot_k", "hook_attn_scores"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_foreign_edit(kind: str, name: str, behind: bool, shared_model: Callable[[str, str], Any]) -> None:
    """After the rotation and on scores, before our hooks or behind them."""
    model = shared_model(kind, "llama-gqa")
    own, ours = [(f"blocks.1.attn.{name}", halved)], dummy_distance(model, 2, layers=[1])
    first, second = (list(ours), own) if behind else (own, list(ours))
    with (
        pytest.raises(ValueError, match=f"layer 1 .*({IN}|{OUT})"),
        model.hooks(fwd_hooks=first),
        model.hooks(fwd_hooks=second),
    ):
        model(TOKENS)


@KINDS
@pytest.mark.parametrize("which", ["q", "k"])
def test_a_foreign_edit_before_the_rotation(kind: str, which: str, shared_model: Callable[[str, str], Any]) -> None:
    """Behind our hooks it is refused. Before them it is what the model computes, and is edited like it."""
    model = shared_model(kind, "llama-gqa")
    name = f"blocks.1.attn.hook_{which}"
    ours = swap_positions(model, torch.arange(TOKENS.shape[1]) + 3, layers=[1])
    with (
        pytest.raises(ValueError, match=IN),
        model.hooks(fwd_hooks=list(ours)),
        model.hooks(fwd_hooks=[(name, double)]),
    ):
        model(TOKENS)
    expected = run(model, [(name, double)])
    with model.hooks(fwd_hooks=[(name, double)]), model.hooks(fwd_hooks=list(ours)):
        assert torch.allclose(model(TOKENS), expected, atol=1e-4 * float(expected.abs().max()))


@KINDS
def test_a_foreign_edit_of_other_heads_or_tensors(kind: str, shared_model: Callable[[str, str], Any]) -> None:
    """It is no matter of ours, before and behind."""
    model = shared_model(kind, "llama-gqa")
    ours = dummy_distance(model, 2, layers=[1], heads=[0, 1])

    def other_head(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[:, 5] = halved(x[:, 5])
        return x

    own = [("blocks.1.attn.hook_attn_scores", other_head), ("blocks.1.hook_resid_pre", double)]
    assert torch.equal(run(model, list(ours) + own), run(model, own + list(ours)))


# --- lists of this package


def tools(model: Any) -> dict[str, Any]:
    where: dict[str, Any] = {"layers": [1]}
    return {
        "rotation": dummy_distance(model, 2, **where),
        "positions": swap_positions(model, REVERSED, **where),
        "hide": knock_out(model, queries=[5, 6], keys=[0, 3], **where),
        "scores": drop_component(model, "key", **where),
        "attention": substitute_attention(model, "distance", **where),
    }


def nested(model: Any, a: Hooks, b: Hooks) -> Tensor:
    with model.hooks(fwd_hooks=a), applied(model, b):
        return model(TOKENS)


def one_by_one(model: Any, a: Hooks, b: Hooks) -> Tensor:
    try:
        for name, function in [*a, *b]:
            model.add_hook(name, function)
        return model(TOKENS)
    finally:
        model.reset_hooks()


def in_a_pass(model: Any, a: Hooks, b: Hooks) -> Tensor:
    with model.hooks(fwd_hooks=a), running(model) as p:
        return p.run(TOKENS, b)


WAYS = {
    "plain list": lambda model, a, b: run(model, list(a) + list(b)),
    "nested": nested,
    "one by one": one_by_one,
    "in a pass": in_a_pass,
}


@pytest.mark.parametrize(("kind", "name", "layer"), [("bridge", "llama-gqa", 0), *slow(OTHERS)])
def test_lists_that_are_not_added(kind: str, name: str, layer: int, shared_model: Callable[[str, str], Any]) -> None:
    """On one head, refused before it is changed twice, or as if added: a call of each field, ways, orders in turn."""
    subject = Subject(shared_model(kind, name), layer)
    model, refused = subject.reading.model, 0
    made = {tuple(sorted(fields(call))): subject.hooks_of(call.on([1])) for call in subject.calls()}
    made = {its: hooks for its, hooks in made.items() if hooks}
    pairs = [*combinations(made, 2), *((its, its) for its in made)]
    for n, (first, second) in enumerate(pairs):
        its, way = (first, second)[:: (-1) ** n], list(WAYS.values())[n // 2 % len(WAYS)]
        a, b = made[its[0]], made[its[1]].only((layer, 1))
        if (its[0] == ("z",)) != (its[1] == ("z",)) and subject.spec.taps.scores is not None:
            assert torch.equal(way(model, a, b), run(model, a + b)), (a, b)
            continue
        with pytest.raises(ValueError, match=rf"layer {layer}, head 1 .*two lists .*: add the lists, a \+ b"):
            way(model, a, b)
        refused += 1
    assert refused > len(pairs) / 2


@KINDS
@pytest.mark.parametrize("way", WAYS)
def test_lists_of_different_heads(kind: str, way: str, shared_model: Callable[[str, str], Any]) -> None:
    """They act as if added, also after a refusal."""
    model = shared_model(kind, "llama-gqa")
    a, b = dummy_distance(model, 2, layers=[1], heads=[0]), drop_component(model, "key", layers=[1], heads=[0, 3])
    with pytest.raises(ValueError, match="layer 1, head 0"):
        WAYS[way](model, a, b)
    assert torch.equal(WAYS[way](model, a, b.only((1, 3))), run(model, a + b.only((1, 3))))


@KINDS
def test_a_list_that_is_installed_twice(kind: str, shared_model: Callable[[str, str], Any]) -> None:
    model = shared_model(kind, "llama-gqa")
    for hooks in (*tools(model).values(), ablate_heads(model, [(1, 0)], mode="resample")):
        with pytest.raises(ValueError, match="apply them once"), model.hooks(fwd_hooks=hooks):
            run(model, hooks)


# --- texts


def test_positions_with_gaps(shared_model: Callable[[str, str], Any]) -> None:
    model, gaps = shared_model("bridge", "llama-gqa"), 2 * torch.arange(TOKENS.shape[1])
    mask = torch.ones_like(TOKENS)
    for hooks in (swap_positions(model, REVERSED), dummy_distance(model, 3), drop_component(model, "key")):
        with pytest.raises(ValueError, match=IN):
            run(model, hooks, position_ids=gaps[None], attention_mask=mask)
    shifted = run(model, dummy_distance(model, 3), position_ids=gaps[None] // 2 + 7, attention_mask=mask)
    assert torch.allclose(shifted, run(model, dummy_distance(model, 3)), atol=1e-3 * float(shifted.abs().max()))


def test_packed_texts(shared_model: Callable[[str, str], Any]) -> None:
    """Each text has positions of its own, and does not see the other."""
    model, half = shared_model("bridge", "llama-gqa"), TOKENS.shape[1] // 2
    positions = torch.arange(half).repeat(2)[None].expand_as(TOKENS)
    of_text = torch.arange(2).repeat_interleave(half)
    seen = (of_text[:, None] == of_text) & torch.ones(2 * half, 2 * half, dtype=torch.bool).tril()
    mask = torch.zeros(len(TOKENS), 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    packed = {"position_ids": positions, "attention_mask": mask}
    alone = torch.cat([model(part) for part in TOKENS.split(half, 1)], 1)
    assert torch.allclose(model(TOKENS, **packed), alone, atol=1e-3 * float(alone.abs().max()))
    with pytest.raises(ValueError, match="packed"):
        run(model, drop_component(model, "key"), **packed)
    with pytest.raises(ValueError, match="token 6 sees none before it"):
        run(model, swap_positions(model, torch.sqrt), **packed)


def test_a_two_way_prefix(shared_model: Callable[[str, str], Any]) -> None:
    """Fits of scores are refused for what it is."""
    model, slot = shared_model("bridge", "llama-gqa"), torch.arange(TOKENS.shape[1])
    seen = (slot <= slot[:, None]) | (slot < 5) & (slot[:, None] < 5)
    mask = torch.zeros(len(TOKENS), 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for hooks in (drop_component(model, "key"), substitute_attention(model, "uniform")):
        with pytest.raises(ValueError, match="token 0 sees token 1, as in the two-way prefix of a prefix LM"):
            run(model, hooks, attention_mask=mask)
    spec, scores = read_model(model).specs(0)[0], torch.zeros(1, 8, *seen.shape)
    with pytest.raises(ValueError, match="two-way prefix of a prefix LM"):
        spec.check_mask(scores.masked_fill(~seen, -torch.inf), slot)


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_keys_of_earlier_passes(cache: str, shared_model: Callable[[str, str], Any]) -> None:
    model = shared_model("bridge", "llama-gqa")
    config = model.original_model.config
    make = getattr(transformers, cache)
    past = make(config=config) if cache == "DynamicCache" else make(config=config, max_cache_len=40)
    hooks = dummy_distance(model, 3)
    with torch.no_grad():
        if cache == "DynamicCache":
            model(TOKENS[:, :6], past_key_values=past)
        of = "has 6 queries for 12 keys" if cache == "DynamicCache" else "6 queries for 40 keys: .* static one"
        with pytest.raises(ValueError, match=f"{of}.*") as refused, applied(model, hooks):
            model(TOKENS[:, 6:], past_key_values=past)
    assert "without a KV cache" in str(refused.value)


def test_passes_of_several_threads(shared_model: Callable[[str, str], Any]) -> None:
    """Those that meet are refused, all others are right, and afterwards so is every pass."""
    model = shared_model("bridge", "llama-gqa")
    hooks = dummy_distance(model, 3, layers=[0]) + knock_out(model, queries=[8], keys=[0], layers=[0])
    plain, alone = run(model, []), run(model, hooks)
    several = "hooks of .* got passes of several threads at once in layer 0"
    met: list[Any] = []

    def wait(x: Tensor, hook: Any) -> None:  # in the layer, behind its first hook
        if not met:
            met.append("waits")
            with ThreadPoolExecutor(1) as other:
                met[0] = other.submit(run, model, []).exception()

    with pytest.raises(ValueError, match=several), model.hooks(fwd_hooks=hooks):
        run(model, [("blocks.0.attn.hook_v", wait)])
    assert "several threads" in str(met[0])
    with model.hooks(fwd_hooks=hooks), ThreadPoolExecutor(4) as pool:
        for got in [pool.submit(model, TOKENS) for _ in range(40)]:
            if (error := got.exception()) is None:
                assert torch.allclose(got.result(), alone, atol=1e-4 * float(alone.abs().max()))
            else:
                assert "several threads" in str(error), error
        assert torch.equal(pool.submit(run, model, []).result(), alone)
    assert torch.equal(run(model, hooks), alone)
    assert torch.equal(run(model, []), plain)


# --- readings


def with_specs(model: Any, change: Callable[[Any], Any]) -> ModelReading:
    reading = read_model(model)
    return ModelReading(reading.model, reading.n_layers, tuple(change(spec) for spec in reading.attention))


WRONG = {
    "frequencies": lambda s: replace(s, rotary=replace(s.rotary, frequencies=s.rotary.frequencies * 1.1)),
    "pairing": lambda s: replace(s, rotary=replace(s.rotary, pairing="adjacent")),
    "factor": lambda s: replace(s, rotary=replace(s.rotary, attention_factor=1.3)),
    "no rotation": lambda s: replace(s, rotary=None),
    "scale": lambda s: replace(s, scale=1.5 * s.scale),
    "cap": lambda s: replace(s, soft_cap=5.0),
    "heads": lambda s: replace(s, taps=replace(s.taps, q=s.taps.k, k=s.taps.k), n_kv_heads=s.n_heads),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_reading(wrong: str, dtype: torch.dtype) -> None:
    model = zoo.as_bridge(zoo.hf_model("llama").to(dtype))
    right, reading = read_model(model), with_specs(model, WRONG[wrong])
    run(model, drop_component(right, "key"))
    with pytest.raises(ValueError, match="read the model and make the hooks again"):
        run(model, drop_component(reading, "key"))


@KINDS
def test_a_rotation_that_was_changed_since(kind: str) -> None:
    """The model is read again, and is then as it is."""
    model = zoo.load(kind, "llama-gqa")
    hooks = dummy_distance(model, 3)
    run(model, hooks)
    if kind == "bridge":
        rotation = model.original_model.model.rotary_emb
        rotation.inv_freq.mul_(0.5)
    else:
        for block in model.blocks:
            angles = torch.atan2(block.attn.rotary_sin, block.attn.rotary_cos)[1] * 0.5
            angles = torch.arange(len(block.attn.rotary_sin))[:, None] * angles
            block.attn.rotary_sin.copy_(angles.sin())
            block.attn.rotary_cos.copy_(angles.cos())
    with pytest.raises(ValueError, match="read the model and make the hooks again"):
        run(model, hooks)
    plain = model(TOKENS)
    half = swap_positions(model, torch.arange(TOKENS.shape[1]) + 5)
    assert torch.allclose(run(model, half), plain, atol=1e-3 * float(plain.abs().max()))


# --- models that do not use edited scores


def test_a_model_that_ignores_edited_scores(shared_model: Callable[[str, str], Any]) -> None:
    """A later hook puts the model's own back, as a model does that computes its pattern apart."""
    model = shared_model("bridge", "llama-gqa")
    own: dict[str, Tensor] = {}
    before = [("blocks.1.attn.hook_attn_scores", lambda x, hook: own.update(x=x.clone()))]
    behind = [("blocks.1.attn.hook_attn_scores", lambda x, hook: own["x"])]
    for hooks in tools(model).values():
        with pytest.raises(ValueError, match=OUT):
            run(model, before + list(hooks) + behind)


def test_a_model_that_shows_its_pattern_as_scores(shared_model: Callable[[str, str], Any]) -> None:
    model = shared_model("bridge", "llama-gqa")
    reading = with_specs(model, lambda s: replace(s, taps=replace(s.taps, scores=s.taps.pattern)))
    for hooks in tools(reading).values():
        with pytest.raises(ValueError, match=f"{IN}|{OUT}"):
            run(model, hooks)


# --- hooks of another model


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gpt_oss", "bloom"))
def test_hooks_of_another_model(kind: str, name: str, shared_model: Callable[[str, str], Any]) -> None:
    """With hooks of the same names, or of another class; with values of the first model, the result would be wrong."""
    model = shared_model(kind, name)
    for other in (zoo.load(kind, name), zoo.bridge("olmo2")):
        before = other(TOKENS)
        ways = {"zero": ablate_heads(model, "L0H0"), "hidden": knock_out(model, [5], [3], heads="L0H0")}
        for hooks in ways.values():
            with pytest.raises(ValueError, match=r"^hooks of \w+ were made for another model: make them again"):
                other.run_with_hooks(TOKENS, fwd_hooks=hooks)
            with pytest.raises(ValueError, match="made for another model"):
                run(other, hooks)
        assert torch.equal(other(TOKENS), before)
        with pytest.raises(ValueError, match="were made for different models"):
            ways["hidden"] + ablate_heads(other, "L0H1")
