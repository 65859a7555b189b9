"""Losses and divergences by token are those of the definitions, computed a piece at a time."""

from __future__ import annotations

import pytest
import torch
from support.live_bytes import LiveBytes

from tl_posdisent import load_demo_model
from tl_posdisent.experiments.causal import metrics as predictions
from tl_posdisent.models.texts import read_texts


@pytest.mark.parametrize("at_a_time", [1, 3 * 512 * 3, 3 * 512 * 24, 2**40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_divergences(at_a_time: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 tokens in pieces of 1, 3 (the last has the last token alone), 24 or all."""
    monkeypatch.setattr(predictions, "_AT_A_TIME", at_a_time)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 512, (3, 25), generator=generator)
    logits, clean = (torch.randn(3, 25, 512, generator=generator).to(dtype) for _ in range(2))
    texts, log_p = read_texts(load_demo_model(), tokens, torch.ones_like(tokens)), clean.float().log_softmax(-1)
    with torch.no_grad(), LiveBytes() as live:
        losses, divergences = predictions.compare([logits], texts, [log_p])
    expected = torch.nn.functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert losses.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    whole = torch.nn.functional.kl_div(logits.float().log_softmax(-1), log_p, reduction="none", log_target=True)
    torch.testing.assert_close(divergences.float(), whole.sum(-1).flatten(), atol=1e-5, rtol=1e-4)
    assert len(losses) == 3 * 24
    if at_a_time <= 3 * 512 * 3:
        assert live.most < log_p.nbytes
