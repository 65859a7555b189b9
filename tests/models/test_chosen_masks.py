"""A mask that the model itself chooses: it stays, and texts are as long as it is known for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.attention_law import LENGTH, TOKENS
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import additivity, capture, dummy_distance, read_model, remap_distance, swap_positions
from tl_posdisent.hooks import applied

pytestmark = pytest.mark.usefixtures("unchecked")

GLM_5 = {
    **{"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_group": 1},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_group": 1, "pad_token_id": 0},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_n_heads": 2, "index_head_dim": 16, "max_position_embeddings": 256},
}


def glm_5(index_topk: int) -> Any:
    """GLM-5, in which a learned index chooses the keys that a query sees."""
    config = transformers.GlmMoeDsaConfig(**GLM_5, index_topk=index_topk, attn_implementation="eager")
    model = transformers.GlmMoeDsaForCausalLM(config).float().eval()
    zoo.randomise(model, 0.15, 1.0)
    return zoo.as_bridge(model)


def test_it_stays_as_it_is() -> None:
    """Rotations of the index are not those of attention."""
    model = glm_5(LENGTH - 1)
    reading, masks = read_model(model), list[Tensor]()
    watch = [("blocks.0.attn.hook_dsa_mask", lambda x, hook: masks.append(x))]

    def run(hooks: Any) -> Tensor:
        with torch.no_grad(), applied(model, [*hooks, *watch]):
            return model(TOKENS)

    plain = run([])
    assert bool((masks[0] < 0)[:, -1].any())  # the index hides a key of the last token
    for hooks in (swap_positions(reading, lambda p: p + 3), remap_distance(reading, lambda d: d.clamp(max=LENGTH))):
        torch.testing.assert_close(run(hooks), plain, rtol=0, atol=rounding(plain, 16))
    table = torch.full((LENGTH, LENGTH), 5.0)
    one, other = (run(hooks) for hooks in (dummy_distance(reading, 5), remap_distance(reading, table)))
    torch.testing.assert_close(one, other, rtol=0, atol=rounding(plain, 16))
    assert (one - plain).abs().max() > 0.1
    assert all(torch.equal(mask[:, :1], masks[0][:, :1]) for mask in masks)


def test_refusals_say_how_long_texts_may_be() -> None:
    model, few = glm_5(11), glm_5(6)
    beyond = r"tokens must be at most {} long for capture, got 12: layer 0 of \w+ rotates, scales or masks longer texts"
    for tool in (capture, partial(additivity, progress=False)):
        with pytest.raises(ValueError, match=beyond.format(11)):
            tool(model, TOKENS)
    with pytest.raises(ValueError, match=beyond.format(6)):
        additivity(few, TOKENS, progress=False)
