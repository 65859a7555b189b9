"""Laws of a GGUF file's metadata: a key is computed with, or refused by its name; none is passed over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.tolerance import rounding

gguf = pytest.importorskip("gguf", reason="needs gguf (make smollm2 installs it)")
files = pytest.importorskip("support.gguf_files")

NAMES = ["llama-gqa", pytest.param("gemma3", marks=pytest.mark.slow)]
HARMLESS = {"pooling_type", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
NEUTRAL = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "rope.scaling.type": "none",
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), 0.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 0.0),
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale", "rope.scaling.attn_factor"), 1.0),
    **dict.fromkeys(("expert_count", "expert_used_count"), 0),
}
SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
SIZES += ("attention.head_count_kv", "attention.key_length")
COMPUTED = {"context_length", "rope.freq_base", "rope.scaling.factor", "attention.layer_norm_rms_epsilon"}


def rotary(config: Any, kind: str = "full_attention", **changes: Any) -> dict[str, Any]:
    """A change of the configuration's rotary embedding, in one kind of layers."""
    whole = copy.deepcopy(config.rope_parameters)
    whole.get(kind, whole).update(changes)
    return {"rope_parameters": whole}


# Keys, a value that the file does not have, and the configuration of transformers that means the same.
MEANT: dict[str, list[tuple[str, Any, Callable[[Any], dict[str, Any]]]]] = {
    "llama-gqa": [
        ("attention.layer_norm_rms_epsilon", 0.375, lambda config: {"rms_norm_eps": 0.375}),
        ("context_length", 64, lambda config: {"max_position_embeddings": 64}),
        ("rope.freq_base", 300.0, lambda config: rotary(config, rope_theta=300.0)),
        ("rope.scaling.factor", 3.0, lambda config: rotary(config, rope_type="linear", factor=3.0)),
    ],
    "gemma3": [
        ("attention.sliding_window", 7, lambda config: {"sliding_window": 7}),
        ("rope.freq_base", 300.0, lambda config: rotary(config, rope_theta=300.0)),
        ("rope.freq_base_swa", 300.0, lambda config: rotary(config, "sliding_attention", rope_theta=300.0)),
        ("rope.scaling.factor", 3.0, lambda config: rotary(config, factor=3.0)),
    ],
}


def all_keys() -> set[str]:
    """Every key of an architecture that the package gguf has, and some that nobody has."""
    found = {"rope.unheard_of", "attention.unheard_of", "unheard_of", "attention.heads.unheard_of"}

    def collect(group: Any) -> None:
        for name, value in vars(group).items():
            if isinstance(value, str) and value.startswith("{arch}.") and "{" not in value[7:]:
                found.add(value[7:])
            elif isinstance(value, type) and not name.startswith("_"):
                collect(value)

    collect(gguf.Keys)
    return found


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """``written(name, changes)``: a file with other values of keys; None drops one."""

    def write(name: str, changes: dict[str, Any]) -> Path:
        path = tmp_path / "model.gguf"
        if not path.exists():
            files.write_gguf(path, files.model_of(name), files.MODELS[name][0])
            whole.append(files.Pieces.of(path))
        path.write_bytes(whole[0].joined({named(name, key): value for key, value in changes.items()}))
        return path

    whole: list[Any] = []
    return write


def named(name: str, key: str) -> str:
    """A key as a file and errors name it."""
    return f"{files.MODELS[name][0]}.{key}"


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(zoo.random_tokens(40), use_cache=False).logits


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_computed_with(name: str, written: Callable[..., Path]) -> None:
    model = files.model_of(name)
    for key, value, changes in MEANT[name]:
        read, _ = files.read_gguf(written(name, {key: value}), dtype=torch.float32)
        expected = logits_of(files.with_config(model, **changes(model.config)))
        torch.testing.assert_close(logits_of(read), expected, rtol=0, atol=1e-4 * float(expected.abs().max()), msg=key)


def test_keys_that_change_nothing(written: Callable[..., Path]) -> None:
    """Those that say what other keys or the tensors say, too."""
    model = files.model_of("llama-gqa")
    head, n_keys = model.config.head_dim, model.config.num_key_value_heads
    same = {"vocab_size": 1024, "attention.value_length": head, "attention.scale": head**-0.5}
    same |= {"attention.head_count_kv": [n_keys] * model.config.num_hidden_layers}
    path = written("llama-gqa", {**dict.fromkeys(HARMLESS, 3), **NEUTRAL, **same})
    read, _ = files.read_gguf(path, dtype=torch.float32)
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(read), expected, rtol=0, atol=rounding(expected, 16))


@pytest.mark.parametrize("name", NAMES)
def test_every_other_key_is_refused_by_its_name(name: str, written: Callable[..., Path]) -> None:
    left = all_keys() - HARMLESS - COMPUTED - {key for key, *_ in MEANT[name]}
    assert len(left) > 100
    for key in sorted(left):
        assert named(name, key) in files.error_of(written(name, {key: 0.375})), key


@pytest.mark.parametrize("name", NAMES)
def test_values_that_cannot_be_are_refused_by_their_key(name: str, written: Callable[..., Path]) -> None:
    """Before anything of that size is built."""
    for key in (*SIZES, *sorted(COMPUTED)):
        of_tensors: tuple[Any, ...] = (2**31, 2**30, 1) if key in SIZES else ()  # others than the tensors have
        for value in (*of_tensors, 0, -4, True, "linear", [1, 0]):
            assert named(name, key) in files.error_of(written(name, {key: value})), (key, value)
    for key in SIZES[:4]:
        assert f"it does not state {named(name, key)}" in files.error_of(written(name, {key: None}))
