"""Models whose attention Hugging Face computes: the text part of a model that sees, and texts of several chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.tolerance import rounding

from tl_posdisent import additivity, capture, dummy_distance, read_model, swap_positions

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = zoo.random_tokens()


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
    short = zoo.bridge("llama4", attention_chunk_size=6)
    assert all("holds for texts of at most 6 tokens" in str(s.limits.problem) for s in read_model(short).specs()[:3])
    with pytest.raises(ValueError, match=r"dummy_distance needs .* its mask holds for texts of at most 6 tokens"):
        dummy_distance(short, 3)
