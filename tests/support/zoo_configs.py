"""The tiny architectures: one Hugging Face model class, its config class and the config's arguments per name.

Every model has two or three layers, width 64, eight query heads, and a vocabulary of 61 tokens. Windows, soft
caps and rotary scalings are so small that they change the logits of twelve tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 61
N_CTX = 128
D_MODEL = 64
N_HEADS = 8


@dataclass(frozen=True)
class Architecture:
    """A tiny Hugging Face causal language model: class names in `transformers` and the config's arguments."""

    model: str
    config: str
    arguments: dict[str, Any] = field(default_factory=dict)
    rotary: bool = True  # rotates its queries and keys in at least one layer
    scale: float = 0.2  # standard deviation of the weight matrices
    embedding: float = 0.7  # standard deviation of the embeddings; small beside what attention adds to them
    hybrid: bool = False  # mixes attention with other layers: those with odd numbers attend, or all beside the other


def _modern(**more: Any) -> dict[str, Any]:
    """Arguments with Llama's names, which most architectures share."""
    shape = {"vocab_size": VOCAB, "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": N_HEADS}
    shape |= {"intermediate_size": 96, "max_position_embeddings": N_CTX, "tie_word_embeddings": False}
    return shape | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | more


def _gpt2_style(**more: Any) -> dict[str, Any]:
    """Arguments with GPT-2's names, without dropout."""
    shape = {"vocab_size": VOCAB, "n_embd": D_MODEL, "n_layer": 2, "n_head": N_HEADS, "n_positions": N_CTX}
    return shape | {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2} | more


def _rope(theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


def _grouped(**more: Any) -> dict[str, Any]:
    """Two queries to a key, and rotation."""
    return _modern(num_key_value_heads=4, rope_parameters=_rope()) | more


def _of(family: str, arguments: dict[str, Any], config: str = "", **traits: Any) -> Architecture:
    return Architecture(f"{family}ForCausalLM", config or f"{family}Config", arguments, **traits)


# With 8 dimensions and theta 500 the wavelengths are 6, 30, 140 and 664 positions. With a training length of
# 16, llama3 scaling blends the first and stretches all others, YaRN leaves the first and stretches the rest
# by degrees; so both change the scores within a dozen tokens. (The factors are N_CTX / 16.)
_TRAINED = {"factor": 8.0, "original_max_position_embeddings": 16}
_LLAMA3 = _rope(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_TRAINED)
_YARN = _rope(rope_type="yarn", beta_fast=2.0, beta_slow=0.1, **_TRAINED)

# NeoX, Phi, GLM and StableLM rotate a part of every head. A head of 8 dimensions with a quarter rotated has a
# single subspace, for which theta means nothing; hence the wider heads of `neox`, and the half of the others.
_NEOX_WIDE = _modern(hidden_size=128, rope_parameters=_rope(partial_rotary_factor=0.25))
_NEOX_HALF = _modern(rope_parameters=_rope(10000.0, partial_rotary_factor=0.5))
_HALF = _rope(partial_rotary_factor=0.5)
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Every other layer attends. Qwen3-Next and Qwen3.5 also gate what attention gathers, and rotate a quarter of each head.
_HYBRID = _modern(num_hidden_layers=4, num_key_value_heads=4)
_DELTA = _HYBRID | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 16, "layer_types": ["linear_attention", _FULL] * 2},
}
# As Qwen3.5 is released: one position for each axis of an image. TransformerLens then leaves positions to the model,
# which counts padding before a text.
_BY_AXES = _rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
_EXPERTS |= {"shared_expert_intermediate_size": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_GEMMA = _modern(num_key_value_heads=4, head_dim=16, query_pre_attn_scalar=24, sliding_window=5)
# The cap of 3 bites: random scores here have a standard deviation of about 3.
_CAPPED = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}
_BY_LAYER = {_SLIDING: _rope(100.0), _FULL: _rope(5000.0, rope_type="linear", factor=2.0)}
_QUARTER = _rope(5000.0, rope_type="proportional", partial_rotary_factor=0.25)
_PROPORTIONAL = {_SLIDING: _rope(100.0), _FULL: _QUARTER}
_LATENT = {
    **{"num_key_value_heads": N_HEADS, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12},
    **{"qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_LATENT_YARN = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}  # the latter is in the scale of scores
_WITHOUT_MLP = {k: v for k, v in _modern().items() if k != "intermediate_size"}  # of another name
_BARE = {"vocab_size": VOCAB, "tie_word_embeddings": False}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _of("Llama", _modern(rope_parameters=_rope())),
    "llama-gqa": _of("Llama", _grouped()),
    "llama-mqa": _of("Llama", _grouped(num_key_value_heads=1)),
    "llama3": _of("Llama", _grouped(rope_parameters=_LLAMA3)),
    "llama-yarn": _of("Llama", _grouped(rope_parameters=_YARN)),
    "neox": _of("GPTNeoX", _NEOX_WIDE, scale=0.14),
    "neox-half": _of("GPTNeoX", _NEOX_HALF),
    "gptj": _of("GPTJ", _gpt2_style(rotary_dim=4)),
    "codegen": _of("CodeGen", _gpt2_style(n_ctx=N_CTX, rotary_dim=4)),
    "phi": _of("Phi", _modern(rope_parameters=_HALF)),
    "phi3": _of("Phi3", _grouped()),
    "qwen2": _of("Qwen2", _grouped()),
    "qwen3": _of("Qwen3", _grouped(head_dim=16)),
    "mistral": _of("Mistral", _grouped(sliding_window=6)),
    "gemma2": _of(
        "Gemma2",
        _GEMMA | _CAPPED | {"layer_types": [_SLIDING, _FULL], "rope_parameters": _rope()},
        embedding=0.09,  # Gemma multiplies its embeddings by sqrt(64)
    ),
    # Each kind of layer has its own base, and the full ones a linear scaling, as in the larger Gemma 3.
    "gemma3": _of(
        "Gemma3",
        _GEMMA | {"num_hidden_layers": 3, "layer_types": [_SLIDING, _SLIDING, _FULL], "rope_parameters": _BY_LAYER},
        "Gemma3TextConfig",
        embedding=0.09,
    ),
    # As Gemma 4 31B: five windows to one full layer, which has larger heads, fewer keys, values that are its normalised
    # keys, and rotates a quarter of each head by the frequencies of a whole one.
    "gemma4": _of(
        "Gemma4",
        {name: x for name, x in _GEMMA.items() if name != "query_pre_attn_scalar"}
        | {"num_hidden_layers": 6, "layer_types": [*[_SLIDING] * 5, _FULL], "attention_k_eq_v": True}
        | {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
        | {"final_logit_softcapping": 10.0, "rope_parameters": _PROPORTIONAL},
        "Gemma4TextConfig",
        embedding=0.09,
    ),
    # As Gemma 4 E2B: the last layers attend to keys and values of the last layer of their kind before them, and each
    # layer also gets an embedding of its own of each token.
    "gemma4-shared": _of(
        "Gemma4",
        {name: x for name, x in _GEMMA.items() if name != "query_pre_attn_scalar"}
        | {"num_hidden_layers": 6, "layer_types": [_SLIDING, _SLIDING, _FULL] * 2, "num_kv_shared_layers": 3}
        | {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 1, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "rope_parameters": _PROPORTIONAL},
        "Gemma4TextConfig",
        embedding=0.09,
    ),
    "falcon": _of(
        "Falcon",
        _WITHOUT_MLP
        | {"ffn_hidden_size": 96, "alibi": False, "multi_query": True, "new_decoder_architecture": False}
        | {"rope_parameters": _rope()},
    ),
    "glm": _of("Glm", _grouped(head_dim=8, rope_parameters=_HALF)),
    "cohere": _of("Cohere", _grouped()),
    "olmo2": _of("Olmo2", _modern(rope_parameters=_rope())),
    "olmo2-gqa": _of("Olmo2", _grouped()),
    "stablelm": _of("StableLm", _grouped(rope_parameters=_HALF)),
    "smollm3": _of("SmolLM3", _grouped(no_rope_layers=[1, 0])),  # rotates in the first layer and not in the second
    "gpt_oss": _of(
        "GptOss",
        _grouped(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
        | {"layer_types": [_SLIDING, _FULL], "rope_parameters": _YARN | {"truncate": False}},
    ),
    "deepseek_v3": _of("DeepseekV3", _grouped() | _LATENT),
    # A rotation by complex numbers, which passes no hook, and queries without a latent.
    "deepseek_v2": _of("DeepseekV2", _grouped() | _LATENT | {"q_lora_rank": None}),
    "glm4-lite": _of("Glm4MoeLite", _grouped(rope_parameters=_LATENT_YARN) | _LATENT),
    "youtu": _of("Youtu", _grouped() | _LATENT | {"rope_interleave": False}),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", _gpt2_style(), rotary=False),
    "bloom": _of("Bloom", _BARE | {"hidden_size": D_MODEL, "n_layer": 2, "n_head": N_HEADS}, rotary=False),
    "mpt": _of(
        "Mpt", _BARE | {"d_model": D_MODEL, "n_layers": 2, "n_heads": N_HEADS, "max_seq_len": N_CTX}, rotary=False
    ),
    "opt": _of("OPT", _WITHOUT_MLP | {"ffn_dim": 96, "word_embed_proj_dim": D_MODEL}, rotary=False),
    "gpt_neo": _of(
        "GPTNeo",
        _BARE
        | {"hidden_size": D_MODEL, "num_layers": 2, "num_heads": N_HEADS, "max_position_embeddings": N_CTX}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 5, "bos_token_id": 1, "eos_token_id": 2},
        rotary=False,
        scale=0.12,  # it does not divide its scores by sqrt(d_head)
    ),
    # As Llama 4 Scout: three layers in chunks with rotation to one without, which scales its queries by their position.
    "llama4": _of(
        "Llama4",
        _grouped(num_hidden_layers=4, head_dim=8, no_rope_layers=[1, 1, 1, 0], attention_chunk_size=16, floor_scale=16)
        | {"attn_temperature_tuning": True, "attn_scale": 0.5, "use_qk_norm": True}
        | {"intermediate_size_mlp": 96, "num_local_experts": 2},
        "Llama4TextConfig",
    ),
    "afmoe": _of(
        "Afmoe",
        _grouped(num_hidden_layers=4, head_dim=8, layer_types=[*[_SLIDING] * 3, _FULL], sliding_window=5)
        | {"num_experts": 2, "num_experts_per_tok": 1, "num_shared_experts": 1, "num_dense_layers": 1}
        | {"moe_intermediate_size": 32},
    ),
    "laguna": _of(
        "Laguna",
        _grouped(head_dim=8, layer_types=[_SLIDING, _FULL], sliding_window=5, num_experts=2, num_experts_per_tok=1)
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {"rope_parameters": {_SLIDING: _rope(100.0), _FULL: _rope(5000.0, partial_rotary_factor=0.5)}},
    ),
    "nanochat": _of("NanoChat", _grouped(head_dim=8)),
    "lfm2": _of("Lfm2", _HYBRID | {"layer_types": ["conv", _FULL] * 2, "block_multiple_of": 8}, hybrid=True),
    "qwen3-next": _of("Qwen3Next", _DELTA | _EXPERTS, hybrid=True),
    "qwen3.5": _of("Qwen3_5", _DELTA | {"rope_parameters": _BY_AXES}, "Qwen3_5TextConfig", hybrid=True),
    "olmo-hybrid": _of(
        "OlmoHybrid",
        _HYBRID | {"layer_types": ["linear_attention", _FULL] * 2, "rope_parameters": _rope()},
        hybrid=True,
    ),
    "jamba": _of(
        "Jamba",
        _HYBRID
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2}
        | {"num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
        rotary=False,
        hybrid=True,
    ),
    "bamba": _of("Bamba", _HYBRID | _MAMBA | {"mamba_d_head": 16, "attn_layer_indices": [1, 3]}, hybrid=True),
    "falcon-h1": _of(
        "FalconH1",
        _modern(num_key_value_heads=4, head_dim=8) | _MAMBA | {"mamba_d_ssm": 64, "mamba_d_head": 8},
        hybrid=True,
    ),
}


MECHANISMS = {
    "llama-gqa": "rotation in halves, grouped queries",
    "gptj": "rotation of neighbours, partial",
    "gemma2": "soft cap, window",
    "olmo2": "QK-norm",
    "llama-yarn": "attention factor",
    "gpt_oss": "attention sinks",
    "deepseek_v3": "latent attention",
    "bloom": "additive bias",
    "gpt2": "learned positions",
    "lfm2": "layers without attention",
    "gemma4": "scores and values that have no hook of TransformerLens, layers of two shapes",
}
"""Architectures, and the mechanism of attention that each adds.

A law is tried on the architectures that add a mechanism to it: `zoo.cases` marks the first one as fast and the others
as slow. All architectures, in both classes, are tried with attention summed by hand, which makes the table of support
(`tests/laws/test_attention_by_hand.py`), and with those laws to which each adds something: how it is read
(`zoo.every_case`), and which of its weights make queries and keys.
"""
