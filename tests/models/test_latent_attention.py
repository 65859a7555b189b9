"""Multi-head latent attention: vectors before and after the rotation of a slice, and the scores that they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.readings import assert_described


@pytest.mark.parametrize("name", zoo.names("deepseek_v3", "deepseek_v2", "glm4-lite", "youtu"))
def test_scores_are_those_of_the_description(name: str, shared_model: Any) -> None:
    own = zoo.hf_model(name).model.rotary_emb.inv_freq.double()
    for spec in assert_described(shared_model("bridge", name), zoo.random_tokens()):
        assert torch.equal(spec.rotary.frequencies, own)
        assert spec.rotary.pairing == ("adjacent" if name == "deepseek_v2" else "half")  # it has complex numbers
        assert (spec.n_kv_heads, spec.d_head) == (8, 20)


def test_keys_that_an_index_chooses() -> None:
    """As many as the text has, or fewer: up to that length the description holds (GLM-5)."""
    arguments = zoo.ARCHITECTURES["deepseek_v3"].arguments | {"index_n_heads": 2, "index_head_dim": 16}
    config = transformers.GlmMoeDsaConfig(**arguments, index_topk=12, attn_implementation="eager")
    hf = transformers.GlmMoeDsaForCausalLM(config).float().eval()
    zoo.randomise(hf, 0.15, 1.0)
    specs = assert_described(zoo.as_bridge(hf), zoo.random_tokens())
    assert [spec.limits.holds_to for spec in specs] == [12, 12]
