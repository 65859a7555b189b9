"""Small GGUF files of Llama's architecture, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from tl_posdisent.demo import demo_tokenizer


def write_gguf(path: Path, model: Any) -> None:
    """Write a Llama in float32, with the tokenizer of the demo model."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a small model")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if "q_proj" in name:
            tensor = _interleaved(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(rows: Tensor, n_heads: int) -> Tensor:
    """Put rows i and i + half of each head beside each other, as llama.cpp stores queries and keys of Llama."""
    return rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def _add_tokenizer(writer: Any) -> None:
    model = json.loads(demo_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])  # the first is a control token
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
