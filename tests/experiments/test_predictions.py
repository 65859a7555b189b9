"""Losses and divergences by token are those of the definitions, computed a piece at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.live_bytes import LiveBytes

import tl_posdisent as tp
from tl_posdisent import load_demo_model
from tl_posdisent.experiments.measuring import token_losses
from tl_posdisent.models.running.texts import read_texts


@pytest.mark.parametrize("at_a_time", [1, 3 * 512 * 3, 3 * 512 * 24, 2**40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_divergences(at_a_time: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 tokens in pieces of 1, 3 (the last has the last token alone), 24 or all."""
    monkeypatch.setattr(token_losses, "_MAX_LOG_PROBABILITIES", at_a_time)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 512, (3, 25), generator=generator)
    logits, clean = (torch.randn(3, 25, 512, generator=generator).to(dtype) for _ in range(2))
    texts, log_p = read_texts(load_demo_model(), tokens, torch.ones_like(tokens)), clean.float().log_softmax(-1)
    compare = token_losses.by_token([clean], texts, range(3))
    with torch.no_grad(), LiveBytes() as live:
        losses, divergences = compare([logits]).flatten(0, 1).unbind(1)
    expected = torch.nn.functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert losses.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    whole = torch.nn.functional.kl_div(logits.float().log_softmax(-1), log_p, reduction="none", log_target=True)
    torch.testing.assert_close(divergences.float(), whole.sum(-1)[:, :-1].flatten(), atol=1e-5, rtol=1e-4)
    assert len(losses) == 3 * 24
    if at_a_time <= 3 * 512 * 3:
        assert live.most < log_p.nbytes


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_the_tools_have_one_divergence(kind: str, name: str, shared_model: Any) -> None:
    """KL(unmodified ‖ changed), averaged over the tokens of the texts but their first: of one head, by every tool."""
    model, quiet = shared_model(kind, name), {"progress": False}
    tokens, layer, head = zoo.random_tokens(length=8, batch=3), 0, 5
    one: dict[str, Any] = {"layers": layer, "heads": head}
    hooks = {"zero": tp.ablate_heads(model, head, layers=layer)}
    hooks["mean_output"] = tp.ablate_heads(model, head, layers=layer, mode="mean", reference=tokens)
    effects = tp.head_effects(model, tokens, hooks, exact=1, **one, **quiet).set_index("intervention")["kl"]
    for kind_of_change, some in hooks.items():
        with torch.no_grad():
            p, q = (model.run_with_hooks(tokens, fwd_hooks=x)[:, :-1].double().log_softmax(-1) for x in ([], some))
        expected = float((p.exp() * (p - q)).sum(-1).mean())
        assert expected > 1e-4
        found = [effects[kind_of_change]]
        if kind_of_change == "mean_output":
            ladder = tp.attention_ladder(model, tokens, rungs=["uniform"], controls=[], **one, **quiet)
            found.append(ladder.set_index("rung")["kl"]["mean_output"])
        assert found == pytest.approx([expected] * len(found), rel=1e-3)
