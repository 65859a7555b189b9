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
from torch import Tensor

from support import zoo
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.models.loading.gguf import read_gguf
from tl_posdisent.models.loading.gguf_file import read_gguf_file as read_gguf_file

_THETA = {"rope_theta": 500.0}
_LLAMA3 = {  # the wavelengths of its frequencies lie around its 8192 positions
    **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_GEMMA3 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 2.0} | _THETA,
    },
}
# By name: the architecture that the file states, the model of the zoo, and changes of its configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-gqa": ("llama", "llama-gqa", {"rms_norm_eps": 1e-2}),
    "llama tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0} | _THETA}),
    "llama 3": ("llama", "llama-gqa", {"rope_parameters": _LLAMA3}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "gemma3": ("gemma3", "gemma3", _GEMMA3),
}


def model_of(name: str, **more: Any) -> Any:
    """The model of a file, in transformers."""
    _, of, changes = MODELS[name]
    return zoo.hf_model(of, **({"vocab_size": 1024} | changes | more))


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
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    linear = rope["rope_type"] == "linear"
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window if architecture == "gemma3" else None,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
        "rope.scaling.type": "linear" if linear else None,
        "rope.scaling.factor": rope["factor"] if linear else None,
    }


def permuted(rows: Tensor, n_heads: int) -> Tensor:
    """As llama.cpp stores queries and keys of Llama: pairs (i, i + half) beside each other in every head."""
    return rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _there_and_back(architecture: str, name: str, config: Any) -> tuple[Any, Any]:
    """What the converter does to a tensor, and its inverse."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        n = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return lambda x: permuted(x, n), lambda x: x.unflatten(0, (n, -1, 2)).transpose(1, 2).reshape(x.shape)
    if architecture == "gemma3" and "norm.weight" in name:
        return (lambda x: x + 1), (lambda x: x - 1)
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
        numbers, held = _quantised(forth(value).contiguous(), kind if value.ndim >= 2 else "F32")
        state[name] = back(held)
        raw = gguf.GGMLQuantizationType[kind] if value.ndim >= 2 else None
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), numbers, raw_dtype=raw)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        size = config.head_dim
        frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        writer.add_tensor("rope_freqs.weight", (frequencies / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def error_of(path: Path) -> str:
    """The ``ValueError`` of reading a file, or nothing where it is read; any other exception fails the test."""
    try:
        read_gguf(path, dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return ""


def _quantised(value: Tensor, kind: str) -> tuple[np.ndarray, Tensor]:
    """Bytes of this type, and the numbers that they stand for."""
    if kind == "F32":
        return value.numpy(), value
    number = gguf.GGMLQuantizationType[kind]
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
