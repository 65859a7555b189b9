"""Translate the metadata of a GGUF file to a transformers configuration: each key is used, checked or refused."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tl_posdisent.models.loading.gguf_file import GgufFile, numbers, shape_of
from tl_posdisent.utils.validation import is_integer, is_number, printable, shown

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
}
DIVISORS = "rope_freqs.weight"  # divisors of rotary frequencies; Llama 3 files store these instead of four parameters
# Parameters of all Llama 3 models but the factor; the frequencies that they give are compared with the file's.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEFAULT_BASE = 10000.0  # if a file states none: the default of llama.cpp and of transformers' configurations
_GEMMA3_PERIOD = 6  # every sixth layer of Gemma 3 attends to the whole text
_GEMMA3_HEAD = 256  # Gemma 3 27B has smaller heads, and divides their scores by a number that no file states
_BLOCK = re.compile(r"blk\.(\d+)\.")
_NEEDED: Any = object()
_LARGEST = 2**31 - 1  # limit for sizes, which also have 32 bits in llama.cpp

# Keys on which no computation depends.
_HARMLESS = frozenset(
    (
        "pooling_type",  # for embedding models only
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # for yarn and longrope only, which are refused
        "tensor_data_layout",
    )
)
# Keys with the value that changes nothing. Any other value is refused.
_NEUTRAL: Mapping[str, float | bool] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}


@dataclass(frozen=True)
class Plan:
    """An architecture, the names of its model and configuration classes in transformers, and the configuration."""

    architecture: str
    model: str
    config: str
    arguments: dict[str, Any]


class _Stated:
    """The keys that a file states of its architecture; ``finish`` refuses those that no call has read.

    Every method raises ValueError with the key's name if the value has the wrong type or is out of range.
    """

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.architecture = architecture
        begin = f"{architecture}."
        self._left = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}

    def named(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def wrong(self, key: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{self.named(key)} must be {needed}, and is {shown(value)}")

    def take(self, key: str, default: Any = _NEEDED) -> Any:
        """Return the value; that of an array of equal values, one per layer, is their value."""
        if key not in self._left and default is _NEEDED:
            raise ValueError(f"it does not state {self.named(key)}, which is needed")
        found = self._left.pop(key, default)
        return found[0] if isinstance(found, list) and found and found == found[:1] * len(found) else found

    def integer(self, key: str, default: Any = _NEEDED) -> int:
        """Return an integer above 0."""
        found = self.take(key, default)
        if not is_integer(found) or not 1 <= found <= _LARGEST:
            raise self.wrong(key, found, f"an integer from 1 to {_LARGEST}, the same in all layers")
        return int(found)

    def number(self, key: str, default: Any = _NEEDED) -> float:
        """Return a finite number above 0."""
        found = self.take(key, default)
        if not (is_number(found) and math.isfinite(found) and found > 0):
            raise self.wrong(key, found, "a finite number above 0")
        return float(found)

    def size(self, key: str, held: int, where: str) -> int:
        """Return an integer that must be the size of a tensor."""
        found = self.integer(key)
        if found != held:
            raise self.wrong(key, found, f"{held}, {where}")
        return found

    def must_be(self, key: str, value: Any, why: str) -> None:
        """Refuse the key if the file states it with a value other than this one."""
        found = self.take(key, value)
        if isinstance(value, float) and is_number(found):
            same = math.isclose(found, value, rel_tol=1e-5)
        else:
            same = type(found) is type(value) and found == value
        if not same:
            raise self.wrong(key, found, f"{shown(value)}, {why}")

    def finish(self) -> None:
        """Refuse by name the keys that are left: they may change what the model computes."""
        for key, value in _NEUTRAL.items():
            self.must_be(key, value, "as nothing else is computed for this architecture")
        for key, value in self._left.items():
            if key not in _HARMLESS:
                raise ValueError(
                    f"it states {printable(self.named(key))}, {shown(value)}, which is not read for this "
                    "architecture and may change what it computes"
                )


def plan_of(file: GgufFile) -> Plan:
    """Plan the model that a file describes: every key of its architecture is used, or refused by name.

    Raises:
        ValueError: an unsupported architecture; a part of a split file; a key that is missing or unknown, or that
            states something that the class in transformers does not compute, or that the shapes of the tensors
            contradict.
    """
    architecture = architecture_of(file.metadata)
    stated = _Stated(architecture, file.metadata)
    arguments = _sizes(stated, file)
    head = arguments["head_dim"]
    stated.must_be("attention.scale", head**-0.5, "as scores are divided by the square root of the head size")
    arguments["rms_norm_eps"] = stated.number("attention.layer_norm_rms_epsilon")
    if architecture == "gemma3":
        arguments |= _gemma3(stated, file, head, arguments["num_hidden_layers"])
    else:
        stated.must_be("attention.sliding_window", 0, "as a window is read for gemma3 only")
        arguments["rope_parameters"] = _rope(stated, file, head)
    stated.finish()
    arguments["tie_word_embeddings"] = "output.weight" not in file.tensors
    return Plan(architecture, *ARCHITECTURES[architecture], arguments)


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


def _sizes(stated: _Stated, file: GgufFile) -> dict[str, Any]:
    """Return the configuration's sizes, compared with the shapes of tensors: nothing larger than them is built."""
    vocabulary, hidden = _shape(file, "token_embd.weight")
    width, _ = _shape(file, "blk.0.ffn_gate.weight")
    blocks = len({found[1] for found in map(_BLOCK.match, file.tensors) if found})
    stated.must_be("vocab_size", vocabulary, "the number of rows of the embedding")
    heads = stated.integer("attention.head_count")
    keys = stated.integer("attention.head_count_kv", heads)
    head = stated.integer("attention.key_length", max(hidden // heads, 1))
    if heads % keys:
        raise stated.wrong("attention.head_count", heads, f"a multiple of {stated.named('attention.head_count_kv')}")
    for name, count in (("attn_q", heads), ("attn_k", keys)):
        rows, _ = _shape(file, f"blk.0.{name}.weight")
        if rows != count * head:
            given = {"head_count": heads, "head_count_kv": keys, "key_length": head}
            listed = ", ".join(f"{stated.named(f'attention.{key}')} {value}" for key, value in given.items())
            raise ValueError(f"{listed} do not match the {rows} rows of blk.0.{name}.weight")
    if head % 2:
        raise stated.wrong("attention.key_length", head, "even, as RoPE rotates pairs of dimensions")
    stated.must_be("attention.value_length", head, "the size of heads of queries and keys")
    return {
        "vocab_size": vocabulary,
        "hidden_size": stated.size("embedding_length", hidden, "the width of the embedding"),
        "intermediate_size": stated.size("feed_forward_length", width, "the number of rows of blk.0.ffn_gate.weight"),
        "num_hidden_layers": stated.size("block_count", blocks, "as there are blocks of tensors"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head,
        "max_position_embeddings": stated.integer("context_length"),
    }


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    shape = shape_of(file.tensors[name]) if name in file.tensors else ()
    if len(shape) != 2:
        raise ValueError(f"it has no tensor {name} of 2 dimensions")
    return shape


def _gemma3(stated: _Stated, file: GgufFile, head: int, n_layers: int) -> dict[str, Any]:
    """Return the arguments for Gemma 3 alone: local and global layers, each with a rotary base of its own."""
    if head != _GEMMA3_HEAD:
        raise stated.wrong("attention.key_length", head, f"{_GEMMA3_HEAD}: the scale of other heads is not stated")
    why = "as every sixth layer of Gemma 3 attends to the whole text"
    stated.must_be("attention.sliding_window_pattern", _GEMMA3_PERIOD, why)
    local = {"rope_type": "default", "rope_theta": stated.number("rope.freq_base_swa", _DEFAULT_BASE)}
    kinds = ["full_attention" if n % _GEMMA3_PERIOD == 0 else "sliding_attention" for n in range(1, n_layers + 1)]
    return {
        "query_pre_attn_scalar": head,
        "sliding_window": stated.integer("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": local, "full_attention": _rope(stated, file, head)},
    }


def _rope(stated: _Stated, file: GgufFile, head: int) -> dict[str, Any]:
    """Return the configuration's ``rope_parameters``: the base, and linear scaling or Llama 3's divisors."""
    key = "rope.freq_base"
    theta = stated.number(key, _NEEDED if stated.architecture == "gemma3" else _DEFAULT_BASE)
    if stated.named(key) not in file.metadata:
        warnings.warn(
            f"the file does not state {stated.named(key)}: {theta:g}, the default of the format, is taken", stacklevel=2
        )
    stated.must_be("rope.dimension_count", head, "the size of a head, which is rotated whole in this architecture")
    kind = stated.take("rope.scaling.type", None)
    if kind not in (None, "none", "linear"):
        raise stated.wrong("rope.scaling.type", kind, "'none' or 'linear'; others are not read")
    if kind == "linear" and stated.named("rope.scaling.factor") not in file.metadata:
        missing = stated.named("rope.scaling.factor")
        raise ValueError(f"it does not state {missing}, which {stated.named('rope.scaling.type')} 'linear' needs")
    factor = stated.number("rope.scaling.factor", 1.0)
    if kind == "none" and factor != 1:
        raise stated.wrong("rope.scaling.factor", factor, "1 where rope.scaling.type is 'none'")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if DIVISORS not in file.tensors:
        return found if factor == 1 else found | {"rope_type": "linear", "factor": factor}
    if factor != 1:
        raise stated.wrong("rope.scaling.factor", factor, f"1 beside the tensor {DIVISORS}")
    divisors = numbers(file.tensors[DIVISORS])
    if divisors.shape != (head // 2,) or not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise ValueError(f"the tensor {DIVISORS} must hold {head // 2} finite numbers above 0")
    return found | _LLAMA3 | {"factor": float(divisors.max())}
