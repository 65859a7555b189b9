"""A Hugging Face model copied into a `HookedTransformer` (TransformerLens 3), offline.

By `hooked_from_hf`, and for architectures whose configs TransformerLens reads only by a hub name by a config that is
written here, from what the Hugging Face model says of itself. `test_zoo.py` compares the logits of all.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

import transformers

from tl_posdisent.models.loading.load import hooked_from_hf

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer


def build_hooked(model: transformers.PreTrainedModel) -> HookedTransformer:
    """Copy the weights of a Hugging Face model into a `HookedTransformer`; nothing is folded or centred."""
    if type(model).__name__ not in _BY_HAND:
        return hooked_from_hf(model)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    describe, converter = _BY_HAND[type(model).__name__]
    module, function = converter.split(".")
    convert = getattr(importlib.import_module(f"transformer_lens.pretrained.weight_conversions.{module}"), function)
    cfg = HookedTransformerConfig(**_common(model) | describe(model.config))
    with warnings.catch_warnings():
        # "HookedTransformer is deprecated"; that is no news to a test that asks for one.
        warnings.simplefilter("ignore", DeprecationWarning)
        hooked = HookedTransformer(cfg)
    hooked.load_state_dict(hooked.fill_missing_keys(convert(model, cfg)), strict=False)
    return hooked.eval()


def _common(model: transformers.PreTrainedModel) -> dict[str, Any]:
    c = model.config
    d_head, rope = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads, c.rope_parameters
    grouped = c.num_key_value_heads != c.num_attention_heads
    return {
        "d_model": c.hidden_size,
        "n_heads": c.num_attention_heads,
        "d_head": d_head,
        "n_key_value_heads": c.num_key_value_heads if grouped else None,
        "d_mlp": c.intermediate_size,
        "n_layers": c.num_hidden_layers,
        "n_ctx": c.max_position_embeddings,
        "d_vocab": c.vocab_size,
        "original_architecture": type(model).__name__,  # HookedTransformer itself looks at it, for OLMo 2
        "init_weights": False,
        "device": "cpu",
        "default_prepend_bos": False,
        "act_fn": getattr(c, "hidden_activation", None) or c.hidden_act,
        "positional_embedding_type": "rotary",
        "rotary_base": rope.get("rope_theta"),
        "rotary_dim": round(d_head * rope.get("partial_rotary_factor", 1.0)),
        "rotary_adjacent_pairs": False,
    }


def _phi(c: Any) -> dict[str, Any]:
    return {"normalization_type": "LN", "eps": c.layer_norm_eps, "parallel_attn_mlp": True}


def _rms(c: Any) -> dict[str, Any]:
    return {"normalization_type": "RMS", "eps": c.rms_norm_eps, "gated_mlp": True, "final_rms": True}


def _gemma2(c: Any) -> dict[str, Any]:
    """A window of w sees w keys, itself included, in both libraries."""
    return _rms(c) | {
        "n_key_value_heads": c.num_key_value_heads,  # the converter knows grouped heads only
        "use_normalization_before_and_after": True,
        "attn_scale": c.query_pre_attn_scalar**0.5,
        "attn_scores_soft_cap": c.attn_logit_softcapping or -1.0,
        "output_logits_soft_cap": c.final_logit_softcapping or -1.0,
        "use_local_attn": True,
        "window_size": c.sliding_window,
        "attn_types": ["local" if kind == "sliding_attention" else "global" for kind in c.layer_types],
    }


def _gemma3(c: Any) -> dict[str, Any]:
    full, local = (c.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    return _gemma2(c) | {
        "use_qk_norm": True,
        "rotary_base": full["rope_theta"],
        "rotary_base_local": local["rope_theta"],
        "rotary_scaling_factor": full.get("factor", 1.0),  # reaches the full layers only
    }


# Hugging Face class -> how its config reads, and where TransformerLens converts its weights.
_BY_HAND = {
    "PhiForCausalLM": (_phi, "phi.convert_phi_weights"),
    "Olmo2ForCausalLM": (_rms, "olmo2.convert_olmo2_weights"),
    "Gemma2ForCausalLM": (_gemma2, "gemma.convert_gemma_weights"),
    "Gemma3ForCausalLM": (_gemma3, "gemma.convert_gemma_weights"),
}
# The Hugging Face classes that `build_hooked` takes.
CONVERTIBLE = frozenset(_BY_HAND) | {
    *("LlamaForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"),
    *("GptOssForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM", "GPT2LMHeadModel"),
    *("OPTForCausalLM", "BloomForCausalLM"),
}
