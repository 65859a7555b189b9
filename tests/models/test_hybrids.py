"""Models that mix attention with other layers: the layers that attend are taken, and the others are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import zoo

from tl_posdisent import additivity, bridge_from_hf, capture, read_model, swap_positions

BASE = {
    **{"vocab_size": zoo.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "shared_expert_intermediate_size": 32,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**BASE, **DELTA, **EXPERTS},
    "Lfm2": {**BASE, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "Jamba": {
        **{**BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2},
        **{"num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "Bamba": {**BASE, **MAMBA, "attn_layer_indices": [1, 3]},
}
WITHOUT: dict[str, dict[str, Any]] = {
    "Mamba": {"vocab_size": zoo.VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "RecurrentGemma": {
        **{**BASE, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 32},
        "block_types": ["recurrent", "attention"],
    },
}


def bridge(name: str, arguments: dict[str, Any]) -> Any:
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**arguments))
    return bridge_from_hf(model.eval())


@zoo.needs_bridge
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_layers_that_attend_are_taken(name: str) -> None:
    model, tokens = bridge(name, HYBRIDS[name]), zoo.random_tokens()
    reading = read_model(model)
    assert ([spec.layer for spec in reading.specs()], reading.without_attention) == ([1, 3], (0, 2))
    assert [layer.layer for layer in capture(model, tokens)] == [1, 3]
    assert set(additivity(model, tokens, progress=False)["layer"]) == {1, 3}
    if reading.specs(1)[0].rotary is not None:
        with torch.no_grad(), model.hooks(fwd_hooks=swap_positions(model, torch.arange(12))):
            same = model(tokens)
        with torch.no_grad():
            torch.testing.assert_close(same, model(tokens), rtol=1e-4, atol=1e-5)


@zoo.needs_bridge
def test_a_layer_without_attention_is_named() -> None:
    reading = read_model(bridge("Lfm2", HYBRIDS["Lfm2"]))
    for ask in (
        lambda: read_model(reading.model, 0),
        lambda: reading.specs([1, 0]),
        lambda: reading.heads(heads=[(0, 1)]),
    ):
        with pytest.raises(ValueError, match=r"layers must have attention, got .*0.* of Lfm2ForCausalLM"):
            ask()


@zoo.needs_bridge
@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_attention_are_refused_by_name(name: str) -> None:
    model = bridge(name, WITHOUT[name])
    for function in (
        read_model,
        lambda m: additivity(m, zoo.random_tokens()),
        lambda m: swap_positions(m, torch.arange(12)),
    ):
        with pytest.raises(ValueError, match=f"model must have attention layers .*, got {name}ForCausalLM"):
            function(model)
