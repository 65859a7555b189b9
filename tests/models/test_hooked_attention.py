"""HookedTransformer, and models with its modules and names: the description gives the layer's own scores."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from support import zoo
from support.readings import assert_described

from tl_posdisent import dummy_distance, read_model
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
from tl_posdisent.synthetic.model.config import EncodingName

TOKENS = zoo.random_tokens()
SIZES = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "d_mlp": 48}
NAMES = [name for name in zoo.HOOKED_NAMES if name != "bloom"]
CASES = [pytest.param(name, marks=[] if name in ("llama-gqa", "olmo2") else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_description(name: str, shared_model: Any) -> None:
    assert_described(shared_model("hooked", name), TOKENS)


def test_the_table_that_a_layer_has_is_read() -> None:
    """Also if it was changed in place, in one layer."""
    model = zoo.hooked("llama-gqa")
    attn = model.blocks[1].attn
    angle = torch.arange(len(attn.rotary_cos))[:, None] * (50_000.0 ** (-torch.arange(4) / 4)).repeat(2)
    attn.rotary_cos.copy_(angle.cos())
    attn.rotary_sin.copy_(angle.sin())
    specs = assert_described(model, TOKENS)
    assert [spec.rotary.base for spec in specs] == pytest.approx([500, 50_000], rel=1e-4)


@zoo.needs_hooked
@pytest.mark.parametrize(
    "more",
    [
        {"positional_embedding_type": "rotary", "rotary_dim": 0},
        {"positional_embedding_type": "rotary", "rotary_dim": 4, "rotary_adjacent_pairs": True, "n_ctx": 4096},
        {"positional_embedding_type": "shortformer"},
        {"scale_attn_by_inverse_layer_idx": True, "attn_scores_soft_cap": 3.0},
        {"use_attn_scale": False, "use_local_attn": True, "window_size": 5, "attn_types": ["local", "global"]},
        {"attention_dir": "bidirectional"},
    ],
)
def test_settings(more: dict[str, Any]) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    options = SIZES | {"act_fn": "gelu", "normalization_type": "LN", "device": "cpu", "seed": 0} | more
    assert_described(HookedTransformer(HookedTransformerConfig(**options)), TOKENS)


@pytest.mark.filterwarnings("ignore:HookedEncoder is deprecated")
@zoo.needs_hooked
def test_an_encoder_attends_both_ways() -> None:
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    options = SIZES | {"act_fn": "gelu", "normalization_type": "LN", "device": "cpu", "init_weights": False}
    model = HookedEncoder(HookedTransformerConfig(**options, attention_dir="bidirectional"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert [spec.causal for spec in assert_described(model, TOKENS)] == [False, False]


def test_a_bias_is_named() -> None:
    for spec in read_model(zoo.hooked("bloom")).specs():
        assert "additive bias such as ALiBi" in str(spec.limits.problem)
        assert spec.taps.scores is not None


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_frequencies_of_each_head_are_named(kind: str) -> None:
    model = zoo.load(kind, "llama")
    if kind == "bridge":
        rotation = model.original_model.model.rotary_emb
        rotation.inv_freq = rotation.inv_freq * torch.ones(8, 1)
    else:
        for block in model.blocks:
            block.attn.rotary_cos, block.attn.rotary_sin = (
                x[:, None].expand(-1, 8, -1) for x in (block.attn.rotary_cos, block.attn.rotary_sin)
            )
    with pytest.raises(ValueError, match=r"layer 0 of \w+ cannot be edited: .* its heads rotate by frequencies"):
        dummy_distance(model, 3)


# --- synthetic models ---


def synthetic(**more: Any) -> SyntheticModel:
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_mlp": 64, "d_vocab": 61, "n_ctx": 24, "n_out": 7}
    return SyntheticModel(SyntheticConfig(**sizes, **more))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("encoding", [name for name in get_args(EncodingName) if name not in ("alibi", "t5")])
def test_synthetic_models(encoding: EncodingName, causal: bool) -> None:
    for spec in assert_described(synthetic(encoding=encoding, causal=causal), TOKENS):
        assert (spec.rotary is not None) == ("rope" in encoding or "mla" in encoding)


@pytest.mark.parametrize("more", [{"encoding": "alibi"}, {"encoding": "t5"}, {"rotary_heads": 2}], ids=str)
def test_synthetic_models_whose_scores_are_no_product(more: dict[str, Any]) -> None:
    model = synthetic(**more)
    with pytest.raises(ValueError, match=r"needs rotary .* layer 0 of \w+ cannot be edited: its scores are not scale"):
        dummy_distance(model, 3)
    for spec in read_model(model).specs():
        assert spec.limits.problem is not None
        assert (spec.taps.q, spec.rotary) == (None, None)
        assert spec.taps.scores is not None


@pytest.mark.parametrize("heads", [0, 4])
def test_no_head_or_every_head_rotates(heads: int) -> None:
    assert [spec.rotary is None for spec in assert_described(synthetic(rotary_heads=heads), TOKENS)] == [heads == 0] * 2
