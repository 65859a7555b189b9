"""Interventions under attention masks of any kind: a mask hides keys, and changes neither positions nor anything else.

A mask is passed to the model as ``[batch, 1, query, key]``, or made by a hook of the user's at the scores, before or
behind those of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from support import tolerance, zoo
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, L, close
from support.lanes import slow
from torch import Tensor

from tl_posdisent import (
    additivity,
    capture,
    dummy_distance,
    lambda_mask,
    position_interpolation,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import applied, phase_noise
from tl_posdisent.hooks.edits.running_mask import running_mask
from tl_posdisent.models.reading.query_key_hooks import read, short_name
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import rotate
from tl_posdisent.utils.errors import ArgumentError

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

TEXTS = zoo.random_tokens(L)
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
SLOT = torch.arange(L)


def drawn(density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return CAUSAL & (torch.rand(len(TEXTS), L, L, generator=generator) < density)


def without(*, queries: Any = slice(None), keys: Any = slice(None)) -> Tensor:
    seen = CAUSAL.clone()
    seen[queries, keys] = False
    return seen


MASKS = {
    "causal": CAUSAL,
    "a token not to itself": without(queries=5, keys=5),
    "no token to itself": CAUSAL & ~torch.eye(L, dtype=torch.bool),
    "only to itself": torch.eye(L, dtype=torch.bool),
    "token 1 not to key 0": without(queries=1, keys=0),
    "token 7 not to the first keys": without(queries=7, keys=slice(0, 5)),
    "a key hidden": without(keys=4),
    "the first keys hidden": without(keys=slice(0, 3)),
    "the first keys hidden from later tokens": without(queries=slice(3, None), keys=slice(0, 3)),
    "the last keys hidden": without(keys=slice(9, None)),
    "a query without keys": without(queries=6),
    "keys in a range of one query": without(queries=slice(8, 10), keys=slice(2, 6)),
    "blocks": CAUSAL & (SLOT[:, None] // 4 == SLOT // 4),
    "first key and window": CAUSAL & ((SLOT == 0) | (SLOT[:, None] - SLOT < 3)),
    **{f"{int(100 * p)} % at random, {seed}": drawn(p, seed) for p in (0.2, 0.5, 0.9) for seed in (0, 1)},
    "prefix": CAUSAL | ((SLOT < 5) & (SLOT[:, None] < 5)),
    "all keys": torch.ones(L, L, dtype=torch.bool),
    "text by text": torch.stack([without(queries=4, keys=4), without(keys=2)]),
}
SOME_MASKS = ["a token not to itself", "the first keys hidden", "50 % at random, 0", "prefix", "text by text"]

# Positions in tables, in no hook, in vectors; windows, sinks, soft caps, QK-norms, latents.
on_bridges = pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param(*case.values, mask, marks=case.marks)
        for case in zoo.names("llama-gqa", "gemma2", "gpt_oss", "olmo2", "deepseek_v3")
        for mask in SOME_MASKS
    ]
    + slow(("llama-gqa", mask) for mask in MASKS if mask not in SOME_MASKS),
)


def of_pairs(seen: Tensor) -> Tensor:
    """The mask ``[batch, 1, query, key]`` of transformers."""
    seen = seen.expand(len(TEXTS), L, L)
    return torch.zeros(len(TEXTS), 1, L, L).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)


def hiding(model: Any, seen: Tensor) -> list[Any]:
    """The user's own hooks, with the same mask."""

    def hide(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(~seen.expand(len(TEXTS), L, L)[:, None], torch.finfo(scores.dtype).min)

    return [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in range(model.cfg.n_layers)]


def run(model: Any, hooks: Any, **options: Any) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(TEXTS, **options)


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "positions": lambda m: swap_positions(m, lambda p: p),
    "positions of some heads": lambda m: swap_positions(m, lambda p: p, heads=[1, 6]),
    "shifted": lambda m: swap_positions(m, lambda p: p + 3.5),
    "slots": lambda m: swap_positions(m, SLOT),
    "distances": lambda m: remap_distance(m, lambda d: d.clamp(max=L)),
    "Λ-mask": lambda m: lambda_mask(m, 2, L, L),
    "interpolation": lambda m: position_interpolation(m, 1),
    "no noise": lambda m: phase_noise(m, 0.0),
}
OF_POSITIONS = ("positions", "positions of some heads", "shifted", "Λ-mask", "no noise")
HIDES = r"attention_mask must not hide the first keys of a row for \w+, got such a mask in row \d of layer \d"


def hides_start(masks: list[Tensor]) -> bool:
    """Say whether some layer has a row in which no query from a slot on sees a key before it."""
    rows = [row for seen in masks for row in seen.reshape(-1, L, L)]
    return any(bool(row[s:].any()) and not bool(row[s:, :s].any()) for row in rows for s in range(1, L))


def check_neutral(reading: Any, masks: list[Tensor], plain: Tensor, run_under: Callable[[Any], Tensor]) -> None:
    """Neutral tools change nothing; functions of positions are refused if the first keys are hidden in some layer."""
    for tool, make in NEUTRAL.items():
        hooks = make(reading)
        if tool in OF_POSITIONS and hides_start(masks):
            with pytest.raises(ArgumentError, match=HIDES):
                run_under(hooks)
            continue
        got = run_under(hooks)
        torch.testing.assert_close(got, plain, rtol=0, atol=rounding(plain), msg=lambda text, of=tool: f"{of}: {text}")


@on_bridges
def test_unchanged_positions_change_nothing(name: str, mask: str, shared_reading: Any) -> None:
    reading, seen = shared_reading("bridge", name), MASKS[mask]
    plain = run(reading.model, [], attention_mask=of_pairs(seen))
    given = {"attention_mask": of_pairs(seen)}  # transformers take it in the place of a layer's window
    check_neutral(reading, [seen], plain, lambda hooks: run(reading.model, hooks, **given))


@pytest.mark.parametrize("mask", ["a token not to itself", "prefix", "50 % at random, 0"])
@pytest.mark.parametrize("name", zoo.names("gptj", "gemma4"))
def test_models_that_show_no_scores_are_right_or_refuse(name: str, mask: str, shared_reading: Any) -> None:
    reading = shared_reading("bridge", name)
    options = {"attention_mask": of_pairs(MASKS[mask])}
    plain = run(reading.model, [], **options)
    for tool, make in (NEUTRAL | {"distance 5": lambda m: dummy_distance(m, 5)}).items():
        hooks = make(reading)
        try:
            got = run(reading.model, hooks, **options)
        except ValueError as error:
            assert "whole, unpadded texts" in str(error), tool  # noqa: PT017
            continue
        assert tool != "distance 5"
        torch.testing.assert_close(got, plain, rtol=0, atol=rounding(plain), msg=lambda text, of=tool: f"{of}: {text}")


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma2"))
@pytest.mark.parametrize("mask", SOME_MASKS)
def test_masks_of_own_hooks_on_either_side(kind: str, name: str, mask: str, shared_reading: Any) -> None:
    reading, seen = shared_reading(kind, name), MASKS[mask]
    if not all(spec.limits.scores_editable for spec in reading.specs()):
        pytest.skip("edited scores are discarded")
    own = hiding(reading.model, seen)
    plain = run(reading.model, own)
    masks = [seen & spec.mask(L) for spec in reading.specs()]
    check_neutral(reading, masks, plain, lambda hooks: run(reading.model, [*own, *hooks]))
    check_neutral(reading, [CAUSAL], plain, lambda hooks: run(reading.model, [*hooks, *own]))  # do not see the mask


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2"))
@pytest.mark.parametrize("value", [-torch.inf, -1e9, -1e4, -1e3])
def test_masks_of_any_value(kind: str, name: str, value: float, shared_reading: Any) -> None:
    """Added to a score or put in its place: also in one cell of one head, which no check of some rows may see."""
    reading = shared_reading(kind, name)
    cell = torch.zeros(len(TEXTS), reading.model.cfg.n_heads, L, L, dtype=torch.bool)
    cell[1, 6, 7, 3] = True
    for hidden in (cell, ~drawn(0.5, 0)[:, None] & CAUSAL):

        def add(scores: Tensor, hook: Any, hidden: Tensor = hidden) -> Tensor:
            return scores + torch.where(hidden, value, 0.0)

        def put(scores: Tensor, hook: Any, hidden: Tensor = hidden) -> Tensor:
            return scores.masked_fill(hidden, value)

        for hide in (add, put):
            own = [(spec.taps.scores, hide) for spec in reading.specs()]
            plain = run(reading.model, own)
            masks = [~hidden.all(1) & spec.mask(L) for spec in reading.specs()]
            check_neutral(reading, masks, plain, lambda hooks, own=own: run(reading.model, [*own, *hooks]))


@on_bridges
def test_distances_are_their_formula(name: str, mask: str, shared_reading: Any) -> None:
    reading, seen = shared_reading("bridge", name), MASKS[mask]
    options = {"attention_mask": of_pairs(seen)}
    distance = (SLOT[:, None] - SLOT).double()
    cases: list[tuple[Callable[..., Any], Tensor]] = [
        (partial(dummy_distance, reading, 5), torch.full_like(distance, 5)),
        (partial(remap_distance, reading, lambda d: d.clamp(max=2)), distance.clamp(max=2)),
        (partial(remap_distance, reading, lambda d: d.abs().sqrt()), distance.abs().sqrt()),
        (partial(remap_distance, reading, 3 - distance), 3 - distance),
    ]
    plain = run(reading.model, [], **options)
    for make, wanted in cases:
        for heads in (None, [1, 6]):
            expected = run(reading.model, at_distances(reading, wanted, heads), **options)
            close(run(reading.model, make(heads=heads), **options), expected, rounding(expected))
            if heads is None:  # distances matter unless each token sees at most one key
                assert (expected - plain).abs().max() > 0.05 or not bool((seen.sum(-1) > 1).any())


def at_distances(reading: Any, distances: Tensor, heads: list[int] | None) -> list[Any]:
    """Plain hooks that keep queries and keys and put ``scale · ⟨R(d) q, k⟩`` in at the scores that are not masked."""
    some: Any = slice(None) if heads is None else heads
    hooks = []
    for spec in reading.specs():
        held: dict[str, Tensor] = {}

        def keep(name: str, x: Tensor, hook: Any, held: dict[str, Tensor] = held) -> None:
            held[short_name(name)] = x

        def put(scores: Tensor, hook: Any, spec: AttentionSpec = spec, held: dict[str, Tensor] = held) -> Tensor:
            q, k = (read(tap, held).double() for tap in (spec.taps.q, spec.taps.k))
            own = scores.double()
            for d in distances.unique():
                turned = rotate(q, torch.full((L,), float(d)), spec.rotary), rotate(k, torch.zeros(L), spec.rotary)
                at_d = torch.einsum("bqhd,bkhd->bhqk", turned[0], spec.per_query_head(turned[1])) * spec.scale
                own = torch.where(distances == d, at_d, own)
            own = own if spec.soft_cap is None else spec.soft_cap * torch.tanh(own / spec.soft_cap)
            new = scores.clone()
            new[:, some] = torch.where(scores > spec.limits.masked_below, own.to(scores.dtype), scores)[:, some]
            return new

        names = dict.fromkeys([*spec.taps.q.names, *spec.taps.k.names])
        hooks += [*((name, partial(keep, name)) for name in names), (spec.taps.scores, put)]
    return hooks


GLM_5 = {
    **{"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_group": 1},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_group": 1, "pad_token_id": 0},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_n_heads": 2, "index_head_dim": 16, "max_position_embeddings": 256},
}


def glm_5(index_topk: int) -> Any:
    """GLM-5, in which a learned index chooses the keys that a query sees."""
    config = transformers.GlmMoeDsaConfig(**GLM_5, index_topk=index_topk, attn_implementation="eager")
    model = transformers.GlmMoeDsaForCausalLM(config).float().eval()
    zoo.randomise(model, 0.15, 1.0)
    return zoo.as_bridge(model)


def test_a_mask_that_the_model_chooses() -> None:
    """It stays as it is: rotations of the index are not those of attention."""
    model = glm_5(11)  # as many keys as there are tokens in the texts on which a model is read
    reading, plain = read_model(model), run(model, [])
    masks: list[Tensor] = []
    watch = [("blocks.0.attn.hook_dsa_mask", lambda x, hook: masks.append(x))]
    distance = (SLOT[:, None] - SLOT).double()
    run(model, watch)
    assert bool((masks[0] < 0)[:, -1].any())  # the index hides a key of the last token
    for tool, make in NEUTRAL.items():
        got = run(model, make(reading))
        torch.testing.assert_close(got, plain, rtol=0, atol=rounding(plain), msg=lambda text, of=tool: f"{of}: {text}")
    for hooks, wanted in (
        (dummy_distance(reading, 5), torch.full_like(distance, 5)),
        (swap_positions(reading, SLOT**2 / 3), (SLOT[:, None] ** 2 - SLOT**2) / 3),
    ):
        expected = run(model, at_distances(reading, wanted, None))
        close(run(model, [*hooks, *watch]), expected, rounding(expected))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_refusals_say_how_long_texts_may_be() -> None:
    model, few = glm_5(11), glm_5(6)
    beyond = r"tokens must be at most {} long for capture, got 12: layer 0 of \w+ rotates, scales or masks longer texts"
    for tool in (capture, partial(additivity, progress=False)):
        with pytest.raises(ValueError, match=beyond.format(11)):
            tool(model, TEXTS)
    with pytest.raises(ValueError, match=beyond.format(6)):
        additivity(few, TEXTS, progress=False)
    with pytest.raises(ValueError, match=r"layer 0 of \w+ cannot be read: its mask holds for texts of at most 6 "):
        swap_positions(few, lambda p: p)


def rounding(x: Tensor) -> float:
    """Two layers round in eight places each: norms, projections, rotation, scores, softmax, values, output, MLP."""
    return tolerance.rounding(x, steps=16)


# --- the first keys hidden from all later tokens: padding, packed texts, or keys that are knocked out


BY_POSITION: dict[str, Callable[..., Any]] = {
    "swap": lambda m, **w: swap_positions(m, lambda p: p**2 / 3, **w),
    "noise": lambda m, **w: phase_noise(m, 0.7, **w),
    "Λ": lambda m, **w: lambda_mask(m, 2, 3, L, **w),
}


@pytest.mark.parametrize("tool", BY_POSITION)
@pytest.mark.parametrize("where", [{}, {"heads": [1, 6]}], ids=["all", "some"])
@pytest.mark.parametrize("mask", ["the first keys hidden", "the first keys hidden from later tokens", "blocks"])
@pytest.mark.parametrize("name", zoo.names("llama-gqa", "codegen", "deepseek_v3"))
def test_what_could_be_padding_is_refused(name: str, mask: str, where: Any, tool: str, shared_reading: Any) -> None:
    reading = shared_reading("bridge", name)
    with pytest.raises(ArgumentError, match=HIDES):
        run(reading.model, BY_POSITION[tool](reading, **where), attention_mask=of_pairs(MASKS[mask]))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "olmo2"))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_with_keys_that_are_knocked_out(kind: str, name: str, side: str, shared_reading: Any) -> None:
    """Each text is as it is alone, where its own keys are knocked out in the same places."""
    reading = shared_reading(kind, name)
    model, pad = reading.model, 4
    at = slice(pad, L) if side == "left" else slice(0, L - pad)
    short = TEXTS[:1, :-pad]
    knocked_out = without(queries=slice(3, None), keys=slice(0, 2)) & without(queries=5, keys=5)
    tokens, mask = torch.zeros_like(TEXTS), torch.zeros_like(TEXTS)
    tokens[0, at], mask[0, at], tokens[1], mask[1] = short, 1, TEXTS[1], 1

    def hide(scores: Tensor, hook: Any) -> Tensor:
        scores, n = scores.clone(), scores.shape[-1]
        for row, text in zip(scores, [at, slice(0, L)] if n == L else [slice(0, n)], strict=True):
            size = row[:, text, text].shape[-1]
            row[:, text, text] = row[:, text, text].masked_fill(
                ~knocked_out[:size, :size], torch.finfo(scores.dtype).min
            )
        return scores

    for tool, make in TOOLS_FOR_ANY_LENGTH.items():
        if side == "left" and tool in ("swap", "noise", "lambda"):
            continue  # functions of positions
        own = [(spec.taps.scores, hide) for spec in reading.specs()]
        for hooks in ([*own, *make(reading)], [*make(reading), *own]):
            with torch.no_grad(), applied(model, hooks):
                together, alone = model(tokens, attention_mask=mask), model(short)
            torch.testing.assert_close(
                together[0, at], alone[0], rtol=0, atol=rounding(alone), msg=lambda text, of=tool: f"{of}: {text}"
            )


@pytest.mark.parametrize("seed", range(20))
def test_starts_and_ends_by_their_definition(seed: int) -> None:
    """Cell by cell, of masks at random in which blocks at the beginning and the end are hidden."""
    generator = torch.Generator().manual_seed(seed)
    n = 9
    window = (None, 4, 1)[seed % 3 if seed > 10 else 0]
    spec = AttentionSpec(
        layer=0, architecture="", n_heads=1, n_kv_heads=1, d_head=1, causal=bool(seed % 3), window=window
    )
    masked = torch.rand(3, 2, n, n, generator=generator) < 0.4
    first, last = torch.randint(0, n, (2, 3), generator=generator).tolist()
    for row in range(3):
        masked[row, :, first[row] :, : first[row]] = True
        masked[row, :, :, last[row] :] |= bool(row % 2)
    mask = running_mask(spec, -masked.float(), -0.5)
    for row in range(3):
        sees = [[not bool(masked[row, :, q, k].all()) for k in range(n)] for q in range(n)]
        may = [[bool(spec.sees(torch.tensor(q - k))) for k in range(n)] for q in range(n)]
        starts = list[bool]()
        for s in range(n):
            later = [(q, k) for q in range(s, n) for k in range(s)]
            some = any(sees[q][k] for q in range(s, n) for k in range(n))
            start = not any(sees[q][k] for q, k in later) and any(may[q][k] for q, k in later) and some
            starts.append(start)
            assert bool(mask.after[row, s]) == (not any(sees[q][k] for k in range(s, n) for q in range(n)))
        assert bool(mask.hides_start[row]) == any(starts), row
