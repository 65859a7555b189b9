"""Several interventions on one head: one meaning whatever the order, the nesting and the class, or a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, UNORDERED, L, by_brute_force, close, distances, logits, mixed_of
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    capture,
    dummy_distance,
    head_patching,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import (
    drop_component,
    patch_scores,
    patch_vectors,
    phase_noise,
    substitute_additive,
    substitute_attention,
)
from tl_posdisent.models.reading.forward import Hook

pytestmark = pytest.mark.usefixtures("unchecked")
# Tables and turned vectors, turned vectors alone, vectors before the rotation, recomputed results.
MODELS = [
    ("bridge", "llama-gqa"),
    pytest.param("bridge", "gptj", marks=[pytest.mark.slow, pytest.mark.extended]),
    pytest.param("bridge", "neox", marks=[pytest.mark.slow, pytest.mark.extended]),
    *(
        pytest.param(*case.values, marks=pytest.mark.slow)
        for case in zoo.cases("llama-gqa")
        if case.values[0] == "hooked"
    ),
]
NOISE = torch.randn(L, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _noise(model: Any, **where: Any) -> list[Hook]:
    n = len(next(capture(model, TOKENS, layers=[0], scores=False)).spec.rotary.frequencies)
    return phase_noise(model, NOISE[:, :n], **where)


def _vectors(model: Any, **where: Any) -> list[Hook]:
    other = next(capture(model, TOKENS.flip(1), layers=[0], scores=False))
    where.pop("layers", None)
    return patch_vectors(model, 0, other.q_rot, None, **where)


def _scores(model: Any, **where: Any) -> list[Hook]:
    other = next(capture(model, TOKENS.flip(1), layers=[0]))
    where.pop("layers", None)
    return patch_scores(model, 0, other.scores, "distance", **where)


TOOLS: dict[str, Callable[..., list[Hook]]] = {
    "swap": lambda m, **w: swap_positions(m, UNORDERED, **w),
    "dummy": lambda m, **w: dummy_distance(m, 5, **w),
    "remap": lambda m, **w: remap_distance(m, lambda d: d.clamp(max=2), **w),
    "interpolate": lambda m, **w: position_interpolation(m, 3, **w),
    "freeze": lambda m, **w: limit_frequencies(m, 0.05, mode="freeze", **w),
    "drop": lambda m, **w: limit_frequencies(m, None, 0.5, **w),
    "noise": _noise,
    "lambda": lambda m, **w: lambda_mask(m, 1, 6, 3, **w),
    "vectors": _vectors,
    "scores": _scores,
    "three axes": lambda m, **w: substitute_additive(m, **w),
    "two axes": lambda m, **w: substitute_additive(m, axes="two", **w),
    "attention": lambda m, **w: substitute_attention(m, "distance+sink", **w),
    "component": lambda m, **w: drop_component(m, "key", **w),
    "ablation": lambda m, **w: ablate_heads(m, w.get("heads", range(8)), layers=w.get("layers")),
}
POSITIONS = {"swap", "dummy", "remap", "lambda"}
REFUSED = {frozenset(pair) for pair in combinations(sorted(POSITIONS), 2)}
REFUSED |= {frozenset(("two axes", x)) for x in (*POSITIONS, "noise", "vectors", "scores")} | {
    frozenset(("vectors", "remap")),
    frozenset(("attention", "scores")),
    frozenset(("attention", "two axes")),
}


def in_some_ways(model: Any, a: list[Hook], b: list[Hook], ways: slice) -> list[Tensor | str]:
    """Logits, or the error, as the two lists are put on the model: joined in either order, nested, added."""

    def attempt(run: Callable[[], Tensor]) -> Tensor | str:
        try:
            with torch.no_grad():
                return run()
        except ValueError as error:
            return str(error)

    def nested(outer: list[Hook], inner: list[Hook]) -> Tensor:
        with model.hooks(fwd_hooks=outer), model.hooks(fwd_hooks=inner):
            return model(TOKENS)

    def added() -> Tensor:
        try:
            for name, function in b:
                model.add_hook(name, function)
            return model.run_with_hooks(TOKENS, fwd_hooks=a)
        finally:
            model.reset_hooks()

    lists = [lambda x=x: model.run_with_hooks(TOKENS, fwd_hooks=x) for x in (a + b, b + a)]
    return [attempt(run) for run in (*lists, lambda: nested(a, b), lambda: nested(b, a), added)[ways]]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"layers": [0]}, id="all heads"),
        pytest.param({"layers": [0], "heads": [1, 6]}, marks=pytest.mark.versions, id="some"),
    ],
)
@pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_order_and_nesting_make_no_difference(
    kind: str, name: str, where: Any, every_way: bool, shared_model: Any, shared_reading: Any
) -> None:
    """Each pair in all five ways, or quickly in two of them, each in turn."""
    model, reading = shared_model(kind, name), shared_reading(kind, name)
    made = {tool: make(reading, **dict(where)) for tool, make in TOOLS.items()}
    alone = {tool: logits(model, hooks) for tool, hooks in made.items()}
    for n, (a, b) in enumerate(combinations(TOOLS, 2)):
        ways = slice(None) if every_way else slice(n % 4, n % 4 + 2)
        first, *others = in_some_ways(model, made[a], made[b], ways)
        assert (isinstance(first, str)) == (frozenset((a, b)) in REFUSED), (a, b, first)
        for other in others:
            if isinstance(first, str):
                assert other == first, (a, b)
                assert "layer 0, head " in first
            else:
                assert torch.equal(other, first), (a, b)
        additive = {a, b} == {"three axes", "attention"}  # what the one puts in is additive already
        if not isinstance(first, str) and "ablation" not in (a, b) and not additive:  # none of the two is lost
            for tool in (a, b):
                assert (first - alone[tool]).abs().max() > 1e-4 or "vectors" in (a, b), (a, b, tool)
    with contextlib.suppress(AttributeError):
        assert not model.hook_dict["blocks.0.attn.hook_q"].fwd_hooks


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("heads", [None, [1, 6]], ids=["all heads", "some"])
def test_rotations_compose_as_the_formula_says(kind: str, name: str, heads: Any, shared_model: Any) -> None:
    """Frozen and dropped frequencies, noise and interpolation with each way of giving positions, by brute force."""
    model = shared_model(kind, name)
    rotary = next(capture(model, TOKENS, layers=[0], scores=False)).spec.rotary
    frozen, dropped = rotary.frequencies < 0.05, rotary.frequencies > 0.5
    real = distances(torch.arange(L).expand(2, L))
    wanted = {
        "swap": distances(UNORDERED),
        "dummy": torch.full_like(real, 5),
        "remap": real.clamp(max=2),
        "noise": real,
    }
    chosen = list(range(8)) if heads is None else heads
    n = len(rotary.frequencies)
    phase = NOISE[:, None, :n] - NOISE[None, :, :n]
    for tool, at in wanted.items():
        where = {"layers": [0], "heads": heads}
        hooks = TOOLS["interpolate"](model, **where) + TOOLS["freeze"](model, **where) + TOOLS["drop"](model, **where)
        hooks += TOOLS["noise"](model, **where) + (TOOLS[tool](model, **where) if tool != "noise" else [])
        angles = at[..., None] / 3 * rotary.frequencies.masked_fill(frozen, 0.0) + phase
        expected = by_brute_force(model, at[:, None], angles=angles[:, None], kept=~dropped)
        got = mixed_of(model, hooks)
        close(got[:, chosen], expected[:, chosen], 3e-5)
        if heads:
            rest = [h for h in range(8) if h not in heads]
            close(got[:, rest], mixed_of(model, [])[:, rest], 1e-6)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_edits_of_different_heads_do_not_meet(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    hooks = swap_positions(model, UNORDERED, layers=0, heads=[0, 1]) + dummy_distance(model, 3, layers=0, heads=[3, 5])
    got = mixed_of(model, hooks)
    close(got[:, :2], mixed_of(model, swap_positions(model, UNORDERED, layers=0))[:, :2], 1e-5)
    close(got[:, [3, 5]], mixed_of(model, dummy_distance(model, 3, layers=0))[:, [3, 5]], 1e-5)
    close(got[:, [2, 4, 6, 7]], mixed_of(model, [])[:, [2, 4, 6, 7]], 1e-6)


def test_a_model_that_was_changed_since_is_noticed() -> None:
    model = zoo.load("hooked", "llama-gqa")
    hooks = dummy_distance(model, 3, heads=[1])
    model.set_ungroup_grouped_query_attention(True)
    with pytest.raises(ValueError, match="make the hooks anew after changing the model"):
        logits(model, hooks)
    logits(model, dummy_distance(model, 3, heads=[1]))


def test_hooks_that_a_function_hides_are_refused(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    hidden = [
        (name, type("Hiding", (), {"__slots__": ("f",), "__call__": lambda s, x, hook: s.f(x, hook=hook)})())
        for name, _ in dummy_distance(model, 3)
    ]
    for (_, outer), (_, inner) in zip(hidden, dummy_distance(model, 3), strict=True):
        outer.f = inner
    with pytest.raises(ValueError, match="a hook of dummy_distance is called by a function that hides it"):
        logits(model, hidden)


def test_results_that_are_no_pattern_times_values_are_refused() -> None:
    """Gemma 4 normalises its values behind hook_v and discards edited patterns: its own pattern would change it."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this version of transformers has no Gemma 4")
    config = transformers.Gemma4TextConfig(
        vocab_size=zoo.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        global_head_dim=16,
        max_position_embeddings=128,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )
    config._attn_implementation = "eager"
    whole = transformers.Gemma4ForCausalLM(config).float().eval()
    zoo.randomise(whole, 0.1, 1.0)
    model = zoo.as_bridge(whole)
    with pytest.raises(ValueError, match="is not its pattern times hook_v"):
        head_patching(model, TOKENS, TOKENS.flip(1), lambda x, t: x[:, -1, 3], activation="pattern", progress=False)
