"""Losses of next tokens and divergences from the unmodified predictions, by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.models.running.texts import TextGroup, Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import refuse_nan

_MAX_LOG_PROBABILITIES = 2**19  # number of log-probabilities computed at a time, to stay in the CPU's cache


def check_logits(output: Any, tokens: Int[Tensor, "batch pos"]) -> None:
    """Raise unless a model's output has logits of each token's next one. All losses of next tokens begin here."""
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    texts, length = tokens.shape
    if len(shape) != 3 or shape[0] != texts or shape[1] not in (length - 1, length) or shape[2] <= int(tokens.max()):
        got = f"shape {shape} for tokens of shape {(texts, length)}" if shape else type(output).__name__
        raise ArgumentError(
            "model",
            f"must return logits (batch, pos, vocabulary) for losses of next tokens, got {got}: for other outputs pass "
            "metric= to a tool that takes it, such as head_ablation",
        )


def as_log_probabilities(logits: Float[Tensor, "*batch v"]) -> Float[Tensor, "*batch v"]:
    """Compute log-probabilities of a model's logits, in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def clean_log_probabilities(logits: Float[Tensor, "*batch v"]) -> Float[Tensor, "*batch v"]:
    """Compute log-probabilities of the unmodified model, or raise if it has no predictions but NaN."""
    refuse_nan("logits", logits)
    return as_log_probabilities(logits)


def token_losses(log_p: Float[Tensor, "batch pos v"], tokens: Int[Tensor, "batch read"]) -> Float[Tensor, "batch _"]:
    """Compute the loss of each token but the first, from the log-probabilities at the token before."""
    check_logits(log_p, tokens)
    return _token_losses(log_p, tokens)


def _token_losses(log_p: Tensor, tokens: Tensor) -> Tensor:
    following = tokens[:, 1:].to(log_p.device)  # a model on several devices returns logits on the last layer's device
    return -log_p[:, : following.shape[1]].gather(-1, following[..., None])[..., 0]


def in_blocks(logits: Tensor, tokens: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some positions at a time, with their log-probabilities and the losses of the next tokens.

    The last position has no next token.
    """
    check_logits(logits, tokens)
    n = max(1, _MAX_LOG_PROBABILITIES // (logits.shape[0] * logits.shape[-1]))
    for block in (slice(first, first + n) for first in range(0, logits.shape[1], n)):
        log_p = as_log_probabilities(logits[:, block])
        yield block, log_p, _token_losses(log_p, tokens[:, block.start : block.stop + 1])


def logits_of(output: Any, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text prediction option"] | None:
    """Return the logits of a model's predictions: of all tokens but the first, or of each text's class.

    None for an output that is neither logits by token nor by text.
    """
    if isinstance(output, Tensor) and output.is_floating_point() and output.shape[:1] == tokens.shape[:1]:
        if output.ndim == 3 and output.shape[1] == tokens.shape[1]:
            return output[:, :-1]
        if output.ndim == 2:
            return output[:, None]
    return None


def counted_in(output: Tensor, group: TextGroup) -> Bool[Tensor, "text prediction"]:
    """Return which of the predictions of ``logits_of`` count; that of a text's class always does."""
    return group.predictions if output.ndim == 3 else torch.ones_like(group.predictions[:, :1])


def mean_counted(values: Float[Tensor, "text prediction"], counted: Bool[Tensor, "text prediction"]) -> Tensor:
    """Average each text's values over the predictions that count, in float64."""
    counted = counted.to(values.device)
    return torch.where(counted, values.double(), 0.0).sum(1) / counted.sum(1)


def n_predictions(outputs: Sequence[Any], texts: Texts) -> Float64[Tensor, " text"]:
    """Count the predictions of each text that count, given the output for each group of texts."""
    counts = torch.zeros(len(texts.tokens), dtype=torch.float64)
    for output, group in zip(outputs, texts.groups, strict=True):
        if logits_of(output, group.tokens) is not None:
            counts[group.rows.cpu()] = counted_in(output, group).sum(1).double().cpu()
    return counts


def divergence(
    unmodified: Sequence[Any], texts: Texts, rows: Sequence[int]
) -> Callable[[Sequence[Any]], Float64[Tensor, " text"]]:
    """Compare texts by the mean of KL(unmodified ‖ changed) over the predictions that count; NaN without any."""
    logits = [logits_of(output, group.tokens) for output, group in zip(unmodified, texts.groups, strict=True)]
    clean = [None if x is None else clean_log_probabilities(x) for x in logits]

    def compare(outputs: Sequence[Any]) -> Float64[Tensor, " text"]:
        by_text = torch.full((len(texts.tokens),), torch.nan, dtype=torch.float64)
        for output, group, log_p in zip(outputs, texts.groups, clean, strict=True):
            changed = logits_of(output, group.tokens)
            if log_p is not None and changed is not None:
                n = max(1, _MAX_LOG_PROBABILITIES * log_p.shape[1] // max(1, log_p.numel()))
                pairs = zip(log_p.split(n, 1), changed.split(n, 1), strict=True)
                kl = torch.cat([divergences(p, as_log_probabilities(q)) for p, q in pairs], 1)
                by_text[group.rows.cpu()] = mean_counted(kl, counted_in(output, group)).cpu()
        return by_text

    return compare


def predicted(texts: Texts) -> Bool[Tensor, "text predicted"]:
    """Return which of the values of ``by_token`` are predictions that count."""
    return texts.from_the_start([group.predictions for group in texts.groups]).cpu()


def by_token(
    unmodified: Sequence[Any], texts: Texts, rows: Sequence[int]
) -> Callable[[Sequence[Any]], Float64[Tensor, "text predicted 2"]]:
    """Compare texts by the loss of each token but the first, and KL(unmodified ‖ changed) of its prediction.

    The model must return logits. NaN where no prediction counts, and in shorter texts after their last token.
    """
    for output, group in zip(unmodified, texts.groups, strict=True):
        check_logits(output, group.tokens)
    clean = [clean_log_probabilities(output) for output in unmodified]
    longest = texts.longest - 1

    def compare(outputs: Sequence[Any]) -> Float64[Tensor, "text predicted 2"]:
        values = torch.full((len(texts.tokens), longest, 2), torch.nan, dtype=torch.float64)
        for output, group, log_p in zip(outputs, texts.groups, clean, strict=True):
            found = torch.stack(losses_and_divergences(output, group.tokens, log_p), -1).double().cpu()
            counted = group.predictions.cpu()[..., None]
            values[group.rows.cpu(), : found.shape[1]] = found.where(counted, torch.nan)
        return values

    return compare


def losses_and_divergences(
    logits: Float[Tensor, "batch pos v"], tokens: Int[Tensor, "batch pos"], clean: Float[Tensor, "batch read v"]
) -> tuple[Float[Tensor, "batch predicted"], Float[Tensor, "batch predicted"]]:
    """Compute losses and divergences of texts of equal length, by text, given the clean log-probabilities."""
    parts = [
        (losses, divergences(clean[:, block][:, : losses.shape[1]], log_p[:, : losses.shape[1]]))
        for block, log_p, losses in in_blocks(logits, tokens)
    ]
    losses, kl = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return losses, kl


def divergences(
    log_p: Float[Tensor, "*batch pos v"], log_q: Float[Tensor, "*batch pos v"]
) -> Float[Tensor, "*batch pos"]:
    """Compute KL(p ‖ q) of predictions from their log-probabilities, at each position."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def correct(
    logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Bool[Tensor, "batch predicted"]:
    """Say of each token but the first whether it is predicted correctly."""
    return logits[:, :-1].argmax(-1) == tokens[:, 1:].to(logits.device)
