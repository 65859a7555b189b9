"""Convert the tensors of a GGUF file to a transformers state dict: every parameter is filled, every tensor used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tl_posdisent.models.loading.gguf_architectures import DIVISORS
from tl_posdisent.models.loading.gguf_file import StoredTensor
from tl_posdisent.utils.validation import printable

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
_ENDS = (".weight", ".bias")
Numbers = np.ndarray


def sources(architecture: str, config: Any, names: list[str]) -> dict[str, list[str]]:
    """Map each name of a state dict to the names of the tensors that make it up, in order."""
    import gguf

    number = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise ValueError(f"the installed gguf does not know the tensors of {architecture}: install a newer one")
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, list[str]] = {}
    for name in names:
        if experts := _EXPERTS.fullmatch(name):
            parts = ("gate", "up") if experts[2] == "gate_up" else ("down",)
            found[name] = [f"blk.{experts[1]}.ffn_{part}_exps.weight" for part in parts]
        else:
            short = name.partition(".")[2]  # Bloom's tensors are named without the first part
            stored = next((x for x in (name, short) if known.get_name(x, try_suffixes=_ENDS)), name)
            found[name] = [known.get_name(stored, try_suffixes=_ENDS) or f"for {name}"]
    return found


def state_dict(
    architecture: str, config: Any, shapes: Mapping[str, torch.Size], tensors: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """Convert the file's tensors to float32, with the names and shapes of the model's parameters.

    Args:
        architecture: as the file states it.
        config: the model's configuration in transformers.
        shapes: shapes of the model's parameters, by name; of tied parameters, only the first.
        tensors: the file's tensors.

    Raises:
        ValueError: a tensor that is missing, is not used, has the wrong shape, or has a type that is not dequantised.
    """
    needed = sources(architecture, config, list(shapes))
    used = {source for group in needed.values() for source in group}
    if missing := [source for source in sorted(used) if source not in tensors]:
        raise ValueError(f"it has no tensor {', '.join(missing[:3])}{' …' * (len(missing) > 3)}")
    if left := [printable(name) for name in tensors if name not in used and name != DIVISORS]:
        raise ValueError(f"its tensors {', '.join(left[:3])}{' …' * (len(left) > 3)} are not of {config.model_type}")
    if DIVISORS in tensors and architecture != "llama":
        raise ValueError(f"its tensor {DIVISORS} is not read for {architecture}")
    for name, group in needed.items():
        held = sum(math.prod(tensors[source].shape) for source in group)
        if held != math.prod(shapes[name]):
            listed = ", ".join(f"{source} {tensors[source].shape}" for source in group)
            raise ValueError(f"its tensors {listed} do not match {name} of shape {tuple(shapes[name])}")
    return {name: _tensor(architecture, config, shapes[name], needed[name], tensors) for name in shapes}


def _tensor(
    architecture: str, config: Any, shape: torch.Size, group: list[str], tensors: Mapping[str, StoredTensor]
) -> Tensor:
    change = _CHANGES.get(architecture)
    parts = [tensors[source].numbers() for source in group]
    parts = parts if change is None else [change(x, name, config) for x, name in zip(parts, group, strict=True)]
    numbers = np.concatenate(parts, 1) if len(parts) > 1 else parts[0]
    if numbers.shape != tuple(shape):
        raise ValueError(f"its tensor {group[0]} has the shape {numbers.shape} instead of {tuple(shape)}")
    numbers = np.ascontiguousarray(numbers)
    return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())


# --- undo the changes that converters make to tensors of some architectures ---------------------------------------


def _halves(x: Numbers, name: str, config: Any) -> Numbers:
    """Reorder Llama's queries and keys: in the file, coordinates i and i + half of each head are adjacent."""
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    n = next((n for part, n in heads.items() if part in name), None)
    if n is None:
        return x
    return x.reshape(n, x.shape[0] // n // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _transposed(x: Numbers, name: str, config: Any) -> Numbers:
    matrix = re.search(r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", name)
    return x.T if matrix else x


def _less_one(x: Numbers, name: str, config: Any) -> Numbers:
    """Subtract 1 from norms, in models that add 1 to the gains that they store."""
    return x - np.float32(1.0) if name.endswith("norm.weight") else x


def _shared_gate(x: Numbers, name: str, config: Any) -> Numbers:
    return x[None] if name.endswith("ffn_gate_inp_shexp.weight") and x.ndim == 1 else x


def _one_channel(x: Numbers, name: str, config: Any) -> Numbers:
    return x[:, None] if name.endswith("shortconv.conv.weight") and x.ndim == 2 else x


def _by_head(x: Numbers, name: str, config: Any) -> Numbers:
    """Reorder Bloom's queries, keys and values, which the model stores head by head."""
    if "attn_qkv" not in name:
        return x
    return x.reshape(3, config.n_head, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def _by_group(x: Numbers, name: str, config: Any) -> Numbers:
    """Reorder Falcon's queries, keys and values by group, as the model stores them: queries of a key, key, value."""
    if "attn_qkv" not in name:
        return x
    heads, keys = config.num_attention_heads, config.num_kv_heads
    size = x.shape[0] // (heads + 2 * keys)
    q, k, v = np.split(x, [heads * size, (heads + keys) * size])
    groups = [part.reshape(keys, -1, size, *x.shape[1:]) for part in (q, k, v)]
    return np.concatenate(groups, 1).reshape(x.shape)


_CHANGES: dict[str, Callable[[Numbers, str, Any], Numbers]] = {
    "bloom": _by_head,
    "falcon": _by_group,
    "gemma2": _less_one,
    "gemma3": _less_one,
    "gpt2": _transposed,
    "lfm2": _one_channel,
    "llama": _halves,
    "nemotron": _less_one,
    "qwen2moe": _shared_gate,
}
