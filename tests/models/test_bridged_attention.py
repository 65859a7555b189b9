"""Layers of a bridge that show their scores: the description gives them, and frequencies are Hugging Face's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.readings import assert_described
from torch import Tensor

from tl_posdisent import capture, read_model

TOKENS = zoo.random_tokens()
HIDDEN = {"gptj", "gemma4", "gemma4-shared", "opt", "gpt_neo", "llama4", "afmoe", "laguna", "nanochat"}
HIDDEN |= {"olmo-hybrid", "jamba"}
LATENT = {"deepseek_v3", "deepseek_v2", "glm4-lite", "youtu"}
BIASED = {"bloom", "mpt"}
SHOWN = [name for name in (*zoo.BRIDGE_NAMES, *zoo.HYBRID_NAMES) if name not in HIDDEN | LATENT | BIASED]
SHOWN.sort(key="llama-gqa".__ne__)  # the fast one first


@pytest.mark.parametrize("name", zoo.names(*SHOWN))
def test_scores_are_those_of_the_description(name: str, shared_model: Any) -> None:
    assert_described(shared_model("bridge", name), TOKENS)


def own_frequencies(model: Any, layer: int) -> Tensor:
    """What Hugging Face's model rotates a layer by."""
    module, kinds = model.model.rotary_emb, getattr(model.config, "layer_types", None) or [""] * (layer + 1)
    return getattr(module, f"{kinds[layer]}_inv_freq", getattr(module, "inv_freq", None))


@pytest.mark.parametrize("name", zoo.names("gemma3", "llama-yarn", "llama3", "glm", "smollm3"))
def test_frequencies_are_hugging_faces(name: str, shared_model: Any) -> None:
    hf = zoo.hf_model(name)
    for spec in read_model(shared_model("bridge", name)).specs():
        if (name, spec.layer) == ("smollm3", 1):
            assert spec.rotary is None
            continue
        assert torch.equal(spec.rotary.frequencies, own_frequencies(hf, spec.layer).double())
        assert spec.rotary.pairing == ("adjacent" if name == "glm" else "half")


def test_what_was_changed_in_place_is_read() -> None:
    model = zoo.bridge("llama-gqa")
    assert [spec.rotary.base for spec in assert_described(model, TOKENS)] == pytest.approx([500, 500], rel=1e-4)
    module = model.original_model.model.rotary_emb.original_component
    module.inv_freq.copy_(50_000.0 ** (-torch.arange(4) / 4))
    module.attention_scaling = 1.3
    for block in model.blocks:
        block.attn.original_component.scaling = 0.2
    specs = assert_described(model, TOKENS)
    assert [spec.rotary.base for spec in specs] == pytest.approx([50_000, 50_000], rel=1e-4)
    assert [(spec.rotary.attention_factor, spec.scale) for spec in specs] == [(1.3, 0.2)] * 2


def test_keys_that_are_multiplied(shared_model: Any) -> None:
    assert_described(zoo.bridge("falcon-h1", key_multiplier=0.4), TOKENS)


PROBLEMS = {"bloom": "additive bias such as ALiBi", "Olmo": "clips its queries and keys"}
if zoo.TL_MAJOR >= 4:
    PROBLEMS["HunYuanDenseV1"] = "normalises its queries and keys after the rotation"


@pytest.mark.parametrize("name", PROBLEMS)
def test_scores_that_are_no_product_are_shown_and_named(name: str) -> None:
    if name in zoo.NAMES:
        model = zoo.bridge(name)
    else:
        more = {"clip_qkv": 0.5} if name == "Olmo" else {"head_dim": 8}
        config = getattr(transformers, f"{name}Config")(
            **copy.deepcopy(zoo.ARCHITECTURES["llama-gqa"].arguments) | more
        )
        model = zoo.as_bridge(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    for spec in read_model(model).specs():
        assert PROBLEMS[name] in str(spec.limits.problem)
        assert spec.causal
        assert spec.taps.scores is not None
        with pytest.raises(ValueError, match=rf"layer {spec.layer} of \w+: .*{PROBLEMS[name]}"):
            spec.require_scale()
    with pytest.raises(ValueError, match=PROBLEMS[name]):
        capture(model, TOKENS)
