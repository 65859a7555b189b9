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
from support import zoo
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")

NAMES = ["llama-gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "gemma3"))]
WORDS = ["rope.scale_linear", "rope.unheard_of", "attention.unheard_of", "unheard_of", "attention.heads.unheard_of"]
VALUES: tuple[Any, ...] = (0, 1, 3, 0.37, 1.0, True, False, "linear", [1, 0])
HARMLESS = {"pooling_type", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale", "rope.scaling.attn_factor"), 1.0),
    "rope.scale_linear": 1.0,
    **dict.fromkeys(("expert_count", "expert_used_count"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 0.0),
    "use_parallel_residual": False,
    "rope.scaling.type": "none",
}
KNOWN = {*NEUTRAL, "rope.scaling.factor", "rope.freq_base", "rope.freq_base_swa"}
KNOWN |= {"attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "vocab_size"}


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
    x = number(value)
    if key in HARMLESS or (key in NEUTRAL and number(value) == number(NEUTRAL[key]) and value == NEUTRAL[key]):
        return {}
    if key == "attention.layer_norm_rms_epsilon" and x:
        return {"rms_norm_eps": float(np.float32(x))}
    if key == "attention.sliding_window" and type(value) is int:
        read = {"sliding_window": value} if value else None
        return read if architecture == "gemma3" else None if value else {}
    if key == "context_length" and type(value) is int and value:
        return {"max_position_embeddings": value}
    return rope(architecture, key, value, copy.deepcopy(config.rope_parameters))


def rope(architecture: str, key: str, value: Any, rotary: dict[str, Any]) -> dict[str, Any] | None:
    full, x = rotary.get("full_attention", rotary), number(value)
    linear = full["rope_type"] == "linear"
    if key == "rope.freq_base" and (x or (value is None and architecture != "gemma3")):
        full["rope_theta"] = float(np.float32(x)) if x else 10000.0
    elif key == "rope.freq_base_swa" and architecture == "gemma3" and x:
        rotary["sliding_attention"]["rope_theta"] = float(np.float32(x))
    elif key == "rope.scaling.factor" and x == 1 and not linear:
        return {}
    elif key == "rope.scaling.factor" and x:
        full |= {"rope_type": "linear", "factor": float(np.float32(x))}
    else:
        return None
    return {"rope_parameters": rotary}


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
    found += [("attention.sliding_window_pattern", 6)]
    found += [("attention.head_count_kv", [given["attention.head_count_kv"]] * n_layers)]
    found += [("attention.head_count_kv", [*range(1, n_layers + 1)])]
    found += [] if "rope.scaling.type" in given else [("rope.scaling.type", "none")]
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
        same = default(key, value, given, model.config)
        changes = {} if same else meant(architecture, key, value, given, model.config)
        try:
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                read, _ = files.read_gguf(path, dtype=torch.float32)
        except ValueError as error:
            counted["refused"] += 1
            if changes == {}:
                wrong.append(f"{case} changes nothing, but is refused: {error}")
            if f"{architecture}.{key}" not in str(error) or "\n" in str(error):
                wrong.append(f"{case} is refused, but not by its name: {error}")
            continue
        if changes is None:
            wrong.append(f"{case} is not refused")
            continue
        if repr(changes) not in known:
            known[repr(changes)] = logits(files.with_config(model, **changes), tokens)
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
    if "sliding_attention" in getattr(config, "layer_types", ()):
        stated["attention.sliding_window_pattern"] = 6
    if isinstance(value, list) and value == value[:1] * config.num_hidden_layers:
        value = value[0]  # one number per layer
    return bool(stated.get(key) == value)


@pytest.mark.parametrize("name", NAMES)
def test_each_key_is_computed_with_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    counted, wrong = judged(name, tmp_path)
    assert not wrong, "\n".join(wrong)
    assert counted["right"] > 40, counted
