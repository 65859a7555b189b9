"""Controls of ``additivity``: scores that no head computes, from the model's own tensors or by a closed form."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import additivity, capture
from tl_posdisent.experiments.attention_scores.score_controls import for_each_control
from tl_posdisent.models import read_model

TOKENS = zoo.random_tokens(24)
CONTROLS = ("foreign keys",)
NUMBERS = ["r", "r2", "r2_adjusted", "share_distance", "share_query", "share_key", "r_no_distance", "r_held_out"]


def scores_of(control: Any, model: Any, tokens: Tensor = TOKENS, **more: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    specs = read_model(model).specs(more.get("layers"))

    def keep(name: str, spec: Any, scores: Tensor) -> None:
        if name == control:
            found[spec.layer] = scores.double()

    for_each_control([control], model, tokens, specs, keep)
    return found


# --- foreign keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2", "gpt2"))
def test_foreign_keys_are_those_of_the_next_key_head(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for layer in capture(model, TOKENS):
        group = layer.spec.n_heads // layer.spec.n_kv_heads
        for head in (0, 5, 7):
            other = (head // group + 1) % layer.spec.n_kv_heads
            expected = layer.spec.require_scale() * layer.q_rot[:, :, head] @ layer.k_rot[:, :, other].mT
            found = scores_of("foreign keys", model)[layer.layer][:, head]
            torch.testing.assert_close(found, layer.spec.capped(expected).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-mqa"))
def test_heads_that_share_one_key_head_meet_the_keys_of_the_next_layer(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    layers, found = capture(model, TOKENS), scores_of("foreign keys", model)
    for layer, other in zip(layers, [*layers[1:], layers[0]], strict=True):  # all layers have one rotation
        expected = layer.spec.require_scale() * layer.q_rot[:, :, 3] @ other.k_rot[:, :, 0].mT
        torch.testing.assert_close(found[layer.layer][:, 3], expected.double(), rtol=1e-4, atol=1e-4)
        alone = scores_of("foreign keys", model, layers=[layer.layer])  # whichever layers are asked for
        torch.testing.assert_close(alone[layer.layer], found[layer.layer], rtol=1e-5, atol=1e-6)


def test_heads_that_share_the_only_key_head_have_no_foreign_keys() -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 24, "d_vocab": 64, "attn_only": True}
    model = HookedTransformer(HookedTransformerConfig(**sizes, n_key_value_heads=1, seed=0)).eval()
    with pytest.raises(ValueError, match=r'^controls must not have "foreign keys" for layer 0 of .* no other layer'):
        additivity(model, TOKENS[:1], controls=["foreign keys"], progress=False)


def separable() -> Any:
    """A layer without positions in which scores of each head are a sum: queries vary where its keys do not."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 24, "d_vocab": 64, "act_fn": "relu"}
    options = {"n_key_value_heads": 2, "normalization_type": None, "attention_dir": "bidirectional", "attn_only": True}
    model = HookedTransformer(HookedTransformerConfig(**sizes, **options, seed=0)).eval()
    attention, generator = model.blocks[0].attn, torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.W_pos.zero_()
        model.embed.W_E.copy_(torch.randn(64, 8, generator=generator))
        for weight, rows in ((attention._W_K, ((2, 3), (0, 1))), (attention.W_Q, ((0, 1), (2, 3)))):
            weight.zero_()
            for head, columns in enumerate(rows):
                weight[head][:, columns] = torch.randn(8, 2, generator=generator).to(weight)
        for bias in (attention._b_K, attention.b_Q):
            bias.copy_(torch.randn(bias.shape, generator=generator))
    return model


def test_foreign_keys_of_heads_that_are_sums_give_what_a_formula_says() -> None:
    """Of ⟨q, k⟩ over all pairs, var = q̄ᵀ Σk q̄ + k̄ᵀ Σq k̄ + tr(Σq Σk), and only the last is no sum."""
    model, tokens = separable(), torch.randperm(64, generator=torch.Generator().manual_seed(0))[None, :24]
    table = additivity(model, tokens, controls=["foreign keys"], progress=False).set_index(["scores", "head"])
    assert table.loc["own", "r_no_distance"].to_numpy() == pytest.approx(1)
    (layer,) = capture(model, tokens)
    for head, other in ((0, 1), (1, 0)):
        q, k = layer.q[0, :, head].double(), layer.k[0, :, other].double()
        (of_q, of_k), (mean_q, mean_k) = (torch.cov(x.T, correction=0) for x in (q, k)), (q.mean(0), k.mean(0))
        pairs = (of_q @ of_k).trace()
        expected = 1 - pairs / (mean_q @ of_k @ mean_q + mean_k @ of_q @ mean_k + pairs)
        assert 0.1 < expected < 0.9
        assert table.loc[("foreign keys", head), "r_no_distance"] ** 2 == pytest.approx(expected.item(), abs=1e-5)


# --- the table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sinks": 2}, {"layers": [1]}])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_own_scores_of_the_table(kind: str, name: str, options: dict[str, Any], shared_model: Any) -> None:
    model, logits = shared_model(kind, name), None
    with torch.no_grad():
        logits = model(TOKENS)
    alone = additivity(model, TOKENS, progress=False, **options)
    table = additivity(model, TOKENS, controls=CONTROLS, progress=False, **options)
    assert table["scores"].unique().tolist() == ["own", *CONTROLS]
    own = table[table["scores"] == "own"].reset_index(drop=True)
    pd.testing.assert_frame_equal(own[alone.columns], alone)
    assert not table[NUMBERS].isna().any().any()
    with torch.no_grad():
        assert torch.equal(model(TOKENS), logits)


def test_padded_texts_equal_each_text_alone(shared_model: Any) -> None:
    model, lengths = shared_model("hooked", "llama-gqa"), (24, 15)
    real = torch.arange(24) < torch.tensor(lengths)[:, None]
    table = additivity(model, TOKENS, attention_mask=real.long(), controls=CONTROLS, progress=False)
    columns = ["layer", "head", "scores", "r", "share_key"]
    for n, length in enumerate(lengths):
        alone = additivity(model, TOKENS[n : n + 1, :length], controls=CONTROLS, progress=False)[columns]
        some = table[table["batch"] == n][columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(some.sort_values(columns[:3]), alone.sort_values(columns[:3]), rtol=1e-5)


def test_pooled_fits_have_controls(shared_model: Any) -> None:
    table = additivity(
        shared_model("hooked", "llama-gqa"), TOKENS, pool=True, controls=["foreign keys"], progress=False
    )
    assert table.groupby("scores").size().to_dict() == {"own": 16, "foreign keys": 16}


def test_scores_with_a_bias_of_the_distance_have_no_foreign_keys(shared_model: Any) -> None:
    model = shared_model("bridge", "bloom")
    additivity(model, TOKENS, progress=False)
    with pytest.raises(ValueError, match=f"layer 0 of {type(model.original_model).__name__}"):
        additivity(model, TOKENS, controls=["foreign keys"], progress=False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("control", [["foreign"], ["foreign keys", "foreign keys"]])
def test_unknown_controls_are_refused(control: Any, shared_model: Any) -> None:
    with pytest.raises(ValueError, match=r"^controls .*must be some of foreign keys"):
        additivity(shared_model("hooked", "llama-gqa"), TOKENS, controls=control, progress=False)
