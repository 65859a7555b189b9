"""Predictions of a run with hooks: log-probabilities, losses and divergences by token; texts in shuffled order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.forward import Hook, evaluating, output_of
from tl_posdisent.models.texts import Texts
from tl_posdisent.utils.validation import check_seed

_AT_A_TIME = 2**22  # log-probabilities that are compared


def as_log_probabilities(logits: Float[Tensor, "batch pos v"]) -> Float[Tensor, "batch pos v"]:
    """Of what a model returned, in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def token_losses(log_p: Float[Tensor, "batch pos v"], tokens: Int[Tensor, "batch read"]) -> Float[Tensor, "batch _"]:
    """Of each token but the first, by the log-probabilities at the token before."""
    following = tokens[:, 1:].to(log_p.device)  # a model on several devices returns logits where its last layer is
    return -log_p[:, : following.shape[1]].gather(-1, following[..., None])[..., 0]


@torch.no_grad()
def run_texts(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]]) -> list[Any]:
    """What the model returns for each group of texts, under hooks for it."""
    outputs = []
    for group, some in zip(texts.groups, hooks, strict=True):
        with evaluating(model), applied(model, some):
            outputs.append(output_of(model, group.tokens))
    return outputs


def compare(
    outputs: Sequence[Any], texts: Texts, clean: Sequence[Tensor]
) -> tuple[Float[Tensor, "predicted"], Float[Tensor, "token"]]:
    """Losses, and divergences KL(clean ‖ this) of predictions, by token of all texts."""
    losses, divergences = [], []
    for group, before, output in zip(texts.groups, clean, outputs, strict=True):
        rows = max(1, _AT_A_TIME // (output.shape[0] * output.shape[-1]))  # logits of a large vocabulary are gigabytes
        parts = []
        for first in range(0, output.shape[1], rows):
            log_p = as_log_probabilities(output[:, first : first + rows])
            loss = token_losses(log_p, group.tokens[:, first : first + rows + 1])
            log_q = before[:, first : first + rows]
            parts.append((loss, (log_q.exp() * (log_q - log_p)).sum(-1)))
        losses.append(torch.cat([loss for loss, _ in parts], 1))
        divergences.append(torch.cat([divergence for _, divergence in parts], 1))
    return all_tokens(losses), all_tokens(divergences)


def clean_losses(clean: Sequence[Tensor], texts: Texts) -> Float[Tensor, "predicted"]:
    """Losses of clean predictions, by token of all texts."""
    return all_tokens([token_losses(log_p, group.tokens) for log_p, group in zip(clean, texts.groups, strict=True)])


def all_tokens(parts: Sequence[Tensor]) -> Float[Tensor, "token"]:
    """Numbers by token of all texts in a row, in float64."""
    return torch.cat([part.flatten().double() for part in parts])


def shuffled_order(length: int, seed: int) -> Int[Tensor, "pos"]:
    """The first token, then the others in an order that the seed draws."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    drawn = torch.rand(length, generator=generator, dtype=torch.float32, device="cpu")
    drawn[0] = -1
    return drawn.argsort()
