"""Several interventions at once: the oracle's scores, in any order, however installed, in every state of the run.

Two lists that are added act together as the oracle says, or are refused when they are added. Two that are installed
separately do the same, or are refused while running.
"""

from __future__ import annotations

import re
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from support import zoo
from support.edited_scores import Call
from support.intervention_cases import (
    TOKENS,
    TOOLS,
    TOOLS_FOR_ANY_LENGTH,
    UNORDERED,
    L,
    case,
    close,
    edited,
    logits,
    mixed_of,
)
from support.lanes import slow
from support.untouched import state
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import (
    ablate_heads,
    capture,
    dummy_distance,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import (
    applied,
    drop_component,
    patch_vectors,
    phase_noise,
    substitute_additive,
    substitute_attention,
)
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.hooks.hook_list import Hooks, joined

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
MODELS = zoo.cases("llama-gqa")
NO_HOOKS = r"hooks must be a list of \(hook name or filter, function\), got "
HEADS = [pytest.param(*case.values, [1, 6], id=f"{case.id}-two", marks=case.marks) for case in MODELS]
HEADS += [pytest.param(*case.values, None, id=f"{case.id}-all", marks=pytest.mark.slow) for case in MODELS[:1]]
OTHERS = "other hooks act on its attention"
POSITIONS = {"swap", "dummy", "remap"}
ROTATING = {*POSITIONS, "lambda", "interpolate", "freeze", "drop", "noise", "vectors"}
REFUSED = {frozenset(pair) for pair in combinations(sorted(POSITIONS), 2)}
REFUSED |= {frozenset(("two axes", x)) for x in (*POSITIONS, "lambda", "noise", "vectors", "scores")} | {
    frozenset(("vectors", "dummy")),
    frozenset(("vectors", "remap")),
    frozenset(("vectors", "lambda")),
    frozenset(("attention", "scores")),
    frozenset(("attention", "two axes")),
}


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


@pytest.mark.parametrize(("kind", "name", "heads"), HEADS)
def test_every_pair_is_the_oracles_or_refused(kind: str, name: str, heads: Any, shared_model: Any) -> None:
    """Added, they act together; installed separately, edits of the rotation do the same or raise."""
    model = shared_model(kind, name)
    plain, chosen = mixed_of(model, []), list(range(8)) if heads is None else heads
    rest = [h for h in range(8) if h not in chosen]
    made = {tool: make(model, layers=[0], heads=heads) for tool, make in TOOLS.items()}
    calls = {tool: case(tool, model, heads) for tool in TOOLS}
    n_raised = 0
    for n, (a, b) in enumerate(combinations(TOOLS, 2)):
        a, b = (a, b) if n % 2 else (b, a)
        way = WAYS[list(WAYS)[n % 3]]
        try:
            both = made[a] + made[b]
        except ValueError as error:
            assert frozenset((a, b)) in REFUSED, (a, b, error)  # noqa: PT017
            assert "layer 0, head " in str(error)  # noqa: PT017
            if {a, b} <= ROTATING:
                with pytest.raises(ValueError, match=OTHERS):
                    way(model, made[a], made[b])
            continue
        assert frozenset((a, b)) not in REFUSED, (a, b)
        expected, got = edited(model, [calls[a], calls[b]]), mixed_of(model, both)
        assert (got - expected)[:, chosen].abs().max() < 1e-4, (a, b)
        assert torch.equal(got[:, rest], plain[:, rest]), (a, b)
        if not {a, b} & ROTATING:
            continue  # edits of scores act in the order in which they are installed
        try:
            close(way(model, made[a], made[b]), got, 1e-4)
        except ValueError as error:
            # a list that fits scores takes keys that another has hidden for those of several texts
            assert re.search(f"{OTHERS}|must leave one text in each row", str(error)), (a, b, error)  # noqa: PT017
            n_raised += 1
    assert n_raised > 10


DISTANCES = {
    "dummy_distance": lambda model, **where: dummy_distance(model, 5, **where),
    "remap_distance": lambda model, **where: remap_distance(model, lambda d: 0 * d + 5, **where),
    "lambda_mask": lambda model, **where: lambda_mask(model, sinks=1, window=4, distance_ceiling=2, **where),
}


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
@pytest.mark.parametrize("tool", DISTANCES)
def test_vectors_are_not_patched_where_only_distances_are_given(tool: str, sides: str, shared_model: Any) -> None:
    """Patched vectors have positions, and a distance says none for the other side; on other heads both act."""
    model = shared_model("bridge", "llama-gqa")
    own = capture(model, TOKENS, layers=[0])[0]
    given = [x if side in sides else None for side, x in (("q", own.q_rot), ("k", own.k_rot))]
    patch = patch_vectors(model, 0, *given, heads=[1], keys="head")
    for lists in permutations([patch, DISTANCES[tool](model, layers=[0])]):
        with pytest.raises(ValueError, match=rf"L0H1\): {tool} sets distances, not positions, and vectors that are"):
            joined(lists)
    others = DISTANCES[tool](model, layers=[0], heads=[0, *range(2, 8)])
    assert torch.equal(mixed_of(model, others + patch), mixed_of(model, patch + others))
    swapped = swap_positions(model, torch.arange(TOKENS.shape[1]), layers=[0])
    close(mixed_of(model, swapped + patch), mixed_of(model, []), 1e-4)


@pytest.mark.parametrize("part", ["distance", "query", "key", "residual", "fit"])
def test_first_token_attention_has_no_components_to_drop(part: str, shared_model: Any) -> None:
    """All keys but one are hidden; uniform attention has finite scores, without a component that a softmax sees."""
    model = shared_model("bridge", "llama-gqa")
    where: Any = {"layers": [0], "heads": [3]}
    dropped = substitute_additive(model, **where) if part == "fit" else drop_component(model, part, **where)
    tool = "substitute_additive" if part == "fit" else "drop_component"
    first, uniform = (substitute_attention(model, rung, **where) for rung in ("first_token", "uniform"))
    for lists in permutations([first, dropped]):
        with pytest.raises(ValueError, match=rf"attention\(first_token\) leaves no finite .*, which {tool} "):
            joined(lists)
    close(mixed_of(model, uniform + dropped), mixed_of(model, uniform), 1e-5)


@pytest.mark.parametrize("patched", ["q", "k", "both"])
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_a_dropped_subspace_is_gone_whatever_is_patched(kind: str, name: str, patched: str, shared_model: Any) -> None:
    """From both sides alike, beside what moves the other side, and whatever the patch holds there."""
    model = shared_model(kind, name)
    other = capture(model, TOKENS.flip(1), layers=[0])[0]
    rotary = other.spec.rotary
    low = float(rotary.frequencies.sort().values[-2:].log().mean().exp())  # the fastest alone is kept
    slow = rotary.frequencies < low
    columns = torch.cat([slow, slow]) if rotary.pairing == "half" else slow.repeat_interleave(2)
    vectors = {"q": other.q_rot, "k": other.k_rot}
    vectors = {side: x if patched in (side, "both") else None for side, x in vectors.items()}
    wild = {side: None if x is None else x.clone() for side, x in vectors.items()}
    for x in wild.values():
        if x is not None:
            x[..., : len(columns)][..., columns] = 50.0
    limited = Call("limit_frequencies", low=low)
    chosen = (None, [1, 6]) if (kind, name) == MODELS[0].values else (None,)
    for heads in chosen:
        for tool in (None, "swap", "interpolate", "freeze", "noise"):
            hooks, calls = limit_frequencies(model, low, layers=[0], heads=heads), [limited.on(heads)]
            if tool is not None:
                hooks += TOOLS[tool](model, layers=[0], heads=heads)
                calls.append(case(tool, model, heads))
            where: Any = {"heads": heads, "keys": "head"}
            one, same = (hooks + patch_vectors(model, 0, x["q"], x["k"], **where) for x in (vectors, wild))
            got = mixed_of(model, one)
            close(mixed_of(model, same), got, 1e-5)
            calls.append(Call("patch_vectors", q_rot=vectors["q"], k_rot=vectors["k"], **where))
            wanted, rows = edited(model, calls), range(8) if heads is None else heads
            close(got[:, list(rows)], wanted[:, list(rows)])


@pytest.mark.parametrize("step", [5, *slow([1])])
@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_separate_lists_on_different_heads_act_as_if_added(kind: str, name: str, step: int, shared_model: Any) -> None:
    """Also on heads that share their keys; every pair, or each fifth, in one order and way, in turn."""
    model = shared_model(kind, name)
    first = {tool: make(model, layers=[0], heads=[1, 6]) for tool, make in TOOLS.items()}
    second = {tool: make(model, layers=[0], heads=[0, 2]) for tool, make in TOOLS.items()}
    for n, (a, b) in [*enumerate(combinations(TOOLS, 2))][::step]:
        a, b = (a, b) if n % 2 else (b, a)
        together, way = mixed_of(model, first[a] + second[b]), WAYS[list(WAYS)[n % 3]]
        close(way(model, first[a], second[b]), together, 1e-6)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_hooks_are_applied_once(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = state(model)
    for make in TOOLS.values():
        hooks = make(model, layers=[0], heads=[1])
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
    one, other = (swap_positions(model, UNORDERED.clone(), layers=[0]).interventions[0].edit for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != swap_positions(model, UNORDERED.flip(0), layers=[0]).interventions[0].edit
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


def test_every_edit_that_acts_is_shown(shared_model: Any) -> None:
    """An edit that is added twice acts twice; edits of one short form and other contents are several."""
    model = shared_model("bridge", "llama-gqa")
    layers = "2 layers × 8 heads"

    def half(d: torch.Tensor) -> torch.Tensor:
        return d / 2

    twice = position_interpolation(model, 2) + position_interpolation(model, 2)
    one = position_interpolation(model, 2)
    for both in (twice, one + one):
        torch.testing.assert_close(logits(model, both), logits(model, position_interpolation(model, 4)))
        assert repr(both) == f"position_interpolation(2) on {layers} + position_interpolation(2) on {layers}"
        assert both.name == "position_interpolation(2) + position_interpolation(2)"
        assert both.to_frame()["edit"].tolist() == ["position_interpolation(2)"] * 32
    by_layer = [position_interpolation(model, 2, layers=layer) for layer in (0, 1)]
    assert repr(by_layer[0] + by_layer[1]) == repr(one)
    lambdas = [remap_distance(model, f, layers=n) for n, f in enumerate((lambda d: d / 2, lambda d: d * 0))]
    assert (lambdas[0] + lambdas[1]).name == "remap_distance(<lambda>) + remap_distance(<lambda>)"
    same = [remap_distance(model, half, layers=layer) for layer in (0, 1)]
    assert repr(same[0] + same[1]) == f"remap_distance(half) on {layers}"
    noise = [phase_noise(model, torch.full((12, 4), x), layers=0, heads=0) for x in (0.1, 0.2)]
    shown = "phase_noise(12×4 angles) on L0H0"
    assert repr(noise[0] + noise[1]) == f"{shown} + {shown}"
    mask = lambda_mask(model, 1, 4, 4)  # one call, which edits distances and scores
    assert repr(mask) == f"lambda_mask(1, 4, 4) on {layers}"
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
            with model.hooks(fwd_hooks=ours), pytest.raises(ValueError, match=OTHERS):
                model.run_with_hooks(tokens, fwd_hooks=[own])


def test_a_stopped_pass_leaves_no_trace(shared_model: Any) -> None:
    """An error in the middle of a layer, then other hooks: nothing is taken for installed that is not."""
    model = shared_model("bridge", "llama-gqa")

    def stop(x: Tensor, hook: Any) -> None:
        raise RuntimeError("stopped")

    first, second = dummy_distance(model, 3), swap_positions(model, UNORDERED)
    expected = logits(model, second)
    for where in ("hook_q", "hook_rot_k", "hook_pattern"):
        with pytest.raises(RuntimeError, match="stopped"):
            model.run_with_hooks(TOKENS, fwd_hooks=[*first, (f"blocks.0.attn.{where}", stop)])
        assert torch.equal(logits(model, second), expected)


def test_a_model_that_was_changed_since_is_noticed() -> None:
    model = zoo.load("hooked", "llama-gqa")
    hooks = dummy_distance(model, 3, heads=[1])
    model.set_ungroup_grouped_query_attention(True)
    with pytest.raises(ValueError, match="make the hooks again after changing the model"):
        logits(model, hooks)
    logits(model, dummy_distance(model, 3, heads=[1]))


# --- the same on padded batches -----------------------------------------------------------------------------------

PAIRS = [(a, b) for a, b in combinations(TOOLS_FOR_ANY_LENGTH, 2) if frozenset((a, b)) not in REFUSED]
PAD = 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_pairs_on_a_padded_text_are_as_on_the_text_alone(kind: str, name: str, side: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    tokens, mask = TOKENS.clone(), torch.ones(2, L, dtype=torch.int64)
    at = slice(PAD, L) if side == "left" else slice(0, L - PAD)
    tokens[0], mask[0] = 0, 0
    tokens[0, at], mask[0, at] = TOKENS[0, : L - PAD], 1
    for n, (a, b) in enumerate(PAIRS):
        if side == "left" and {a, b} & {"swap", "noise", "lambda"}:
            continue  # functions of positions
        heads = None if n % 2 else [1, 6]
        hooks = sum((TOOLS_FOR_ANY_LENGTH[tool](model, heads=heads) for tool in (a, b)), Hooks([]))
        with torch.no_grad(), applied(model, hooks):
            together, alone, long = model(tokens, attention_mask=mask), model(TOKENS[:1, : L - PAD]), model(TOKENS[1:])
        close(together[0, at], alone[0], 2e-4)
        close(together[1], long[0], 2e-4)
