"""Small random GGUF files, written as llama.cpp's converter writes them, and the same files with other metadata."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from support import zoo
from support.gguf_blocks import BLOCKS
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading.gguf import read_gguf

# Gemma's head size of 256 is the one for which a file says all. The wavelengths of the Llama 3 lie around its 8192.
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}
_THETA = {"rope_theta": 500.0}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama-gqa", {"rms_norm_eps": 1e-2}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0} | _THETA}),
    "llama 3": ("llama", "llama-gqa", {"rope_parameters": _LLAMA3}),
    "llama with biases": ("llama", "llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", "mistral", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2 with a window": (
        "qwen2",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", "qwen3", {}),
    "phi3": ("phi3", "phi3", {"sliding_window": 5}),
    "phi3 in part": (
        "phi3",
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5} | _THETA},
    ),
    "gemma2": ("gemma2", "gemma2", _GEMMA | {"tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        "gemma3",
        _GEMMA
        | {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 2.0} | _THETA,
            }
        },
    ),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True}),
    "stablelm in parallel": ("stablelm", "stablelm", {"use_parallel_residual": True}),
    "gpt2": ("gpt2", "gpt2", {}),
    "bloom": ("bloom", "bloom", {"tie_word_embeddings": True}),
    "falcon": ("falcon", "falcon", {}),
    "falcon with groups": ("falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "lfm2": ("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False}),
    "starcoder2": ("starcoder2", "Starcoder2", {"sliding_window": None}),
    "nemotron": ("nemotron", "Nemotron", {}),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", {"shared_expert_intermediate_size": 64}),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", {"head_dim": 16, "norm_topk_prob": True}),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model_of(name: str, **more: Any) -> Any:
    """The model of a file, in transformers: of the zoo, or a grouped one with its configuration's class given."""
    _, of, changes = MODELS[name]
    changes = {"vocab_size": 1024} | changes | more
    if of in zoo.ARCHITECTURES:
        return zoo.hf_model(of, **changes)
    arguments = copy.deepcopy(zoo.ARCHITECTURES["llama-gqa"].arguments) | (_EXPERTS if "Moe" in of else {}) | changes
    config = getattr(transformers, f"{of}Config")(**arguments)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{of}ForCausalLM")(config).float()
        zoo.randomise(model, 0.2, 0.7)
    return model.eval()


def with_config(model: Any, **changes: Any) -> Any:
    """The model with the same weights and another configuration."""
    arguments = copy.deepcopy(model.config.to_dict()) | changes
    config = type(model.config)(**arguments)
    config._attn_implementation = "eager"
    fresh = type(model)(config).float()
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


# --- writing ------------------------------------------------------------------------------------------------------


def metadata_of(model: Any, architecture: str) -> dict[str, Any]:
    """What llama.cpp's converter states of the model, without the prefix; None for what it does not."""
    config = model.config
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None)
    if architecture == "falcon":
        keys = config.num_kv_heads if config.new_decoder_architecture else 1
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    root = hasattr(config, "rms_norm_eps")
    epsilons = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = next((x for n in ("intermediate_size", "ffn_hidden_size") if (x := getattr(config, n, None))), None)
    linear = rope.get("rope_type") == "linear"
    if architecture == "lfm2":
        root, keys = True, [keys if kind == "full_attention" else 0 for kind in config.layer_types]
    experts = "moe" in architecture
    return {
        "context_length": getattr(config, "max_position_embeddings", 128),
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": width or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
        "attention.key_length": head_dim,
        f"attention.layer_norm_{'rms_' * root}epsilon": float(
            next(x for name in epsilons if (x := getattr(config, name, None)))
        ),
        "attention.sliding_window": getattr(config, "sliding_window", None) or (0 if architecture == "phi3" else None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)) if rope else None,
        "rope.scaling.type": "linear" if linear else None,
        "rope.scaling.factor": rope["factor"] if linear else None,
        "expert_count": config.num_experts if experts else None,
        "expert_used_count": config.num_experts_per_tok if experts else None,
        "expert_feed_forward_length": config.moe_intermediate_size if experts else None,
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        "shortconv.l_cache": getattr(config, "conv_L_cache", None),
    }


def permuted(rows: Tensor, n_heads: int) -> Tensor:
    """As llama.cpp stores queries and keys of Llama: pairs (i, i + half) beside each other in every head."""
    return rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _there_and_back(architecture: str, name: str, config: Any) -> tuple[Any, Any]:
    """What the converter does to a tensor, and its inverse."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        n = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return lambda x: permuted(x, n), lambda x: x.unflatten(0, (n, -1, 2)).transpose(1, 2).reshape(x.shape)
    if architecture == "gpt2" and any(x in name for x in ("c_attn.w", "c_proj.w", "c_fc.w")):
        return (lambda x: x.T), (lambda x: x.T)
    if (architecture.startswith("gemma") or architecture == "nemotron") and "norm.weight" in name:
        return (lambda x: x + 1), (lambda x: x - 1)
    if architecture == "bloom" and "query_key_value" in name:
        n = config.n_head
        return (
            lambda x: x.unflatten(0, (n, 3, -1)).transpose(0, 1).reshape(x.shape),
            lambda x: x.unflatten(0, (3, n, -1)).transpose(0, 1).reshape(x.shape),
        )
    if architecture == "falcon" and "query_key_value" in name:
        keys = config.num_kv_heads if config.new_decoder_architecture else 1
        size = config.hidden_size // config.num_attention_heads
        queries = config.num_attention_heads // keys

        def forth(x: Tensor) -> Tensor:
            groups = x.unflatten(0, (keys, queries + 2, size))
            return torch.cat([part.flatten(0, 2) for part in groups.split([queries, 1, 1], 1)])

        def back(x: Tensor) -> Tensor:
            parts = x.split([keys * n * size for n in (queries, 1, 1)])
            return torch.cat([part.unflatten(0, (keys, -1, size)) for part in parts], 1).reshape(x.shape)

        return forth, back
    return (lambda x: x), (lambda x: x)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kind: str = "F32",
    general: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, Tensor]:
    """Write ``model`` as llama.cpp does, matrices as ``kind``; return the state dict that such a file holds.

    ``general`` is metadata of no architecture; ``changes`` replace metadata of the architecture, or drop it (None).
    """
    config, state = model.config, dict(model.state_dict())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("a small model")
    for key, value in general.items():
        writer.add_string(key, value)
    for key, value in (metadata_of(model, architecture) | changes).items():
        if value is not None:
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
            add: Any = kinds[type(value)]
            add(f"{architecture}.{key}", value)
    add_tokenizer(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, value in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        forth, back = _there_and_back(architecture, name, config)
        matrix = value.ndim >= 2 and "wpe" not in name
        numbers, held = _quantised(forth(value).contiguous(), kind if matrix else "F32")
        state[name] = back(held)
        raw = gguf.GGMLQuantizationType[kind] if matrix else None
        if name.endswith("gate_up_proj"):
            layer = name.split(".")[2]
            for part, piece in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", piece.copy(), raw_dtype=raw)
        else:
            short = name.removeprefix("transformer.") if architecture == "bloom" else name
            stored = names.get_name(short, try_suffixes=(".weight", ".bias"))
            if name.endswith("experts.down_proj"):
                stored = f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
            numbers = numbers[:, 0] if name.endswith("conv.conv.weight") else numbers
            writer.add_tensor(stored, numbers[0] if "shared_expert_gate" in name else numbers, raw_dtype=raw)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        size = config.head_dim
        frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        writer.add_tensor("rope_freqs.weight", (frequencies / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state[next(x for x in state if "embed" in x or "wte" in x)]
    return state


def error_of(path: Path) -> str:
    """The ``ValueError`` of reading a file, or nothing where it is read; any other exception fails the test."""
    try:
        read_gguf(path, dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return ""


def _quantised(value: Tensor, kind: str) -> tuple[np.ndarray, Tensor]:
    """Bytes of this type, and the numbers that they stand for; random ones where gguf writes no such blocks."""
    if kind == "F32":
        return value.numpy(), value
    number = gguf.GGMLQuantizationType[kind]
    if kind in BLOCKS:
        return BLOCKS[kind](value.shape)
    packed = gguf.quantize(value.numpy(), number)
    return packed, torch.from_numpy(gguf.dequantize(packed, number)).reshape(value.shape)


def add_tokenizer(writer: Any) -> None:
    """That of the demo model."""
    model = json.loads(demo_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])  # the first is a control token
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)


# --- the same file with other metadata ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """A file taken apart: its entries of metadata as bytes, its table of tensors, and their data."""

    entries: dict[str, bytes]
    table: bytes
    n_tensors: int
    data: bytes

    @classmethod
    def of(cls, path: Path) -> Pieces:
        reader, content = gguf.GGUFReader(path), path.read_bytes()
        entries, end = {}, 24
        for name, field in list(reader.fields.items())[3:]:
            end = field.offset + sum(part.nbytes for part in field.parts)
            entries[name] = content[field.offset : end]
        fields = [tensor.field for tensor in reader.tensors]
        table = content[end : end + sum(part.nbytes for field in fields for part in field.parts)]
        return cls(entries, table, len(fields), content[reader.data_offset :])

    def joined(self, changes: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """The whole file with these values of keys; None drops a key."""
        entries = self.entries | {key: None if x is None else _text(key) + _value(x) for key, x in changes.items()}
        kept = [entry for entry in entries.values() if entry is not None]
        head = b"GGUF" + struct.pack("<IQQ", 3, self.n_tensors, len(kept)) + b"".join(kept) + self.table
        return head + b"\0" * (-len(head) % 32) + self.data


def _text(text: str | bytes) -> bytes:
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(x: Any) -> bytes:
    if type(x) is bool:
        return struct.pack("<I?", 7, x)
    if isinstance(x, int):
        return (
            struct.pack("<Ii", 5, x) if x < 0 else struct.pack("<II", 4, x) if x < 2**32 else struct.pack("<IQ", 10, x)
        )
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, str | bytes):
        return struct.pack("<I", 8) + _text(x)
    elements = [_value(element) for element in x]
    return (
        struct.pack("<I", 9)
        + (elements[0][:4] if x else struct.pack("<I", 4))
        + struct.pack("<Q", len(x))
        + b"".join(element[4:] for element in elements)
    )
