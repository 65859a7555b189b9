"""Generation under interventions: on whole texts it is right, and a KV cache is refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import cache_faults, zoo
from support.intervention_cases import TOOLS_FOR_ANY_LENGTH, L, close
from support.lanes import slow
from torch import Tensor

from tl_posdisent import ablate_heads, dummy_distance, limit_frequencies
from tl_posdisent.hooks import applied, drop_component, substitute_additive
from tl_posdisent.models.running.forward_pass import Hook

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
TEXTS = zoo.random_tokens(L)
START = 7
TOOLS: dict[str, Callable[..., list[Hook]]] = {
    **TOOLS_FOR_ANY_LENGTH,
    "two at once": lambda m, **w: dummy_distance(m, 5, **w) + limit_frequencies(m, 0.05, mode="freeze", **w),
}
FITTED: dict[str, Callable[..., list[Hook]]] = {
    "component": partial(drop_component, component="key"),
    "additive": substitute_additive,
    "two axes": partial(substitute_additive, axes="two"),
}
OF_ATTENTION = {tool: make for tool, make in {**TOOLS, **FITTED}.items() if tool != "ablation"}
OPTIONS = {"do_sample": False, "verbose": False, "stop_at_eos": False, "max_new_tokens": 5}


def one_by_one(model: Any, text: Tensor, n: int = 5) -> Tensor:
    """What a loop over whole texts generates."""
    for _ in range(n):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_generate_without_a_cache_is_a_loop_over_whole_texts(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), TEXTS[:1, :START]
    model = reading.model
    for make in {**TOOLS, **FITTED}.values():
        with torch.no_grad(), model.hooks(fwd_hooks=make(reading)):
            expected = one_by_one(model, prompt)
            assert torch.equal(model.generate(prompt, use_past_kv_cache=False, **OPTIONS), expected)


def test_padded_prompts(shared_reading: Any) -> None:
    """A batch that is padded on the left generates what each of its texts does alone."""
    reading = shared_reading("bridge", "llama-gqa")
    model, mask = reading.model, torch.ones_like(TEXTS[:, :START])
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}

    def scores(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.stack(model.original_model.generate(tokens, attention_mask=mask, **options).scores, 1)

    for tool, make in TOOLS.items():
        with torch.no_grad(), applied(model, make(reading)):
            got, alone = scores(TEXTS[:, :START], mask), scores(TEXTS[:1, 3:START], mask[:1, 3:])
            finite = alone.isfinite()
            torch.testing.assert_close(got[:1][finite], alone[finite], rtol=0, atol=2e-3, msg=tool)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma4"))
def test_a_cache_is_refused_at_the_first_step(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), TEXTS[:, :START]
    for make in OF_ATTENTION.values():
        refused = pytest.raises(ValueError, match=r"layer 0 sees 1 of \d tokens: .* use_past_kv_cache=False")
        with torch.no_grad(), reading.model.hooks(fwd_hooks=make(reading)), refused:
            reading.model.generate(prompt, use_past_kv_cache=True, **OPTIONS)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_results_are_edited_with_a_cache_as_without(kind: str, name: str, shared_reading: Any) -> None:
    reading, prompt = shared_reading(kind, name), TEXTS[:1, :START]
    model = reading.model
    with torch.no_grad(), model.hooks(fwd_hooks=ablate_heads(reading, [(0, 1), (1, 2)])):
        assert torch.equal(model.generate(prompt, use_past_kv_cache=True, **OPTIONS), one_by_one(model, prompt))


@pytest.mark.parametrize("fault", [cache_faults.lost, cache_faults.renamed])
def test_attention_that_loses_its_cache_is_refused_by_the_position(fault: Any, shared_reading: Any) -> None:
    """It sees a text of one token, whose position says that it continues another."""
    reading = shared_reading("bridge", "llama-gqa")
    model = reading.model
    handles = [fault(block.attn.original_component) for block in model.blocks]
    try:
        for make in OF_ATTENTION.values():
            refused = pytest.raises(ValueError, match=r"layer 0 sees 1 of \d tokens: .* use_past_kv_cache=False")
            with torch.no_grad(), model.hooks(fwd_hooks=make(reading)), refused:
                model.generate(TEXTS[:1, :START], use_past_kv_cache=True, **OPTIONS)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("tool", ["swap", "two at once", *slow(["dummy", "remap", "lambda", "ablation", *FITTED])])
def test_generate_with_a_model_of_transformerlens_itself(tool: str) -> None:
    """It runs on the whole text for each token, also if a KV cache is asked for, and shows no scores; TransformerLens 4
    shows its pattern before its result, version 3 after."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    shape = {"d_model": 64, "d_head": 8, "n_heads": 8, "n_layers": 2, "n_ctx": 64, "d_vocab": zoo.VOCAB, "d_mlp": 96}
    names = {"act_fn": "gelu", "normalization_type": "LN", "positional_embedding_type": "rotary"}
    model = TransformerBridge.boot_native(TransformerBridgeConfig(**shape, **names, rotary_dim=8, seed=0))
    with torch.no_grad():
        for where in ({}, {"heads": [1, 6]}):
            hooks = {**TOOLS, **FITTED}[tool](model, **where)
            with model.hooks(fwd_hooks=hooks):
                text = one_by_one(model, TEXTS[:, :START])
                for cached in (True, False):
                    assert torch.equal(model.generate(TEXTS[:, :START], use_past_kv_cache=cached, **OPTIONS), text)
            whole = [model.run_with_hooks(text, fwd_hooks=hooks) for _ in range(2)]
            assert (whole[0] - model(text)).abs().max() > 0.01
            assert torch.equal(*whole)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_a_prompt_of_one_token(kind: str, name: str, shared_model: Any) -> None:
    """A fit then begins with a single score, of which no part can be dropped."""
    model, prompt = shared_model(kind, name), TEXTS[:1, :1]
    for make in FITTED.values():
        with torch.no_grad(), model.hooks(fwd_hooks=make(model)):
            close(model(prompt)[0, 0], model(TEXTS[:1, :2])[0, 0])
            assert model.generate(prompt, use_past_kv_cache=False, **OPTIONS).shape == (1, 6)
