"""Fits that leave the first keys out: those of dense least squares on the cells that remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import additivity, fit_additive


def test_a_sink_hides_an_additive_head() -> None:
    i = torch.arange(12.0)
    x = -0.4 * (i[:, None] - i) + torch.sin(i)
    x[:, 0] = torch.cos(7 * i)  # what the queries think of the first token is not additive
    assert fit_additive(x, sinks=1).r.item() == pytest.approx(1, abs=1e-9)
    assert fit_additive(x).r.item() < 0.999


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "mistral"))
def test_additivity_leaves_the_first_keys_of_every_text_out(kind: str, name: str, shared_model: Any) -> None:
    model, tokens = shared_model(kind, name), zoo.random_tokens(length=12, batch=3)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0  # padded on the left: its first keys are the columns 3 and 4
    table = additivity(model, tokens, attention_mask=mask, sinks=2, progress=False)
    left_out = (torch.arange(12) >= 2).expand(12, 12)
    other = additivity(model, tokens, attention_mask=mask, mask=left_out, progress=False)
    assert table["r"].tolist() == pytest.approx(other["r"].tolist(), abs=1e-9)
    assert (table["r"] - additivity(model, tokens, attention_mask=mask, progress=False)["r"]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="sinks must be an integer from 0 to 7, got 8"):
        additivity(model, tokens, attention_mask=mask, sinks=8, progress=False)
