"""Architectures that cannot be measured, or not by every tool: what is said of each is the reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from support import zoo
from support.attention_law import ON_ROTATION, tried
from support.zoo_configs import _SLIDING, _grouped

from tl_posdisent import (
    additivity,
    read_model,
)
from tl_posdisent.experiments import positional_subspace
from tl_posdisent.utils.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")
TOKENS = zoo.random_tokens()


def bridge(family: str, arguments: dict[str, Any], config: str = "") -> Any:
    kinds = [getattr(transformers, name, None) for name in (f"{family}ForCausalLM", config or f"{family}Config")]
    if None in kinds:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    made = kinds[1](**arguments)
    made._attn_implementation = "eager"
    model = kinds[0](made).float()
    zoo.randomise(model, 0.2, 0.7)
    return zoo.as_bridge(model.eval())


# --- blocks that run several times ---


TOOLS = {
    "read_model": read_model,
    "positional_subspace": lambda m: positional_subspace(m, TOKENS, 0),
}


def test_hrm_text() -> None:
    more = {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "head_dim": 8}
    model = bridge("HrmText", _grouped(**more))
    for tool in TOOLS.values():
        with pytest.raises(
            ArgumentError, match=r"model must have one block for each of its \d+ layers.* got 0 in HrmText"
        ):
            tool(model)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("loop", ["shared", "stated"])
def test_a_block_that_runs_twice(loop: str, tool: str) -> None:
    """Hooks of its second run would be those of the first."""
    hf = zoo.hf_model("llama-gqa")
    if loop == "shared":
        hf.model.layers[1] = hf.model.layers[0]
    else:  # as in Ouro's configuration
        hf.config.total_ut_steps = 4
    with pytest.raises(ArgumentError, match=r"model must run each block once in a pass, .* some several times"):
        TOOLS[tool](zoo.as_bridge(hf))


def test_without_the_hooks_of_the_stream_and_of_scores() -> None:
    more = {"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    more |= {"moe_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "head_dim": 16}
    more |= {"layer_types": [_SLIDING] * 2, "mlp_layer_types": ["moe"] * 2, "partial_rotary_factor": 0.5}
    model = bridge(
        "DeepseekV4",
        {n: x for n, x in _grouped(**more).items() if n not in ("num_key_value_heads",)} | {"rope_parameters": None},
    )
    for layer in (0, 1):
        with pytest.raises(
            ArgumentError, match=f"model must have the hook blocks.{layer}.hook_resid_pre, which DeepseekV4"
        ):
            positional_subspace(model, TOKENS, layer)
    with pytest.raises(ValueError, match="TransformerLens has no hooks of its queries and keys"):
        additivity(model, TOKENS, progress=False)


# --- models of TransformerLens's own class ---


@pytest.mark.parametrize("positions", ["rotary", "standard"])
def test_laws_on_boot_native(positions: str) -> None:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    if not hasattr(TransformerBridge, "boot_native"):
        pytest.skip("this TransformerLens has no boot_native")
    shape = {"d_model": 64, "d_head": 8, "n_heads": 8, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "d_mlp": 96}
    config = TransformerBridgeConfig(
        **shape, act_fn="gelu", normalization_type="LN", positional_embedding_type=positions, rotary_dim=8, seed=0
    )
    model = TransformerBridge.boot_native(config)
    refused = {tool for tool, why in tried(model).items() if why}
    assert refused == (set() if positions == "rotary" else {*ON_ROTATION, "patch_vectors"})
