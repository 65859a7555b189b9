"""The zoo computes what Hugging Face computes, and every peculiarity that a test could rest on shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

pytestmark = pytest.mark.tl4

TOKENS = zoo.random_tokens(length=12)


def assert_same_logits(got: Tensor, expected: Tensor) -> None:
    """Equal to 1e-4 of the scale of the logits; TransformerLens sums in another order than Hugging Face."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * scale)


@torch.no_grad()
def effect(name: str, **changes: Any) -> float:
    """How far a change of the config moves the logits, relative to their standard deviation."""
    changed = zoo.hf_model(name, **changes)(TOKENS).logits
    original = zoo.hf_logits(name, TOKENS)
    return ((changed - original).std() / original.std()).item()


@pytest.mark.parametrize(("kind", "name"), zoo.every_case())
def test_logits_are_those_of_hugging_face(kind: str, name: str, shared_model: Any) -> None:
    with torch.no_grad():
        got = shared_model(kind, name)(TOKENS, return_type="logits")
    assert_same_logits(got, zoo.hf_logits(name, TOKENS))


THEN_GLOBAL = {"layer_types": ["full_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("mistral", {"sliding_window": None}, id="window of mistral"),
        pytest.param("gemma2", THEN_GLOBAL, id="window of gemma2"),
        pytest.param("gemma3", {"sliding_window": 64}, id="window of gemma3"),
        pytest.param("gpt_oss", THEN_GLOBAL, id="window of gpt_oss"),
        pytest.param("gpt_neo", {"window_size": 64}, id="window of gpt_neo"),
        pytest.param("gemma2", {"attn_logit_softcapping": None}, id="soft cap of gemma2"),
        pytest.param("gemma2", {"query_pre_attn_scalar": 16}, id="scale of gemma2"),
        pytest.param("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="llama3"),
        pytest.param("llama-yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="yarn"),
        pytest.param("smollm3", {"no_rope_layers": [1, 1]}, id="layer without rotation of smollm3"),
        pytest.param("deepseek_v3", {"rope_interleave": False}, id="pairing of deepseek_v3"),
    ],
)
def test_every_peculiarity_bites(name: str, changes: dict[str, Any]) -> None:
    assert effect(name, **changes) > 0.02
