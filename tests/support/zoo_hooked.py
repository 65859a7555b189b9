"""A Hugging Face model copied into a `HookedTransformer` (TransformerLens 3) by hand, offline.

`HookedTransformer.from_pretrained` knows models by hub names and fetches their configs; its reading of a
local config ignores the rotary base of NeoX, and YaRN and a head width of its own in Llama. So the config is
written here, from what the Hugging Face model says of itself, and only the renaming of the weights is
TransformerLens's.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


def build_hooked(model: transformers.PreTrainedModel) -> HookedTransformer:
    """Copy the weights of a Hugging Face model into a `HookedTransformer`; nothing is folded or centred."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    module, function = _KINDS[type(model).__name__][1].split(".")
    weights = importlib.import_module(f"transformer_lens.pretrained.weight_conversions.{module}")
    convert = getattr(weights, function)
    cfg = HookedTransformerConfig(**hooked_config(model))
    with warnings.catch_warnings():
        # "HookedTransformer is deprecated"; that is no news to a test that asks for one.
        warnings.simplefilter("ignore", DeprecationWarning)
        hooked = HookedTransformer(cfg)
    hooked.load_state_dict(hooked.fill_missing_keys(convert(model, cfg)), strict=False)
    return hooked.eval()


def hooked_config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """The arguments of the `HookedTransformerConfig` that computes what the Hugging Face model computes."""
    cfg = _shape(model) | _KINDS[type(model).__name__][0](model)
    if cfg.get("positional_embedding_type") == "rotary" and "rotary_dim" not in cfg:
        cfg |= _rotary(model, cfg["d_head"])
    return cfg


def _shape(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config  # transformers maps the names of GPT-2 and others to these
    n_heads = c.num_attention_heads
    n_kv_heads = getattr(c, "num_key_value_heads", None) or n_heads
    return {
        "d_model": c.hidden_size,
        "n_heads": n_heads,
        "d_head": getattr(c, "head_dim", None) or c.hidden_size // n_heads,
        "n_key_value_heads": n_kv_heads if n_kv_heads != n_heads else None,
        "d_mlp": getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        "n_layers": c.num_hidden_layers,
        "n_ctx": getattr(c, "max_position_embeddings", 128),
        "d_vocab": c.vocab_size,
        "original_architecture": type(model).__name__,  # HookedTransformer itself looks at it, for OLMo 2
        "init_weights": False,
        "device": "cpu",
        "default_prepend_bos": False,
    }


def _rotary(model: transformers.PreTrainedModel, d_head: int) -> dict[str, Any]:
    """The flat rotary settings: one base for all layers, and llama3 or YaRN scaling."""
    rope = model.config.rope_parameters
    cfg: dict[str, Any] = {
        "rotary_base": rope["rope_theta"],
        "rotary_dim": round(d_head * rope.get("partial_rotary_factor", 1.0)),
        "rotary_adjacent_pairs": False,
    }
    if rope["rope_type"] == "llama3":
        cfg |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_factor": rope["factor"],
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_original_ctx_len": rope["original_max_position_embeddings"],
        }
    elif rope["rope_type"] == "yarn":
        cfg |= {
            "use_yarn_rope": True,
            "yarn_factor": rope["factor"],
            "yarn_beta_fast": rope["beta_fast"],
            "yarn_beta_slow": rope["beta_slow"],
            "yarn_truncate": rope.get("truncate", True),
            "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
            # Not in the config unless given: Hugging Face derives it from the factor.
            "yarn_attention_factor": model.model.rotary_emb.attention_scaling,
        }
    return cfg


def _windows(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Sliding windows per layer; a window of w sees w keys, itself included, in both libraries."""
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * model.config.num_hidden_layers
    return {
        "use_local_attn": True,
        "window_size": model.config.sliding_window,
        "attn_types": ["local" if kind == "sliding_attention" else "global" for kind in kinds],
    }


def _rms(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config
    return {
        "normalization_type": "RMS",
        "eps": c.rms_norm_eps,
        "act_fn": getattr(c, "hidden_activation", None) or c.hidden_act,
        "gated_mlp": True,
        "final_rms": True,
        "positional_embedding_type": "rotary",
    } | (_windows(model) if getattr(c, "sliding_window", None) else {})


def _qwen2(model: transformers.PreTrainedModel) -> dict[str, Any]:
    # The converter of Qwen 2 and Mistral knows grouped heads only, also where the groups are of one.
    return _rms(model) | {"n_key_value_heads": model.config.num_key_value_heads}


def _qwen3(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return _rms(model) | {"use_qk_norm": True}


def _gemma2(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config
    return _qwen2(model) | {
        "use_normalization_before_and_after": True,
        "attn_scale": c.query_pre_attn_scalar**0.5,
        "attn_scores_soft_cap": c.attn_logit_softcapping or -1.0,
        "output_logits_soft_cap": c.final_logit_softcapping or -1.0,
    }


def _gemma3(model: transformers.PreTrainedModel) -> dict[str, Any]:
    full, local = (model.config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return _gemma2(model) | {
        "use_qk_norm": True,
        "rotary_dim": model.config.head_dim,
        "rotary_base": full["rope_theta"],
        "rotary_base_local": local["rope_theta"],
        "rotary_scaling_factor": full.get("factor", 1.0),  # reaches the full layers only
    }


def _gpt_oss(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config
    return _rms(model) | {
        "use_attention_sinks": True,
        "num_experts": c.num_local_experts,
        "experts_per_token": c.num_experts_per_tok,
    }


def _layer_norm(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config
    eps = getattr(c, "layer_norm_epsilon", None) or getattr(c, "layer_norm_eps", 1e-5)
    act = getattr(c, "activation_function", None) or getattr(c, "hidden_act", None)
    return {"normalization_type": "LN", "eps": eps, "act_fn": act}


def _neox(model: transformers.PreTrainedModel) -> dict[str, Any]:
    parallel = getattr(model.config, "use_parallel_residual", True)  # Phi has no choice
    return _layer_norm(model) | {"positional_embedding_type": "rotary", "parallel_attn_mlp": parallel}


def _gptj(model: transformers.PreTrainedModel) -> dict[str, Any]:
    rotary = {"rotary_dim": model.config.rotary_dim, "rotary_base": 10000, "rotary_adjacent_pairs": True}
    return _neox(model) | rotary


def _gpt_neo(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return _layer_norm(model) | {
        "use_attn_scale": False,  # GPT-Neo does not divide its scores by sqrt(d_head)
        "use_local_attn": True,
        "window_size": model.config.window_size,
        "attn_types": model.config.attention_layers,
    }


def _opt(model: transformers.PreTrainedModel) -> dict[str, Any]:
    return _layer_norm(model) | {"d_mlp": model.config.ffn_dim}


def _bloom(model: transformers.PreTrainedModel) -> dict[str, Any]:
    alibi = {"positional_embedding_type": "alibi", "post_embedding_ln": True}
    return _layer_norm(model) | alibi | {"act_fn": "gelu_fast"}  # Bloom has its own GELU, by tanh


# Hugging Face class -> how its config reads, and where TransformerLens converts its weights.
_KINDS = {
    "LlamaForCausalLM": (_rms, "llama.convert_llama_weights"),
    "Phi3ForCausalLM": (_rms, "phi3.convert_phi3_weights"),
    "Olmo2ForCausalLM": (_rms, "olmo2.convert_olmo2_weights"),
    "Qwen2ForCausalLM": (_qwen2, "qwen2.convert_qwen2_weights"),
    "MistralForCausalLM": (_qwen2, "mistral.convert_mistral_weights"),
    "Qwen3ForCausalLM": (_qwen3, "qwen3.convert_qwen3_weights"),
    "Gemma2ForCausalLM": (_gemma2, "gemma.convert_gemma_weights"),
    "Gemma3ForCausalLM": (_gemma3, "gemma.convert_gemma_weights"),
    "GptOssForCausalLM": (_gpt_oss, "openai.convert_gpt_oss_weights"),
    "GPTNeoXForCausalLM": (_neox, "neox.convert_neox_weights"),
    "PhiForCausalLM": (_neox, "phi.convert_phi_weights"),
    "GPTJForCausalLM": (_gptj, "gptj.convert_gptj_weights"),
    "GPTNeoForCausalLM": (_gpt_neo, "neo.convert_neo_weights"),
    "GPT2LMHeadModel": (_layer_norm, "gpt2.convert_gpt2_weights"),
    "OPTForCausalLM": (_opt, "opt.convert_opt_weights"),
    "BloomForCausalLM": (_bloom, "bloom.convert_bloom_weights"),
}
CONVERTIBLE = frozenset(_KINDS)  # the Hugging Face classes that `build_hooked` takes
