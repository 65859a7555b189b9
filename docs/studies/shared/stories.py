"""The story model of the documentation: 260 thousand parameters, trained on TinyStories.

The weights lie outside the project, in the folder that the environment variable ``POSDISENT_DATA`` names (default:
``../shared/data`` beside the project).
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tl_posdisent as tp
from shared.texts import data_file

BOS = 1
DIM, HIDDEN, LAYERS, HEADS, KEY_HEADS, VOCAB, CONTEXT = SHAPE = (64, 172, 5, 8, 4, 512, 512)
SIZES = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}


def stories_hf() -> LlamaForCausalLM:
    """The trained model, a fresh copy, eager attention, float32."""
    raw = data_file("stories260K.bin").read_bytes()
    assert struct.unpack_from("<7i", raw) == SHAPE
    numbers, d_head, at = torch.frombuffer(bytearray(raw), dtype=torch.float32, offset=28), DIM // HEADS, 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        at += math.prod(shape)
        return numbers[at - math.prod(shape) : at].view(shape)

    def half_split(rows: Tensor) -> Tensor:
        """From rotary pairs (0, 1), (2, 3), … to Hugging Face's pairs (c, c + d_head/2)."""
        return rows.view(LAYERS, -1, d_head // 2, 2, DIM).transpose(2, 3).reshape(rows.shape)

    embedding = take(VOCAB, DIM)
    stacked = {  # in the order of the file, every array for all layers in turn
        "input_layernorm": take(LAYERS, DIM),
        "self_attn.q_proj": half_split(take(LAYERS, DIM, DIM)),
        "self_attn.k_proj": half_split(take(LAYERS, KEY_HEADS * d_head, DIM)),
        "self_attn.v_proj": take(LAYERS, KEY_HEADS * d_head, DIM),
        "self_attn.o_proj": take(LAYERS, DIM, DIM),
        "post_attention_layernorm": take(LAYERS, DIM),
        "mlp.gate_proj": take(LAYERS, HIDDEN, DIM),
        "mlp.down_proj": take(LAYERS, DIM, HIDDEN),
        "mlp.up_proj": take(LAYERS, HIDDEN, DIM),
    }
    weights = {f"model.layers.{i}.{name}.weight": x[i] for name, x in stacked.items() for i in range(LAYERS)}
    weights |= {"model.norm.weight": take(DIM), "model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    special: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": 2, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(**SIZES, **special, rope_parameters=rope, rms_norm_eps=1e-5, attn_implementation="eager")
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(weights)
    return model


def stories_bridge() -> Any:
    return tp.bridge_from_hf(stories_hf())


_reference = functools.cache(stories_hf)


@torch.no_grad()
def sample_story(length: int, seed: int, temperature: float = 1.0) -> Tensor:
    """``[1, length]``: a text that the model generates, beginning with BOS; a shorter one of the same seed is its
    prefix."""
    generator, cache = torch.Generator().manual_seed(seed), DynamicCache()
    tokens = new = torch.tensor([[BOS]])
    while tokens.shape[1] < length:
        logits = _reference()(new, past_key_values=cache, use_cache=True).logits[:, -1]
        new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
