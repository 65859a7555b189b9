"""Laws of a GGUF file's metadata: a key that is added, changed or removed is computed with, or refused by its name."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import zoo
from torch import Tensor

from tl_posdisent.models.loading.gguf import read_gguf

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")

# How many of the cases below are computed with, for each file. Where more are read, raise the number.
RIGHT = {
    "llama": 51,
    "mistral": 52,
    "qwen2": 51,
    "qwen3": 50,
    "phi3": 47,
    "gemma2": 66,
    "gemma3": 67,
    "stablelm": 48,
    "gpt2": 29,
    "bloom": 31,
    "falcon": 47,
    "lfm2": 47,
    "starcoder2": 51,
    "nemotron": 47,
    "qwen2moe": 54,
    "qwen3moe": 54,
}
QUICK = ("llama", "phi3")
WORDS = ["rope.scale_linear", "rope.unheard_of", "attention.unheard_of", "unheard_of", "attention.heads.unheard_of"]
VALUES: tuple[Any, ...] = (0, 1, 3, 0.37, 1.0, True, False, "linear", [1, 0])
HARMLESS = {"pooling_type", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale", "rope.scaling.attn_factor"), 1.0),
    **dict.fromkeys(("expert_count", "expert_used_count"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 0.0),
    "use_parallel_residual": False,
    "rope.scaling.type": "none",
}
KNOWN = {*NEUTRAL, "rope.scale_linear", "rope.scaling.factor", "rope.freq_base", "rope.freq_base_swa"}
KNOWN |= {"attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "vocab_size"}
_EPSILON = {"gpt2": "layer_norm_epsilon", "bloom": "layer_norm_epsilon", "falcon": "layer_norm_epsilon"}
_EPSILON |= {"stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon", "nemotron": "norm_eps"}


def all_keys() -> list[str]:
    """Every key of an architecture that the package gguf has, and some that nobody has."""
    found: set[str] = set(WORDS)

    def collect(group: Any) -> None:
        for name, value in vars(group).items():
            if isinstance(value, str) and value.startswith("{arch}.") and "{" not in value[7:]:
                found.add(value[7:])
            elif isinstance(value, type) and not name.startswith("_"):
                collect(value)

    collect(gguf.Keys)
    return sorted(found)


def number(x: Any) -> float | None:
    return float(x) if type(x) in (int, float) else None


def meant(architecture: str, key: str, value: Any, given: dict[str, Any], config: Any) -> dict[str, Any] | None:
    """Changes of transformers' configuration that mean this key and value; None where there are none that do.

    ``value`` None is a key that the file does not have; ``given`` are the file's own values.
    """
    x, rotary = number(value), getattr(config, "rope_parameters", None)
    if key.endswith("logit_softcapping") and architecture in ("gemma2", "gemma3"):
        return {key: x or None} if value is not None or architecture == "gemma3" else None
    if key == "use_parallel_residual" and architecture == "stablelm" and type(value) is bool:
        return {}  # beside norms that say otherwise
    if key == "feed_forward_length" and "moe" in architecture and type(value) is int and value:
        return {"intermediate_size": value}  # of layers without experts, of which there are none
    if key in HARMLESS or (key in NEUTRAL and number(value) == number(NEUTRAL[key]) and value == NEUTRAL[key]):
        return {}
    if key == "attention.layer_norm_rms_epsilon" and (architecture == "lfm2" or hasattr(config, "rms_norm_eps")) and x:
        return {"norm_eps" if architecture == "lfm2" else "rms_norm_eps": float(np.float32(x))}
    if key == "attention.layer_norm_epsilon" and architecture in _EPSILON and x:
        return {_EPSILON[architecture]: float(np.float32(x))}
    if key == "attention.sliding_window":
        return window(architecture, value)
    if key == "attention.sliding_window_pattern":
        return pattern(architecture, value, given, config)
    if key == "expert_used_count" and "moe" in architecture and type(value) is int and value:
        return {"num_experts_per_tok": value}
    if key == "attention.scale" and architecture.startswith("gemma") and x:
        return {"query_pre_attn_scalar": round(x**-2)}
    if key == "context_length" and type(value) is int and value and architecture != "gpt2":
        return {} if architecture == "bloom" else {"max_position_embeddings": value}
    return rope(architecture, key, value, copy.deepcopy(rotary)) if rotary else None


def window(architecture: str, value: Any) -> dict[str, Any] | None:
    if type(value) is not int and value is not None:
        return None
    if architecture in ("llama", "starcoder2") or (architecture == "phi3" and value is not None):
        return {"sliding_window": value or None}
    if architecture.startswith("qwen"):
        sliding = {"sliding_window": value, "use_sliding_window": True, "max_window_layers": 0}
        kinds = ["sliding_attention" if value else "full_attention"] * 2
        return (sliding if value else {"use_sliding_window": False}) | {"layer_types": kinds}
    return {"sliding_window": value} if architecture.startswith("gemma") and value else None


def pattern(architecture: str, value: Any, given: dict[str, Any], config: Any) -> dict[str, Any] | None:
    n = config.num_hidden_layers
    if architecture not in ("gemma2", "gemma3") or isinstance(value, float | str | bool):
        return None
    if value is None:
        sliding = [(i + 1) % {"gemma2": 2, "gemma3": 6}[architecture] > 0 for i in range(n)]
    elif isinstance(value, list):
        sliding = [bool(x) for x in value]
    else:
        sliding = [value == 0 or (i + 1) % value > 0 for i in range(n)]
    kinds = ["sliding_attention" if here else "full_attention" for here in sliding]
    return {"layer_types": kinds} if len(kinds) == n else None


def rope(architecture: str, key: str, value: Any, rotary: dict[str, Any]) -> dict[str, Any] | None:
    full, x = rotary.get("full_attention", rotary), number(value)
    linear = full["rope_type"] == "linear"
    if key == "rope.freq_base" and (x or (value is None and architecture != "gemma3")):
        full["rope_theta"] = float(np.float32(x)) if x else 10000.0
    elif key == "rope.freq_base_swa" and architecture == "gemma3" and (x or value is None):
        rotary["sliding_attention"]["rope_theta"] = float(np.float32(x)) if x else 10000.0
    elif key in ("rope.scale_linear", "rope.scaling.factor") and x == 1 and not linear:
        return {}
    elif architecture == "phi3" and "scal" in key:
        return None  # transformers does not scale it so
    elif (key == "rope.scale_linear" and x and not linear) or (key == "rope.scaling.factor" and x):
        full |= {"rope_type": "linear", "factor": float(np.float32(x))}
    elif key == "rope.dimension_count" and architecture in ("phi3", "stablelm", "nemotron") and value == 4:
        full["partial_rotary_factor"] = 0.5
    else:
        return None
    return {"rope_parameters": rotary}


def stating(model: Any, changes: dict[str, Any]) -> Any:
    """The model with this configuration; a Llama with a window is a Mistral, and a Mistral without one a Llama."""
    kind, config = type(model), type(model.config)
    if kind.__name__ in ("LlamaForCausalLM", "MistralForCausalLM") and "sliding_window" in changes:
        name = "Mistral" if changes["sliding_window"] else "Llama"
        kind, config = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
    arguments = copy.deepcopy(model.config.to_dict()) | changes
    arguments.pop("model_type")
    fresh = kind(config(**arguments)).float()
    fresh.load_state_dict(model.state_dict())
    fresh.set_attn_implementation("eager")
    return fresh.eval()


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def cases(given: dict[str, Any], n_layers: int) -> list[tuple[str, Any]]:
    """A key and its new value; None where it is removed."""
    found: list[tuple[str, Any]] = [(key, None) for key in given]
    for n, key in enumerate(all_keys()):
        values = VALUES if key in given or key in KNOWN else (VALUES[n % 9], VALUES[(n + 4) % 9])
        found += [(key, value) for value in values if given.get(key) != value]
    found += [("attention.sliding_window_pattern", [n % 2 for n in range(n_layers)])]
    found += [("rope.dimension_count", 4), ("rope.freq_base", 300.0), ("rope.freq_base_swa", 300.0)]
    found += [("attention.sliding_window", 7), ("context_length", 64), ("block_count", 2**31), ("vocab_size", 2**40)]
    found += [(key, 2**31) for key in ("embedding_length", "attention.head_count", "feed_forward_length")]
    return [*found, ("attention.key_length", 2**31), ("attention.head_count", -4), ("attention.scale", 0.125)]


def judged(name: str, folder: Path) -> tuple[Counter[str], list[str]]:
    """How many cases are right and refused, and which are wrong."""
    architecture = files.MODELS[name][0]
    model, tokens = files.model_of(name), zoo.random_tokens(40)
    files.write_gguf(path := folder / "model.gguf", model, architecture)
    given = {key: x for key, x in files.metadata_of(model, architecture).items() if x is not None}
    pieces, counted, wrong = files.Pieces.of(path), Counter[str](), []
    known: dict[str, Tensor] = {}
    for key, value in cases(given, model.config.num_hidden_layers):
        path.write_bytes(pieces.joined({f"{architecture}.{key}": value}))
        case = f"{architecture}.{key} = {value}"
        try:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                read, _ = read_gguf(path, dtype=torch.float32)
        except ValueError as error:
            counted["refused"] += 1
            if f"{architecture}.{key}" not in str(error) or "\n" in str(error):
                wrong.append(f"{case} is refused, but not by its name: {error}")
            continue
        same = default(key, value, given, model.config)
        changes = {} if same else meant(architecture, key, value, given, model.config)
        if changes is None:
            wrong.append(f"{case} is not refused")
            continue
        if repr(changes) not in known:
            known[repr(changes)] = logits(stating(model, changes), tokens)
        expected = known[repr(changes)]
        error = float((logits(read, tokens) - expected).abs().max() / expected.abs().max())
        counted["right"] += 1
        if not error < 1e-4:
            wrong.append(f"{case}: the logits are {error:.2g} from those of a model that states the same")
    return counted, wrong


def default(key: str, value: Any, given: dict[str, Any], config: Any) -> bool:
    """Whether the value is the file's own, or left out where another key says the same."""
    heads = given["attention.head_count"]
    head = given["attention.key_length"]
    implied = {
        "attention.head_count_kv": heads,
        "attention.key_length": config.hidden_size // heads,
        "rope.dimension_count": head,
        "rope.scaling.type": "linear",  # beside a factor
    }
    if value is None:
        return key in implied and given[key] == implied[key]
    stated = {"vocab_size": 1024, "attention.value_length": head, "attention.scale": head**-0.5} | given
    stated |= {"expert_gating_func": 1, "expert_weights_scale": 1.0}
    stated |= {"expert_weights_norm": getattr(config, "norm_topk_prob", None), "attention.max_alibi_bias": 8.0}
    parallel = getattr(config, "parallel_attn", None)
    stated |= {"use_parallel_residual": parallel}
    return bool(stated.get(key) == value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RIGHT]
)
def test_each_key_is_computed_with_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    counted, wrong = judged(name, tmp_path)
    assert not wrong, "\n".join(wrong)
    assert counted["right"] >= RIGHT[name], counted
