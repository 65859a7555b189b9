"""Layers that show no scores: pattern and result are those of the queries, keys, values and gate of the description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.readings import assert_described
from support.tolerance import rounding

from tl_posdisent import additivity, capture, dummy_distance, read_model, swap_positions

TOKENS = zoo.random_tokens()
NAMES = ("gemma4", "gptj", "gemma4-shared", "opt", "gpt_neo", "llama4", "afmoe", "laguna", "nanochat", "olmo-hybrid")


@pytest.mark.parametrize("name", zoo.names(*NAMES, "jamba"))
def test_pattern_and_result_are_those_of_the_description(name: str, shared_model: Any) -> None:
    assert_described(shared_model("bridge", name), TOKENS)


def test_layers_of_two_shapes(shared_model: Any) -> None:
    specs = read_model(shared_model("bridge", "gemma4")).specs()
    assert [(spec.window, spec.n_kv_heads, spec.d_head) for spec in specs] == [(5, 4, 8)] * 5 + [(None, 2, 16)]


@pytest.mark.slow
def test_keys_of_another_layer(shared_model: Any) -> None:
    specs = read_model(shared_model("bridge", "gemma4-shared")).specs()
    assert [spec.taps.keys_of for spec in specs] == [None, None, None, 1, 1, 2]


def test_full_attention_is_not_causal() -> None:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96,
        max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    for spec in assert_described(zoo.as_bridge(transformers.BertForMaskedLM(config).eval()), TOKENS):
        assert (spec.causal, spec.window, spec.rotary) == (False, None, None)


@pytest.mark.parametrize(("kv_heads", "positions"), [(4, "standard"), (2, "rotary")])
def test_models_that_transformer_lens_makes_itself(kv_heads: int, positions: Any) -> None:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    options = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "d_mlp": 48}
    options |= {"n_key_value_heads": kv_heads, "positional_embedding_type": positions, "rotary_dim": 8, "seed": 0}
    model = TransformerBridge.boot_native(TransformerBridgeConfig(**options, act_fn="gelu", normalization_type="LN"))
    with torch.no_grad():
        for parameter in model.original_model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    for spec in assert_described(model, TOKENS):
        assert (spec.n_kv_heads, spec.rotary is None) == (kv_heads, positions == "standard")


def test_fused_attention_is_named() -> None:
    model = zoo.bridge("opt", "sdpa")
    for spec in read_model(model).specs():
        assert 'attn_implementation="eager"' in str(spec.limits.problem)
    with pytest.raises(ValueError, match=r"OPTForCausalLM: neither hook_attn_scores nor hook_pattern fires"):
        capture(model, TOKENS)


def test_layers_without_hooks_of_queries_and_keys_are_named() -> None:
    arguments = zoo.ARCHITECTURES["llama-gqa"].arguments | {"kv_channels": 8}
    table = read_model(zoo.as_bridge(transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**arguments)))).to_frame()
    assert not table[["fits", "capture", "rotation", "score_edits", "result_edits"]].to_numpy().any()
    assert table["why_not"].str.contains("no hooks of its queries and keys .*; result_edits: hook_z does not").all()


@pytest.mark.usefixtures("unchecked")
def test_the_text_part_of_a_multimodal_model(shared_model: Any) -> None:
    """Released checkpoints of Gemma 4 also read images: on text, they do what the model of text alone does."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    alone, text = shared_model("bridge", "gemma4"), zoo.hf_model("gemma4")
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    of_images = Gemma4VisionConfig(**small, num_key_value_heads=2)
    parts = {"text_config": text.config, "vision_config": of_images, "audio_config": None}
    config = transformers.Gemma4Config(**parts, tie_word_embeddings=False)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    both = zoo.as_bridge(model)
    for make in (lambda m: swap_positions(m, lambda at: at / 2), lambda m: dummy_distance(m, 3)):
        with torch.no_grad(), both.hooks(fwd_hooks=make(both)), alone.hooks(fwd_hooks=make(alone)):
            torch.testing.assert_close(both(TOKENS), alone(TOKENS), rtol=0, atol=rounding(alone(TOKENS), 48))


@pytest.mark.usefixtures("unchecked")
def test_a_text_of_several_chunks_is_refused() -> None:
    """Llama 4 as released has chunks of 8192 tokens."""
    model, text = zoo.bridge("llama4", floor_scale=1000), zoo.random_tokens(20)
    for tool in (
        lambda: capture(model, text),
        lambda: additivity(model, text, progress=False),
        lambda: model.run_with_hooks(text, fwd_hooks=dummy_distance(model, 3)),
    ):
        with pytest.raises(ValueError, match=r"at most 16 long .* layer 0 of .* rotates, scales or masks longer"):
            tool()
