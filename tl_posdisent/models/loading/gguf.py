"""Load GGUF files of Llama, Qwen 2 and 3, and Gemma 3 as Hugging Face models, with their tokenizers.

The package gguf reads the file and dequantises; transformers builds model and tokenizer. What either fills in or omits
without saying so is checked here: every key and tensor is used, known to be harmless, or refused by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import ReaderTensor
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tl_posdisent.models.loading.gguf_config import DIVISORS, Plan, plan_of
from tl_posdisent.models.loading.gguf_file import GgufFile, numbers, read_gguf_file, shape_of
from tl_posdisent.models.loading.gguf_tokenizer import special_tokens, tokenizer_of
from tl_posdisent.utils.validation import first_line, printable

# Standard deviations of initial weights published in a model's config.json, by basename and size label.
_PUBLISHED_SCALES = {
    ("smollm2", "135M"): 1 / 24,  # HuggingFaceTB/SmolLM2-135M
    ("gemma-3", "270M"): 0.02,  # google/gemma-3-270m
}
_BUILDING = threading.Lock()  # from_pretrained sets torch's default dtype, which all threads share


def read_gguf(path: Path, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the model of a GGUF file, dequantised to ``dtype``, and its tokenizer.

    Raises:
        ValueError: an incomplete file; an architecture, a key or a tensor that is not supported; a key or a tensor that
            is missing; shapes that contradict the metadata.
    """
    shown_path = printable(str(path))
    try:
        file = read_gguf_file(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{shown_path} must be a whole GGUF file, and cannot be read: {first_line(error)}") from error
    try:
        plan = plan_of(file)
        ids = special_tokens(file.metadata)
        plan.arguments.update({f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")})
        config = getattr(transformers, plan.config)(**plan.arguments)
        tokenizer = tokenizer_of(plan.architecture, file.metadata)
        model = _model(plan, config, file, dtype)
        _check(model, plan, file)
    except Exception as error:  # transformers fails in many ways on a file that it was not written for
        raise ValueError(
            f"cannot load {shown_path} with transformers {transformers.__version__}: "
            f"{first_line(error).rstrip('.')}; convert it to safetensors, and load that folder instead"
        ) from error
    tokenizer.name_or_path = path.stem  # the model's name in reports
    return model, tokenizer


def _model(plan: Plan, config: Any, file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with the file's weights; nothing is allocated before the tensors' shapes are checked."""
    kind = getattr(transformers, plan.model)
    with torch.device("meta"):
        skeleton = kind(config)
    tied = config.tie_word_embeddings
    shapes = {name: x.shape for name, x in skeleton.state_dict().items() if not (tied and name == "lm_head.weight")}
    sources = _sources(plan, shapes, file)
    state = {name: _weights(plan, config, file.tensors[source]).to(dtype) for name, source in sources.items()}
    _set_scale(config, file.metadata)
    options: dict[str, Any] = {"config": config, "state_dict": state, "dtype": dtype, "output_loading_info": True}
    with _BUILDING:
        model, report = kind.from_pretrained(None, **options)
    if wrong := sorted(str(x) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for x in report[key]):
        raise ValueError(f"its tensors are not those of {plan.model}: {', '.join(wrong[:3])}")
    whole: PreTrainedModel = model.eval()
    return whole


def _sources(plan: Plan, shapes: Mapping[str, torch.Size], file: GgufFile) -> dict[str, str]:
    """Map each parameter's name to that of its tensor in the file; raise unless all tensors are used, and fit."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == plan.architecture)
    known = gguf.get_tensor_name_map(number, plan.arguments["num_hidden_layers"])
    sources = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) or f"for {name}" for name in shapes}
    used = {*sources.values(), *([DIVISORS] if plan.architecture == "llama" else [])}
    if missing := sorted({*sources.values()} - {*file.tensors}):
        raise ValueError(f"it has no tensor {', '.join(missing[:3])}{' …' * (len(missing) > 3)}")
    if left := [printable(name) for name in file.tensors if name not in used]:
        raise ValueError(f"its tensors {', '.join(left[:3])}{' …' * (len(left) > 3)} are not of {plan.architecture}")
    for name, source in sources.items():
        if (held := shape_of(file.tensors[source])) != tuple(shapes[name]):
            raise ValueError(f"its tensor {source} has the shape {held} instead of {tuple(shapes[name])}")
    return sources


def _weights(plan: Plan, config: Any, tensor: ReaderTensor) -> Tensor:
    """Dequantise a tensor, and undo what llama.cpp's converter does to tensors of some architectures."""
    x = numbers(tensor)
    if plan.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
        x = x - np.float32(1.0)  # the converter adds the 1 that Gemma adds to the gains that it stores
    if plan.architecture == "llama" and ".attn_q." in tensor.name:
        x = _halves(x, config.num_attention_heads)
    if plan.architecture == "llama" and ".attn_k." in tensor.name:
        x = _halves(x, config.num_key_value_heads)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _halves(x: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows of queries or keys: in the file, coordinates i and i + half of each head are adjacent."""
    return x.reshape(n_heads, x.shape[0] // n_heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _set_scale(config: Any, metadata: Mapping[str, Any]) -> None:
    """Set the scale of initial weights, which no file states, if it is published; otherwise mark it as assumed."""
    basename, size = (str(metadata.get(f"general.{key}", "")) for key in ("basename", "size_label"))
    published = _PUBLISHED_SCALES.get((basename.lower(), size.upper()))
    if published is None:
        config.initializer_range_assumed = True  # for random_control
    else:
        config.initializer_range = published


def _check(model: PreTrainedModel, plan: Plan, file: GgufFile) -> None:
    """Compare the model's norms and rotary frequencies with the file: a class may not read its configuration."""
    epsilon = plan.arguments["rms_norm_eps"]
    for module in model.modules():
        held = getattr(module, "variance_epsilon", getattr(module, "eps", epsilon))
        if not math.isclose(held, epsilon, rel_tol=1e-4):
            raise ValueError(f"the norms of {plan.model} have the epsilon {held:g} instead of {epsilon:g}")
    rope, head = plan.arguments["rope_parameters"], plan.arguments["head_dim"]
    for name, frequencies in model.named_buffers():
        if not name.endswith("inv_freq") or "original" in name:
            continue
        kind = "sliding_attention" if name.endswith("sliding_attention_inv_freq") else "full_attention"
        stated = rope.get(kind, rope)  # nested where layers differ
        divisors = numbers(file.tensors[DIVISORS]) if DIVISORS in file.tensors else stated.get("factor", 1.0)
        expected = torch.from_numpy(stated["rope_theta"] ** -(np.arange(0, head, 2) / head) / divisors).float()
        if len(expected) != len(frequencies) or not torch.allclose(frequencies.float().cpu(), expected, rtol=1e-4):
            raise ValueError(f"the rotary frequencies of {plan.model} are not those that the file states")
