"""Architectures of GGUF files: translate a file's metadata to a transformers configuration."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tl_posdisent.models.loading.gguf_file import GgufFile, StoredTensor
from tl_posdisent.models.loading.gguf_metadata import Stated
from tl_posdisent.utils.validation import printable, shown

DIVISORS = "rope_freqs.weight"  # divisors of rotary frequencies; Llama 3 files store these instead of four parameters
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_BASE = 10000.0  # if a file states none: the default of llama.cpp and of transformers' configurations


@dataclass(frozen=True)
class Plan:
    """Names of a transformers model class and of its configuration class, and the configuration's arguments."""

    model: str
    config: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Sizes:
    """Sizes that all architectures state, checked against the shapes of the file's tensors."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    context: int
    vocabulary: int
    attending: list[bool] | None
    tensors: Mapping[str, StoredTensor]

    def has(self, name: str) -> bool:
        return name in self.tensors


def _tensor(tensors: Mapping[str, StoredTensor], name: str, dimensions: int) -> StoredTensor:
    found = tensors.get(name)
    if found is None or len(found.shape) != dimensions:
        raise ValueError(f"it has no tensor {name} of {dimensions} dimensions")
    return found


def _sizes(stated: Stated, tensors: Mapping[str, StoredTensor]) -> _Sizes:
    vocabulary, hidden = _tensor(tensors, "token_embd.weight", 2).shape
    blocks = 1 + max((int(found[1]) for found in map(_BLOCK.match, tensors) if found), default=-1)
    layers, width = stated.integer("block_count"), stated.integer("embedding_length")
    if layers != blocks:
        raise stated.wrong("block_count", layers, f"{blocks}, as there are blocks of tensors")
    if width != hidden:
        raise stated.wrong("embedding_length", width, f"{hidden}, the width of the embedding")
    stated.must_be("vocab_size", vocabulary, "the number of rows of the embedding")
    attending = stated.attending() if stated.architecture == "lfm2" else None
    heads = stated.integer("attention.head_count")
    kv_heads = stated.integer("attention.head_count_kv", heads)
    head = stated.integer("attention.key_length", None)
    if (head is None and hidden % heads) or heads % kv_heads:
        of_keys = f"{stated.named('attention.head_count_kv')}, {kv_heads}"
        raise stated.wrong("attention.head_count", heads, f"a divisor of {hidden} and a multiple of {of_keys},")
    head = hidden // heads if head is None else head
    rows = {"attn_q": heads, "attn_k": kv_heads, "attn_v": kv_heads, "attn_qkv": heads + 2 * kv_heads}
    for name, held in tensors.items():
        n = rows.get(name.removesuffix(".weight").rpartition(".")[2])
        if name.endswith(".weight") and n is not None and held.shape[0] != n * head:
            given = {"head_count": heads, "head_count_kv": kv_heads, "key_length": head}
            listed = ", ".join(f"{stated.named(f'attention.{key}')} {value}" for key, value in given.items())
            raise ValueError(f"{listed} do not match the {held.shape[0]} rows of {printable(name)}")
    stated.must_be("attention.value_length", head, "the size of heads of queries and keys")
    context = stated.integer("context_length")
    return _Sizes(layers, hidden, heads, kv_heads, head, context, vocabulary, attending, tensors)


def _width(stated: Stated, sizes: _Sizes, down: str = "ffn_down", key: str = "feed_forward_length") -> int:
    """Return the stated width of the MLP, checked against a tensor."""
    held = sizes.tensors.get(f"blk.0.{down}.weight")
    width: int = stated.integer(key)
    if held is not None and held.shape[-1] != width:
        raise stated.wrong(key, width, f"{held.shape[-1]}, the width of blk.0.{down}.weight")
    return width


def _plain_head(stated: Stated, sizes: _Sizes) -> None:
    if sizes.head * sizes.heads != sizes.hidden:
        raise stated.wrong("attention.key_length", sizes.head, "embedding_length / head_count for this architecture")


def _usual_scale(stated: Stated, sizes: _Sizes) -> None:
    stated.must_be("attention.scale", sizes.head**-0.5, "as scores are divided by the square root of the head size")


# --- rotary position embedding ----------------------------------------------------------------------------------


def _rope(
    stated: Stated, sizes: _Sizes, *, part: bool = False, base: float | None = None, linear: bool = True
) -> dict[str, Any]:
    """Return the configuration's ``rope_parameters``.

    Args:
        part: whether only a part of each head may be rotated.
        base: rotary base for architectures whose files never state one.
        linear: whether transformers supports linear scaling of the frequencies for this architecture.
    """
    theta = stated.number("rope.freq_base", base)
    if theta is None:
        theta = _DEFAULT_BASE
        warnings.warn(
            f"the file does not state {stated.named('rope.freq_base')}: {theta:g}, the default of the format, is taken",
            stacklevel=2,
        )
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    key = "rope.dimension_count"
    if part:
        n = stated.integer(key, most=sizes.head)
        found["partial_rotary_factor"] = n / sizes.head
        if n % 2 or int(sizes.head * found["partial_rotary_factor"]) != n:
            raise stated.wrong(key, n, f"an even number up to {sizes.head}")
    else:
        stated.must_be(key, sizes.head, "the size of a head, which is rotated whole in this architecture")
    if sizes.head % 2:
        raise ValueError(f"heads of size {sizes.head} cannot be rotated: {stated.named(key)} must be even")
    scaling = _scaling(stated, sizes, linear)
    return found | scaling


def _scaling(stated: Stated, sizes: _Sizes, linear: bool) -> dict[str, Any]:
    """Return the scaling of rotary frequencies: by one factor (linear), by a tensor of divisors (Llama 3), or none."""
    kind = stated.text("rope.scaling.type", None)
    factor, older = stated.number("rope.scaling.factor", None), stated.number("rope.scale_linear", None)
    if older is not None and factor is not None and older != factor:
        raise stated.wrong("rope.scale_linear", older, f"rope.scaling.factor, which is {factor}")
    factor = older if factor is None else factor
    if kind not in (None, "none", "linear") or (kind == "linear" and not linear):
        kinds = "'none' or 'linear'" if linear else "'none'"
        raise stated.wrong("rope.scaling.type", kind, f"{kinds} for this architecture; others are not read")
    if kind == "linear" and factor is None:
        named = stated.named("rope.scaling.type")
        raise ValueError(f"it does not state {stated.named('rope.scaling.factor')}, which {named} 'linear' needs")
    if not linear and factor not in (None, 1.0):
        key = "rope.scaling.factor" if older is None else "rope.scale_linear"
        raise stated.wrong(key, factor, "1 for this architecture, of which no other is read")
    if kind == "none" and factor not in (None, 1.0):
        raise stated.wrong("rope.scaling.factor", factor, "1 where rope.scaling.type is 'none'")
    if sizes.has(DIVISORS) and stated.architecture == "llama":
        if factor not in (None, 1.0):
            raise stated.wrong("rope.scaling.factor", factor, f"1 beside the tensor {DIVISORS}")
        divisors = sizes.tensors[DIVISORS].numbers()
        if divisors.shape != (sizes.head // 2,) or not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ValueError(f"the tensor {DIVISORS} must hold {sizes.head // 2} finite numbers above 0")
        return _LLAMA3 | {"factor": float(divisors.max()), "original_max_position_embeddings": 8192}
    return {} if factor in (None, 1.0) and kind != "linear" else {"rope_type": "linear", "factor": factor}


# --- the architectures ------------------------------------------------------------------------------------------


def _common(stated: Stated, sizes: _Sizes, width: int) -> dict[str, Any]:
    """Return the arguments that most configurations share."""
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.context,
    }


def _modern(stated: Stated, sizes: _Sizes, **rope: Any) -> dict[str, Any]:
    """Return the arguments of Llama and of models with the same names: RMSNorm, rotation, heads of any size."""
    _usual_scale(stated, sizes)
    return _common(stated, sizes, _width(stated, sizes)) | {
        "rms_norm_eps": stated.number("attention.layer_norm_rms_epsilon"),
        "head_dim": sizes.head,
        "rope_parameters": _rope(stated, sizes, **rope),
    }


def _llama(stated: Stated, sizes: _Sizes) -> Plan:
    """Plan a Llama, or a Mistral: its files state this architecture too, and a sliding window tells them apart."""
    arguments, window = _modern(stated, sizes), stated.window(None)
    if window is not None:
        return Plan("MistralForCausalLM", "MistralConfig", arguments | {"sliding_window": window})
    arguments["attention_bias"] = sizes.has("blk.0.attn_output.bias")
    arguments["mlp_bias"] = sizes.has("blk.0.ffn_down.bias")
    return Plan("LlamaForCausalLM", "LlamaConfig", arguments)


def _windows(stated: Stated, sizes: _Sizes) -> dict[str, Any]:
    """Return the sliding windows of Qwen: if the file states one, it is in all layers, unless it states a pattern."""
    window = stated.window(None)
    if window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    sliding = stated.sliding_layers(sizes.layers, 0)
    kinds = [_SLIDING if here else _FULL for here in sliding]
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}


def _qwen(name: str, stated: Stated, sizes: _Sizes) -> Plan:
    arguments = _modern(stated, sizes) | _windows(stated, sizes)
    if name == "Qwen3":
        arguments["attention_bias"] = sizes.has("blk.0.attn_q.bias")
    return Plan(f"{name}ForCausalLM", f"{name}Config", arguments)


def _qwen_moe(name: str, stated: Stated, sizes: _Sizes) -> Plan:
    """Plan a Qwen with experts in all layers; only Qwen 2 has a shared one, only Qwen 3 renormalises their weights."""
    n = stated.integer("expert_count")
    if (held := _tensor(sizes.tensors, "blk.0.ffn_down_exps.weight", 3).shape[0]) != n:
        raise stated.wrong("expert_count", n, f"{held}, as blk.0.ffn_down_exps.weight has")
    arguments = _modern(stated, sizes) | _windows(stated, sizes)
    arguments |= {"num_experts": n, "num_experts_per_tok": stated.integer("expert_used_count", most=n)}
    arguments["moe_intermediate_size"] = _width(stated, sizes, "ffn_down_exps", "expert_feed_forward_length")
    if name == "Qwen2Moe":
        shared = _width(stated, sizes, "ffn_down_shexp", "expert_shared_feed_forward_length")
        arguments["shared_expert_intermediate_size"] = shared
    norm = name == "Qwen3Moe"
    stated.must_be("expert_weights_norm", norm, "as this architecture has it")
    stated.must_be("expert_weights_scale", 1.0, "as this architecture has it")
    stated.must_be("expert_gating_func", 1, "softmax, as this architecture has it")
    arguments |= {"norm_topk_prob": norm, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return Plan(f"{name}ForCausalLM", f"{name}Config", arguments)


def _phi3(stated: Stated, sizes: _Sizes) -> Plan:
    window = {"sliding_window": stated.window()}  # 0 means none; older files of models with a window lack the key
    return Plan("Phi3ForCausalLM", "Phi3Config", _modern(stated, sizes, part=True, linear=False) | window)


def _gemma(stated: Stated, sizes: _Sizes, period: int) -> dict[str, Any]:
    """Return the arguments of Gemma 2 and 3. Files state the scale of scores only if it is not that of small models."""
    scale = stated.number("attention.scale", None)
    if scale is None and sizes.head != 256:
        raise ValueError(
            f"it does not state {stated.named('attention.scale')}, so not by what the scores of heads of size "
            f"{sizes.head} are divided"
        )
    scalar = 256.0 if scale is None else scale**-2
    if not math.isclose(scalar, round(scalar), rel_tol=1e-5):
        raise stated.wrong("attention.scale", scale, "1 / √n with an integer n")
    sliding = stated.sliding_layers(sizes.layers, period)
    return _common(stated, sizes, _width(stated, sizes)) | {
        "rms_norm_eps": stated.number("attention.layer_norm_rms_epsilon"),
        "head_dim": sizes.head,
        "query_pre_attn_scalar": round(scalar),
        "sliding_window": stated.integer("attention.sliding_window"),
        "layer_types": [_SLIDING if here else _FULL for here in sliding],
    }


def _gemma2(stated: Stated, sizes: _Sizes) -> Plan:
    caps = {key: stated.cap(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    rope = {"rope_parameters": _rope(stated, sizes, base=_DEFAULT_BASE)}
    return Plan("Gemma2ForCausalLM", "Gemma2Config", _gemma(stated, sizes, 2) | caps | rope)


def _gemma3(stated: Stated, sizes: _Sizes) -> Plan:
    caps = {key: stated.cap(key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    full = _rope(stated, sizes, base=stated.number("rope.freq_base"))
    local = {"rope_type": "default", "rope_theta": stated.number("rope.freq_base_swa", _DEFAULT_BASE)}
    rope = {"rope_parameters": {_SLIDING: local, _FULL: full}}
    return Plan("Gemma3ForCausalLM", "Gemma3TextConfig", _gemma(stated, sizes, 6) | caps | rope)


def _stablelm(stated: Stated, sizes: _Sizes) -> Plan:
    """Plan a StableLM. With a second norm, the MLP follows attention, whatever the file states about parallel blocks.

    Converters write True for models that do not state it.
    """
    _plain_head(stated, sizes)
    _usual_scale(stated, sizes)
    parallel = not sizes.has("blk.0.ffn_norm.weight")
    if parallel:
        stated.must_be("use_parallel_residual", True, "as blocks have one norm each")
    stated.leave_out("use_parallel_residual")
    return Plan(
        "StableLmForCausalLM",
        "StableLmConfig",
        _common(stated, sizes, _width(stated, sizes))
        | {
            "layer_norm_eps": stated.number("attention.layer_norm_epsilon"),
            "rope_parameters": _rope(stated, sizes, part=True, base=_DEFAULT_BASE),
            "use_qkv_bias": sizes.has("blk.0.attn_q.bias"),
            "use_parallel_residual": parallel,
        },
    )


def _starcoder2(stated: Stated, sizes: _Sizes) -> Plan:
    _plain_head(stated, sizes)
    _usual_scale(stated, sizes)
    own = {
        "norm_epsilon": stated.number("attention.layer_norm_epsilon"),
        "rope_parameters": _rope(stated, sizes),
        "use_bias": sizes.has("blk.0.attn_q.bias"),
        "sliding_window": stated.window(None),
    }
    return Plan("Starcoder2ForCausalLM", "Starcoder2Config", _common(stated, sizes, _width(stated, sizes)) | own)


def _nemotron(stated: Stated, sizes: _Sizes) -> Plan:
    _usual_scale(stated, sizes)
    own = {
        "norm_eps": stated.number("attention.layer_norm_epsilon"),
        "head_dim": sizes.head,
        "rope_parameters": _rope(stated, sizes, part=True),
    }
    return Plan("NemotronForCausalLM", "NemotronConfig", _common(stated, sizes, _width(stated, sizes)) | own)


def _falcon(stated: Stated, sizes: _Sizes) -> Plan:
    """Plan Falcon 7B (one key head), or 11B and 40B (several)."""
    _plain_head(stated, sizes)
    _usual_scale(stated, sizes)
    stated.must_be("use_parallel_residual", True, "as this architecture has it")
    several = sizes.kv_heads > 1
    own = {
        "num_kv_heads": sizes.kv_heads,
        "multi_query": True,
        "new_decoder_architecture": several,
        "num_ln_in_parallel_attn": 2 if sizes.has("blk.0.attn_norm_2.weight") else 1,
        "layer_norm_epsilon": stated.number("attention.layer_norm_epsilon"),
        "rope_parameters": _rope(stated, sizes, base=_DEFAULT_BASE),
    }
    shared = _common(stated, sizes, _width(stated, sizes))
    own["ffn_hidden_size"] = shared.pop("intermediate_size")
    del shared["num_key_value_heads"]
    if not several:
        del own["num_ln_in_parallel_attn"]
    return Plan("FalconForCausalLM", "FalconConfig", shared | own | {"bias": False, "alibi": False})


def _lfm2(stated: Stated, sizes: _Sizes) -> Plan:
    """Plan an LFM 2, a hybrid: layers without key heads are short convolutions."""
    _plain_head(stated, sizes)
    _usual_scale(stated, sizes)
    if sizes.attending is None or len(sizes.attending) != sizes.layers:
        named = stated.named("attention.head_count_kv")
        raise ValueError(f"{named} must be an array of {sizes.layers} numbers, 0 for layers that do not attend")
    length = stated.integer("shortconv.l_cache")
    for name, held in sizes.tensors.items():
        if name.endswith("shortconv.conv.weight") and held.shape[-1] != length:
            raise stated.wrong("shortconv.l_cache", length, f"{held.shape[-1]}, the width of {printable(name)}")
    own = {
        "norm_eps": stated.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(stated, sizes),
        "layer_types": [_FULL if attends else "conv" for attends in sizes.attending],
        "conv_L_cache": length,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    return Plan("Lfm2ForCausalLM", "Lfm2Config", _common(stated, sizes, _width(stated, sizes)) | own)


def _learned(stated: Stated, sizes: _Sizes) -> dict[str, Any]:
    """Return the arguments of architectures without rotation and without grouped heads."""
    _plain_head(stated, sizes)
    _usual_scale(stated, sizes)
    if sizes.kv_heads != sizes.heads:
        raise stated.wrong("attention.head_count_kv", sizes.kv_heads, f"{sizes.heads}, the number of heads of queries")
    shape = {"vocab_size": sizes.vocabulary, "n_layer": sizes.layers, "n_head": sizes.heads}
    return shape | {"layer_norm_epsilon": stated.number("attention.layer_norm_epsilon")}


def _gpt2(stated: Stated, sizes: _Sizes) -> Plan:
    rows, width = _tensor(sizes.tensors, "position_embd.weight", 2).shape[0], _width(stated, sizes)
    if sizes.context != rows:
        raise stated.wrong("context_length", sizes.context, f"{rows}, the number of learned positions")
    own = {"n_embd": sizes.hidden, "n_positions": rows, "n_inner": None if width == 4 * sizes.hidden else width}
    return Plan("GPT2LMHeadModel", "GPT2Config", _learned(stated, sizes) | own)


def _bloom(stated: Stated, sizes: _Sizes) -> Plan:
    stated.must_be("attention.max_alibi_bias", 8.0, "as this architecture has it")
    if (width := _width(stated, sizes)) != 4 * sizes.hidden:
        raise stated.wrong("feed_forward_length", width, f"{4 * sizes.hidden}, four times the embedding's")
    own = {"hidden_size": sizes.hidden, "seq_length": sizes.context}
    return Plan("BloomForCausalLM", "BloomConfig", _learned(stated, sizes) | own)


ARCHITECTURES: dict[str, Callable[[Stated, _Sizes], Plan]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "lfm2": _lfm2,
    "llama": _llama,
    "nemotron": _nemotron,
    "phi3": _phi3,
    "qwen2": partial(_qwen, "Qwen2"),
    "qwen2moe": partial(_qwen_moe, "Qwen2Moe"),
    "qwen3": partial(_qwen, "Qwen3"),
    "qwen3moe": partial(_qwen_moe, "Qwen3Moe"),
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


def architecture_of(metadata: Mapping[str, Any]) -> str:
    """Return the architecture that a file states.

    Raises:
        ValueError: an unsupported architecture, a part of a split file, or a file that is not a language model.
    """
    found = metadata.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise ValueError(f"general.architecture must be one of {', '.join(ARCHITECTURES)}, and is {shown(found)}")
    for key, needed in (("general.type", "model"), ("split.count", 1)):
        if metadata.get(key, needed) not in (needed, 0):
            raise ValueError(f"{key} must be {needed}, for a whole language model, and is {shown(metadata[key])}")
    for key in metadata:
        if key.partition(".")[2].startswith(("attention.", "rope.")) and not key.startswith(f"{found}."):
            raise ValueError(f"it states {printable(key)}, which is of another architecture than {found}")
    return found


def plan_of(file: GgufFile) -> Plan:
    """Plan the model that a file describes: every key of its architecture is used, or refused by name.

    Raises:
        ValueError: an unsupported architecture; a key that is missing or unknown, or that states something that the
            class in transformers does not compute, or that the shapes of the tensors contradict.
    """
    architecture = architecture_of(file.metadata)
    stated = Stated(architecture, file.metadata)
    plan = ARCHITECTURES[architecture](stated, _sizes(stated, file.tensors))
    stated.finish()
    plan.arguments["tie_word_embeddings"] = "output.weight" not in file.tensors
    return plan
