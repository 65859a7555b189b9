"""Load GGUF files (weights, configuration and tokenizer) as Hugging Face models.

The file is read by this package, not by transformers, which fills in or omits what it does not know about an
architecture: here every key and tensor is used, known to be harmless, or refused by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tl_posdisent.models.loading.convert import first_line
from tl_posdisent.models.loading.gguf_architectures import DIVISORS, Plan, architecture_of, plan_of
from tl_posdisent.models.loading.gguf_file import GgufFile, read_gguf_file
from tl_posdisent.models.loading.gguf_tokenizer import special_tokens, tokenizer_of
from tl_posdisent.models.loading.gguf_weights import state_dict
from tl_posdisent.utils.validation import printable

# Standard deviations of initial weights published in a model's config.json, by basename and size label.
_PUBLISHED_SCALES = {
    ("smollm2", "135M"): 1 / 24,  # HuggingFaceTB/SmolLM2-135M
    ("gemma-3", "270M"): 0.02,  # google/gemma-3-270m
}
_BUILDING = threading.Lock()  # from_pretrained sets torch's default dtype, which all threads share


def read_gguf(path: Path, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the model of a GGUF file, dequantised to ``dtype``, and its tokenizer.

    Raises:
        ValueError: the package gguf is not installed; an incomplete file; an architecture, a key or a tensor that is
            not supported; a key or a tensor that is missing; shapes that contradict the metadata.
    """
    shown_path = printable(str(path))
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{shown_path} needs the package gguf, which is not installed: pip install gguf") from error
    try:
        file = read_gguf_file(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{shown_path} must be a whole GGUF file, and cannot be read: {first_line(error)}") from error
    try:
        architecture = architecture_of(file.metadata)
        plan = plan_of(file)
        ids = special_tokens(file.metadata)
        plan.arguments.update({f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")})
        config = getattr(transformers, plan.config)(**plan.arguments)
        tokenizer = tokenizer_of(architecture, config.model_type, file.metadata)
        model = _model(architecture, getattr(transformers, plan.model), config, file, dtype)
        _check(model, plan, file)
    except Exception as error:  # transformers fails in many ways on a file that it was not written for
        raise ValueError(
            f"cannot load {shown_path} with transformers {transformers.__version__}: "
            f"{first_line(error).rstrip('.')}; load a folder with config.json and safetensors instead"
        ) from error
    tokenizer.name_or_path = path.stem  # the model's name in reports
    return model, tokenizer


def _model(architecture: str, kind: Any, config: Any, file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with the file's weights; nothing is allocated before the tensors' shapes are checked."""
    with torch.device("meta"):
        skeleton = kind(config)
    tied = config.tie_word_embeddings
    shapes = {name: x.shape for name, x in skeleton.state_dict().items() if not (tied and name == "lm_head.weight")}
    state = {name: x.to(dtype) for name, x in state_dict(architecture, config, shapes, file.tensors).items()}
    _set_scale(config, file.metadata)
    options: dict[str, Any] = {"config": config, "state_dict": state, "dtype": dtype, "output_loading_info": True}
    with _BUILDING:
        model, report = kind.from_pretrained(None, **options)
    if wrong := sorted(str(x) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for x in report[key]):
        raise ValueError(f"its tensors are not those of {kind.__name__}: {', '.join(wrong[:3])}")
    whole: PreTrainedModel = model.eval()
    return whole


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
    start = f"{architecture_of(file.metadata)}."
    stated = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
            if epsilon is not None and not math.isclose(epsilon, stated.get(key, epsilon), rel_tol=1e-4):
                raise ValueError(f"the norms of {plan.model} do not have {start}{key}, {stated[key]:g}")
    for name, frequencies in model.named_buffers():
        if not name.endswith("inv_freq") or "original" in name:
            continue
        local = name.endswith("sliding_attention_inv_freq")
        n = stated.get("rope.dimension_count", 2 * len(frequencies))
        base = stated.get("rope.freq_base_swa" if local else "rope.freq_base", 10000.0)
        expected = base ** -(torch.arange(0, n, 2, device="cpu") / n)
        if DIVISORS in file.tensors:
            expected /= torch.tensor(file.tensors[DIVISORS].numbers(), device="cpu")
        elif not local:
            expected /= stated.get("rope.scaling.factor", stated.get("rope.scale_linear", 1.0))
        if len(expected) != len(frequencies) or not torch.allclose(frequencies.float().cpu(), expected, rtol=1e-4):
            held = f"the tensor {DIVISORS}" if DIVISORS in file.tensors else f"{start}rope.*"
            raise ValueError(f"the rotary frequencies of {plan.model} are not those that {held} states")
