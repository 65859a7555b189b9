"""Generation with a KV cache under interventions: the logits of one whole pass, or a refusal that names the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, L, close
from torch import Tensor

from tl_posdisent import (
    dummy_distance,
    limit_frequencies,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import applied, drop_component, phase_noise, substitute_additive
from tl_posdisent.hooks.edits.cached_text import before_and_now
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
TEXTS = zoo.random_tokens(L)
START = 7
TOOLS: dict[str, Callable[..., list[Hook]]] = {
    **TOOLS_FOR_ANY_LENGTH,
    "two at once": lambda m, **w: dummy_distance(m, 5, **w) + limit_frequencies(m, 0.05, mode="freeze", **w),
}
# Without gpt_oss, whose router may take another expert at the least rounding; below it takes all of them.
MODELS = [*zoo.cases("llama-gqa", "gemma2", "gptj"), ("bridge", "neox"), ("bridge", "codegen"), ("bridge", "falcon")]


def step_by_step(
    model: Any, kind: str, hooks: list[Hook], tokens: Tensor, mask: Tensor | None = None, ends: Sequence[int] = ()
) -> Tensor:
    """Logits of parts of a text, each in a pass of its own against a cache; by default of the last tokens, singly."""
    ends = ends or range(START, tokens.shape[1] + 1)
    out, parts = [], list(zip((0, *ends), ends, strict=False))
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        if kind == "bridge":
            cache: Any = None
            for start, end in parts:
                given = {} if mask is None else {"attention_mask": mask[:, :end]}
                logits, cache = model(
                    tokens[:, start:end],
                    return_type="logits_and_cache",
                    use_cache=True,
                    **given,
                    **({} if cache is None else {"past_key_values": cache}),
                )
                out.append(logits)
            return torch.cat(out, 1)
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(tokens))
        for start, end in parts:
            given = {"attention_mask": torch.ones_like(tokens[:, start:end]) if mask is None else mask[:, start:end]}
            out.append(model(tokens[:, start:end], past_kv_cache=cache, **given))
        return torch.cat(out, 1)


def continuing(model: Any, kind: str, tokens: Tensor) -> dict[str, Any]:
    """Arguments that go on with a text, one token for each, against a cache that is filled now."""
    with torch.no_grad():
        if kind == "bridge":
            _, cache = model(tokens, return_type="logits_and_cache", use_cache=True)
            return {"past_key_values": cache, "use_cache": True}
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(tokens))
        model(tokens, past_kv_cache=cache, attention_mask=torch.ones_like(tokens))
        return {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens[:, :1])}


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_a_cache_gives_the_logits_of_one_whole_pass(kind: str, name: str, shared_reading: Any) -> None:
    reading = shared_reading(kind, name)
    model = reading.model
    for tool, make in TOOLS.items():
        for where in ({}, {"heads": [1, 6]}):
            hooks = make(reading, **where)
            with torch.no_grad():
                whole = model.run_with_hooks(TEXTS, fwd_hooks=hooks)
            for _ in range(1 if where else 2):  # the hooks can be used again
                try:
                    close(step_by_step(model, kind, hooks, TEXTS), whole, 2e-4)
                except AssertionError as error:
                    raise AssertionError(f"{tool} {where}: {error}") from error


PARTS = [(6, 7, 12), (1, 3, 8, 12), (4, 12)]
WINDOWED = zoo.cases("llama-gqa", "mistral", "gemma3", "gptj")


@pytest.mark.parametrize(("kind", "name"), WINDOWED)
@pytest.mark.parametrize("tool", ["swap", "dummy", "interpolate", "noise", "remap"])
def test_parts_of_any_length_give_the_logits_of_one_whole_pass(
    kind: str, name: str, tool: str, shared_reading: Any
) -> None:
    reading = shared_reading(kind, name)
    for where in ({}, {"heads": [1, 6]}):
        with torch.no_grad():
            whole = reading.model.run_with_hooks(TEXTS, fwd_hooks=TOOLS[tool](reading, **where))
        for ends in PARTS:
            close(step_by_step(reading.model, kind, TOOLS[tool](reading, **where), TEXTS, ends=ends), whole, 2e-4)


def matrices(n_heads: int, length: int = 12) -> dict[str, Tensor]:
    """Distances that are those of no positions, for all heads, for each head and for each text."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"all": (), "heads": (n_heads,), "texts": (len(TEXTS), 1), "texts and heads": (len(TEXTS), n_heads)}
    return {name: 40 * torch.rand(*shape, length, length, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("kind", "name"), [*WINDOWED, *(("bridge", x) for x in ("neox", "qwen3", "falcon", "phi3"))])
def test_a_matrix_of_distances_serves_the_parts_of_its_text(kind: str, name: str, shared_reading: Any) -> None:
    """Each part takes its rows, and the columns of the keys so far."""
    reading = shared_reading(kind, name)
    model = reading.model
    for shape, distances in matrices(model.cfg.n_heads).items():
        for where in ({}, {"heads": [1, 6]}):
            hooks = remap_distance(reading, distances, **where)
            with torch.no_grad():
                whole = model.run_with_hooks(TEXTS, fwd_hooks=hooks)
            for ends in PARTS:
                for given in (distances, torch.nn.functional.pad(distances, (0, 3, 0, 2), value=7.0)):
                    got = step_by_step(model, kind, remap_distance(reading, given, **where), TEXTS, ends=ends)
                    try:
                        close(got, whole, 2e-4)
                    except AssertionError as error:
                        raise AssertionError(f"{shape} {where} {ends}: {error}") from error


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_a_matrix_of_distances_that_ends_before_its_text_is_refused(kind: str, name: str, shared_reading: Any) -> None:
    reading = shared_reading(kind, name)
    distances = matrices(1)["all"]
    with pytest.raises(ValueError, match=r"distances must be .* at least 12 queries and 12 keys so far, got \(9, 9\)"):
        step_by_step(reading.model, kind, remap_distance(reading, distances[:9, :9]), TEXTS, ends=(6, 8, 12))
    with pytest.raises(ValueError, match=r"distances must have shape \(query, key\) = \(6, 6\)"):  # a text, not a part
        reading.model.run_with_hooks(TEXTS[:, :6], fwd_hooks=remap_distance(reading, distances))


# Bridges whose queries are turned at a hook that fires before the model shows where they stand.
TURNED_BEFORE = [name for name in ("phi3", "neox", "gptj", "codegen", "falcon") if name in zoo.BRIDGE_NAMES]
STEPS = [(1, 2, 3, 4, 5), (2, 3), (3, 5, 6), (1, 6), (2, 4, 6), (6,)]


@pytest.mark.parametrize("name", TURNED_BEFORE)
def test_several_texts_in_steps_of_any_size_in_one_block(name: str, shared_reading: Any) -> None:
    """What is known of a text before says nothing of where the next one begins."""
    reading = shared_reading("bridge", name)
    model, texts, n_right = reading.model, (TEXTS[:, :6], TEXTS[:, 6:]), 0
    for tool, make in TOOLS.items():
        for where in ({}, {"heads": [1, 6]}):
            with torch.no_grad(), applied(model, make(reading, **where)):
                whole = [model(text) for text in texts]
                for ends in STEPS:
                    for text, expected in zip(texts, whole, strict=True):
                        got = step_by_step(model, "bridge", [], text, ends=ends)
                        try:
                            close(got, expected[:, : ends[-1]], 2e-4)
                        except AssertionError as error:
                            raise AssertionError(f"{tool} {where} {ends}: {error}") from error
                        n_right += 1
    assert n_right == 2 * 2 * len(STEPS) * len(TOOLS)


@pytest.mark.parametrize("name", [name for name in TURNED_BEFORE if name not in ("gptj", "codegen")])
def test_padded_prompts_where_vectors_are_turned_for_other_positions(name: str, shared_reading: Any) -> None:
    """Scores are then recomputed, from keys of the same text alone."""
    reading = shared_reading("bridge", name)
    model, mask = reading.model, torch.ones_like(TEXTS)
    mask[0, :3] = 0
    with torch.no_grad():
        _, other = model(TEXTS[:, :START].flip(1), attention_mask=mask[:, :START], return_type="logits_and_cache")
    for tool in ("swap", "dummy", "noise", "two at once"):
        for where in ({}, {"heads": [1, 6]}):
            hooks = TOOLS[tool](reading, **where)
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                whole = model(TEXTS, attention_mask=mask)
                for ends in PARTS:
                    got = step_by_step(model, "bridge", [], TEXTS, mask, [end for end in ends if end > 3])
                    close(got[1], whole[1], 2e-4)
                    close(got[0, 3:], whole[0, 3:], 2e-4)
                step_by_step(model, "bridge", [], TEXTS[:, :START], mask, [START])
                with pytest.raises(ValueError, match="not filled under these hooks"):
                    model(
                        TEXTS[:, START : START + 1],
                        attention_mask=mask[:, : START + 1],
                        past_key_values=copy.deepcopy(other),
                    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "neox"))
def test_a_cache_of_thousands_of_tokens(kind: str, name: str) -> None:
    """The positions of later parts are found however far they are; a ceiling beyond the window changes nothing."""
    build = zoo.bridge if kind == "bridge" else zoo.hooked
    model = build(name, max_position_embeddings=3000, num_attention_heads=4)  # time and memory are those of scores
    text, ends = zoo.random_tokens(2100, 1), [*range(700, 2100, 700), 2099, 2100]
    plain = step_by_step(model, kind, [], text, ends=ends)[:, -2:]
    same = step_by_step(model, kind, remap_distance(model, lambda d: d.clamp(max=2099)), text, ends=ends)[:, -2:]
    close(same, plain, 2e-4)
    near = step_by_step(model, kind, remap_distance(model, lambda d: d.clamp(max=50)), text, ends=ends)[:, -2:]
    assert (near - plain).abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_what_is_given_for_each_slot_is_not_given_again_for_the_next_part(
    kind: str, name: str, shared_model: Any
) -> None:
    model = shared_model(kind, name)
    angles = torch.randn(6, read_model(model).specs(0)[0].require_rotary("").dim // 2)
    for hooks in (swap_positions(model, torch.arange(6) * 2), phase_noise(model, angles)):
        with pytest.raises(ValueError, match=r"for each slot of a whole|KV cache|must have shape"):
            step_by_step(model, kind, hooks, TEXTS, ends=(6, 12))


@pytest.mark.parametrize("tool", ["drop", "remap", "lambda", "two at once"])
def test_attention_sinks(tool: str) -> None:
    model = zoo.bridge("gpt_oss", num_experts_per_tok=4)
    for where in ({}, {"heads": [1, 6]}):
        hooks = TOOLS[tool](model, **where)
        with torch.no_grad():
            whole = model.run_with_hooks(TEXTS, fwd_hooks=hooks)
        close(step_by_step(model, "bridge", hooks, TEXTS), whole, 2e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "qwen3.5"))
def test_padded_prompts(kind: str, name: str, shared_reading: Any) -> None:
    reading = shared_reading(kind, name)
    model = reading.model
    mask = torch.ones_like(TEXTS)
    mask[0, :3] = 0
    for tool, make in TOOLS.items():
        for where in ({}, {"heads": [1, 6]}):
            hooks = make(reading, **where)
            got = step_by_step(model, kind, hooks, TEXTS, mask)
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                whole = model(TEXTS, attention_mask=mask)
            try:
                close(got[1], whole[1], 2e-4)
                close(got[0, 3:], whole[0, 3:], 2e-4)
            except AssertionError as error:
                raise AssertionError(f"{tool} {where}: {error}") from error


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_generate(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), TEXTS[:1, :START]
    model = reading.model
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 5}
    for make in TOOLS.values():
        with torch.no_grad(), model.hooks(fwd_hooks=make(reading)):
            text = prompt
            for _ in range(5):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
            for cached in (True, False):
                assert torch.equal(model.generate(prompt, use_past_kv_cache=cached, **options), text)


@pytest.mark.parametrize(
    "tool", ["swap", "dummy", "remap", "lambda", "two at once", "ablation", "component", "additive"]
)
def test_generate_with_a_model_of_transformerlens_itself(tool: str) -> None:
    """It runs on the whole text for each token, also if a KV cache is asked for, and shows no scores; TransformerLens 4
    shows its pattern before its result, version 3 after."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    shape = {"d_model": 64, "d_head": 8, "n_heads": 8, "n_layers": 2, "n_ctx": 64, "d_vocab": zoo.VOCAB, "d_mlp": 96}
    names = {"act_fn": "gelu", "normalization_type": "LN", "positional_embedding_type": "rotary"}
    model = TransformerBridge.boot_native(TransformerBridgeConfig(**shape, **names, rotary_dim=8, seed=0))
    make = {**TOOLS, "component": partial(drop_component, component="key"), "additive": substitute_additive}[tool]
    options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 5}
    with torch.no_grad():
        for where in ({}, {"heads": [1, 6]}):
            with model.hooks(fwd_hooks=make(model, **where)):
                text = TEXTS[:, :START]
                for _ in range(5):
                    text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
                for cached in (True, False):
                    assert torch.equal(model.generate(TEXTS[:, :START], use_past_kv_cache=cached, **options), text)
            whole = [model.run_with_hooks(text, fwd_hooks=make(model, **where)) for _ in range(2)]
            assert (whole[0] - model(text)).abs().max() > 0.01
            assert torch.equal(*whole)


def fitted(model: Any) -> list[list[Hook]]:
    return [drop_component(model, "distance"), *(substitute_additive(model, axes=axes) for axes in ("three", "two"))]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_what_needs_a_whole_text_names_the_way_out(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for hooks in fitted(model):
        with pytest.raises(ValueError, match="use_past_kv_cache=False"):
            step_by_step(model, kind, hooks, TEXTS)
    with pytest.raises(ValueError, match="give a function of the position"):
        step_by_step(model, kind, swap_positions(model, torch.arange(START) * 2), TEXTS)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_a_prompt_of_one_token(kind: str, name: str, shared_model: Any) -> None:
    """Without a cache what needs a whole text begins with a single score, of which no part can be dropped."""
    model, prompt = shared_model(kind, name), TEXTS[:1, :1]
    for hooks in fitted(model):
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            close(model(prompt)[0, 0], model(TEXTS[:1, :2])[0, 0])
            options = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 3}
            assert model.generate(prompt, use_past_kv_cache=False, **options).shape == (1, 4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_cache_of_another_text_is_refused(kind: str, name: str, shared_model: Any) -> None:
    """After a whole pass on one text, hooks do not go on with the cache of another, which was filled without them."""
    model = shared_model(kind, name)
    hooked = dummy_distance(model, 3)
    with torch.no_grad():
        model.run_with_hooks(TEXTS[:, :START], fwd_hooks=hooked)
        again = continuing(model, kind, TEXTS[:, :START].flip(1))
        with pytest.raises(ValueError, match="not filled under these hooks"):
            model.run_with_hooks(TEXTS[:, START : START + 1], fwd_hooks=hooked, **again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "left"),
    [({"do_sample": False}, True), ({"do_sample": True}, True), ({"do_sample": False, "num_beams": 4}, False)],
)
def test_transformers_own_generation(search: dict[str, Any], left: bool, shared_model: Any) -> None:
    """Padded prompts and sampling with a cache as without; beams, which exchange caches between texts, are refused."""
    model = shared_model("bridge", "llama-gqa")
    tokens, mask = TEXTS[:, :8].clone(), torch.ones(len(TEXTS), 8, dtype=torch.int64)
    if left:
        tokens[0, :3], mask[0, :3] = 0, 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True}

    def scores(hooks: list[Hook], cached: bool) -> Tensor:
        torch.manual_seed(1)
        with applied(model, hooks):
            found = model.original_model.generate(
                tokens, attention_mask=mask, use_cache=cached, pad_token_id=0, **search, **options
            )
        return torch.stack(found.scores).nan_to_num(neginf=0)

    plain, n_right = scores([], True), 0
    for tool in ("swap", "remap"):
        for where in ({}, {"heads": [1, 6]}, {"heads": [1, 6], "layers": [0]}):
            hooks = TOOLS[tool](model, **where)
            try:
                found = scores(hooks, True)
            except ValueError as error:
                assert "num_beams" in search
                assert "use_past_kv_cache=False" in str(error)  # noqa: PT017
                assert (scores(hooks, False) - plain).abs().max() > 0.01  # the way out
                continue
            torch.testing.assert_close(found, scores(TOOLS[tool](model, **where), False), rtol=0, atol=2e-3)
            assert (found - plain).abs().max() > 0.01
            n_right += 1
    assert n_right == (0 if "num_beams" in search else 6)


@pytest.mark.parametrize(
    ("positions", "n_key", "before", "expected"),
    [
        ([[5, 6], [9, 10]], 5, None, [[2, 3, 4, 5, 6], [6, 7, 8, 9, 10]]),  # unknown: up to the first query's
        ([1, 2], 4, None, [0, 0, 1, 2]),  # no position is below 0
        ([8, 9], 4, [0, 3, 7], [3, 7, 8, 9]),  # a window has dropped the first
        ([8, 9], 5, [3, 7], [5, 6, 7, 8, 9]),  # too few are known
        ([8, 9], 2, [3, 7], [8, 9]),
    ],
)
def test_positions_of_the_keys_in_a_cache(positions: Any, n_key: int, before: Any, expected: Any) -> None:
    known = None if before is None else torch.tensor(before)
    assert before_and_now(torch.tensor(positions), n_key, known).tolist() == expected
