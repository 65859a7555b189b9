"""Losses under interventions are those of the model's own runs, and of token losses by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tl_posdisent as tp
from tl_posdisent.experiments.causal.intervention_losses import intervention_losses


def test_losses_are_those_of_runs_with_hooks() -> None:
    """Also of an intervention that changes nothing, and the model is as before."""
    model, tokens = tp.load_demo_model(), tp.demo_tokens(length=96).view(4, 24)
    hooks: dict[str, Any] = {
        "same distances": tp.remap_distance(model, lambda d: d),
        "one distance": tp.dummy_distance(model, 1),
        "no head 3": tp.ablate_heads(model, [3], layers=[0, 4]),
    }
    clean = model(tokens)
    table = intervention_losses(model, tokens, hooks).set_index("intervention")
    assert torch.equal(model(tokens), clean)
    assert list(table.index) == ["unmodified", *hooks]
    for name, row in table.iterrows():
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks.get(name, []))
        by_token = torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
        first = torch.nn.functional.cross_entropy(clean[:, :-1].mT, tokens[:, 1:], reduction="none")
        added = (by_token - first).double().mean(1)
        assert row["loss"] == pytest.approx(by_token.mean().item(), abs=1e-5)
        assert row["added_loss"] == pytest.approx(added.mean().item(), abs=1e-5)
        assert row["added_loss_se"] == pytest.approx(added.std().item() / 2, abs=1e-5)
        assert row["accuracy"] == pytest.approx((logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean().item())
        pairs = logits[:, :-1].double().log_softmax(-1), clean[:, :-1].double().log_softmax(-1)
        kl = torch.nn.functional.kl_div(*pairs, reduction="sum", log_target=True) / by_token.numel()
        assert row["kl"] == pytest.approx(kl.item(), abs=1e-5)
    assert table["kl"].tolist()[:2] == pytest.approx([0, 0], abs=1e-5)
    assert table["kl"].min() > -1e-6
    assert table["kl"].iloc[2] > 0.1


def test_one_text_has_no_standard_error() -> None:
    model = tp.load_demo_model()
    table = intervention_losses(model, tp.demo_tokens(length=16), {"zero": tp.ablate_heads(model, None)})
    assert all(math.isnan(error) for error in table["added_loss_se"])
