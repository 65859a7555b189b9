"""A text in blocks of queries has the fits of one pass, in every model that can be run so; others are refused."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.untouched import state

import tl_posdisent as tp
from tl_posdisent.additive.cells import make_cells
from tl_posdisent.additive.marginals import add_rows, no_marginals

MODELS = zoo.cases("llama-gqa", "neox", "qwen3", "mistral", "gemma2", "gpt2")


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.usefixtures("unchecked")
def test_blocks_give_what_one_pass_gives(kind: str, name: str, shared_model: Any) -> None:
    """Blocks that do not divide the text, pooled texts and masks included; the model is left as it was."""
    model, tokens = shared_model(kind, name), zoo.random_tokens(40)
    before = state(model)
    late = (torch.arange(40) > 9).expand(40, 40).T & (torch.arange(40) > 2)
    for arguments in ({}, {"pool": True}, {"mask": late}, {"layers": [1]}):
        whole = tp.additivity(model, tokens, progress=False, **arguments)
        for block in (7, 64):
            parts = tp.additivity(model, tokens, block=block, progress=False, **arguments)
            pd.testing.assert_frame_equal(parts, whole, atol=1e-6, rtol=0)
    assert state(model) == before


def test_marginals_of_rows_add_up() -> None:
    """Whatever the pivots: first rows of another mean, a window, a single row at the end."""
    scores = torch.randn(2, 3, 50, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[:, :, :20] += 100.0
    cells = make_cells(scores.shape, "causal", 9)
    total = no_marginals(scores.shape[:2], cells)
    for first, stop in ((0, 20), (20, 49), (49, 50)):
        rows = scores[..., first:stop, :stop]
        total = add_rows(total, rows, make_cells(rows.shape, "causal", 9), cells, first=first)
    inside = cells.to_mask()
    residual = torch.where(inside, scores - total.pivot[..., None, None], 0.0)
    sums = cells.split(total.sums)
    assert torch.allclose(sums.query, residual.sum(-1))
    assert torch.allclose(sums.key, residual.sum(-2))
    by_hand = torch.stack([residual.diagonal(-d, -2, -1).sum(-1) for d in range(9)], -1)
    assert torch.allclose(sums.distance, by_hand)
    assert torch.allclose(total.squares, residual.square().sum((-2, -1)))


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    """Hooks of the user's, models that show no scores, and ALiBi, which a cache of TransformerLens displaces."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=32)
    with (
        model.hooks(fwd_hooks=tp.dummy_distance(model, 3)),
        pytest.raises(ValueError, match="block must be None, or the model without hooks"),
    ):
        tp.additivity(model, tokens, block=8, progress=False)
    for block in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="block must be an integer of at least 1"):
            tp.additivity(model, tokens, block=block, progress=False)
    with pytest.raises(ValueError, match='block must be None with mask="full"'):
        tp.additivity(model, tokens, block=8, mask="full", progress=False)
    with pytest.raises(ValueError, match="block must be None: layer 0 of GPTJForCausalLM does not show its scores"):
        tp.additivity(zoo.bridge("gptj"), zoo.random_tokens(), block=4, progress=False)


@pytest.mark.parametrize("kind", ["bridge", "hooked"])
def test_wrong_scores_behind_a_cache_are_noticed(kind: str) -> None:
    name = {"bridge": "mpt", "hooked": "bloom"}[kind]
    with pytest.raises(ValueError, match="block must be None: with a cache"):
        tp.additivity(zoo.load(kind, name), zoo.random_tokens(), block=4, progress=False)


# --- narrow types ---------------------------------------------------------------------------------------------


def test_bfloat16_is_widened_layer_by_layer() -> None:
    """Scores of a bfloat16 model are fitted in float64, as are its queries and keys: what remains is their rounding."""
    model, tokens = zoo.bridge("llama-gqa").to(torch.bfloat16), zoo.random_tokens(64, 1)
    table = tp.additivity(model, tokens, progress=False)
    controlled = tp.controlled_distance(model, tokens, progress=False)
    for layer in tp.capture(model, tokens):
        assert layer.q_rot.dtype == layer.scores.dtype == torch.bfloat16
        own = table[table["layer"] == layer.layer]["r"]
        wide = tp.fit_additive(layer.scores.double())
        assert own.tolist() == pytest.approx(wide.r[0].tolist(), abs=1e-12)  # not one sum was made in 16 bits
        scale = layer.spec.require_scale()
        linear, float32 = (
            tp.fit_additive_qk(q, k, scale=scale).r
            for q, k in ((layer.q_rot, layer.k_rot), (layer.q_rot.float(), layer.k_rot.float()))
        )
        assert torch.equal(linear, float32)
        assert own.tolist() == pytest.approx(linear[0].tolist(), abs=0.01)  # scores that were rounded to 8 bits
        shares = tp.rope.decompose(
            tp.rope.Moments.from_qk(layer.q.double(), layer.k.double(), layer.spec.rotary), range(64), scale=scale
        )
        of_layer = controlled[controlled["layer"] == layer.layer]["r_three_axis"]
        assert of_layer.tolist() == pytest.approx(shares.to_frame()["r_three_axis"].tolist(), abs=1e-9)
