"""GGUF files of weights, configuration and tokenizer: dequantised by transformers, then compared with the file.

transformers leaves out, without an error, what it does not know of such a file: a head size, a window, scaled rotary
frequencies, a tensor. So the configuration is completed from the file, and the model compared with it.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tl_posdisent.models.loading.convert import first_line

# What transformers does not read for every architecture: the file's metadata, and the attribute that it sets.
_UNREAD = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "context_length": "n_positions",
}
# Standard deviations of initial weights that a model's authors publish in its config.json; by basename and size label.
_PUBLISHED_SCALES = {
    ("smollm2", "135M"): 1 / 24,  # HuggingFaceTB/SmolLM2-135M
    ("gemma-3", "270M"): 0.02,  # google/gemma-3-270m
}
_DIVISORS = "rope_freqs.weight"  # of rotary frequencies; Llama 3 files hold these in place of four parameters
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_gguf(path: Path, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model of a GGUF file, dequantised to ``dtype``, and its tokenizer.

    Refuses a file that is not whole, or of which transformers does not read all.
    """
    from unittest import mock

    try:
        import gguf

        from tl_posdisent.models.loading.gguf_reader import FastReader
    except ImportError as error:
        raise ValueError(f"{path} needs the package gguf, which is not installed: pip install gguf") from error
    folder, name = os.path.split(path)
    options: dict[str, Any] = {"gguf_file": name, "local_files_only": True}
    # transformers reads the file twice, and makes the same table of names for every module: seconds each.
    cached: dict[str, Any] = {"GGUFReader": lru_cache(FastReader)}
    cached["get_tensor_name_map"] = lru_cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(gguf, **cached):
        try:
            reader = gguf.GGUFReader(os.path.join(folder, name))
            architecture = reader.fields["general.architecture"].contents()
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise ValueError(f"{path} must be a whole GGUF file, and cannot be read: {first_line(error)}") from error
        start = f"{architecture}."
        stated = {key.removeprefix(start): f.contents() for key, f in reader.fields.items() if key.startswith(start)}
        divisors = next(
            (torch.tensor(tensor.data, device="cpu") for tensor in reader.tensors if tensor.name == _DIVISORS), None
        )
        try:
            config = AutoConfig.from_pretrained(folder, **options)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **options)  # as AutoTokenizer, in less time
            _complete(config, stated, divisors)
            _set_scale(config, reader)
            options |= {"config": config, "dtype": dtype, "output_loading_info": True}
            if hasattr(transformers, "GgufConfig"):  # which would leave weights packed where it has a kernel for them
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, trust_remote_code=False, use_safetensors=True, **options
            )
            if report["missing_keys"]:
                raise ValueError(f"it has no weights for {', '.join(sorted(report['missing_keys'])[:3])} …")
            _check(model, reader, stated, divisors)
        except Exception as error:  # transformers fails in many ways on a file that it was not written for
            raise ValueError(
                f"transformers {version('transformers')} does not read {path} ({architecture}) as a causal language "
                f"model: {first_line(error).rstrip('.')}; load a folder with config.json and safetensors instead"
            ) from error
    tokenizer.init_kwargs["name_or_path"] = ""  # by which TransformerLens would look for it on a hub
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):  # of numbers that are plain now,
        vars(model).pop(attribute, None)  # which save_pretrained and half would refuse
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def _complete(config: Any, stated: dict[str, Any], divisors: torch.Tensor | None) -> None:
    """Set what transformers does not read of the file for every architecture."""
    for key, name in _UNREAD.items():
        if key in stated and hasattr(config, name):
            setattr(config, name, stated[key])
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        rope["rope_theta"] = stated.get("rope.freq_base", rope["rope_theta"])
        if "partial_rotary_factor" in rope and "rope.dimension_count" in stated:
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            rope["partial_rotary_factor"] = stated["rope.dimension_count"] / head
        if divisors is not None:
            rope |= _LLAMA3 | {"rope_type": "llama3", "factor": float(divisors.max())}
        elif stated.get("rope.scaling.type", "none") != "none":
            rope |= {"rope_type": stated["rope.scaling.type"], "factor": stated["rope.scaling.factor"]}


def _set_scale(config: Any, reader: Any) -> None:
    """Set the scale of initial weights, which no file states, if it is published; else mark the default as assumed."""
    names = (reader.fields.get(f"general.{key}") for key in ("basename", "size_label"))
    basename, size = (str(field.contents()) if field else "" for field in names)
    published = _PUBLISHED_SCALES.get((basename.lower(), size.upper()))
    if published is None:
        config.initializer_range_assumed = True  # for random_control
    else:
        config.initializer_range = published


def _check(model: PreTrainedModel, reader: Any, stated: dict[str, Any], divisors: torch.Tensor | None) -> None:
    """Refuse a model that is not all that the file states: its numbers, its norms and its rotary frequencies."""
    unused = {_DIVISORS, "output.weight"} if model.config.tie_word_embeddings else {_DIVISORS}
    held = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in unused)
    taken = sum(parameter.numel() for parameter in model.parameters())
    if held != taken:
        raise ValueError(f"the file holds {held} weights, and {type(model).__name__} has {taken}")
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
            if epsilon is not None and not math.isclose(epsilon, stated.get(key, epsilon), rel_tol=1e-4):
                raise ValueError(f"its norms have another {key} than {stated[key]:g}")
    kind = stated.get("rope.scaling.type", "none")
    for name, frequencies in model.named_buffers():
        if name.rsplit(".", 1)[-1] in ("inv_freq", "full_attention_inv_freq"):
            n = stated.get("rope.dimension_count", 2 * len(frequencies))
            expected = stated.get("rope.freq_base", 10000.0) ** -(torch.arange(0, n, 2, device="cpu") / n)
            expected /= stated.get("rope.scaling.factor", 1.0) if divisors is None else divisors
            same = len(expected) == len(frequencies) and torch.allclose(frequencies.cpu(), expected, rtol=1e-4)
            if kind not in ("none", "linear") or not same:
                raise ValueError(f"its rotary frequencies (scaling: {kind}) are not those of the file")
    head = stated.get("attention.key_length")
    if getattr(model.config, "query_pre_attn_scalar", head) != head:
        raise ValueError(f"the file does not say by what the scores of heads of size {head} are divided")
