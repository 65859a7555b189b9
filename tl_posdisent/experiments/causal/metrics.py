"""What a metric is: from logits and tokens to a number, or one for each text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

Metric = Callable[[Any, Tensor], Any]
"""From what the model returns (logits ``[batch, pos, vocab]``) and tokens ``[batch, pos]`` to a number, or one for each
text."""


def next_token_loss(logits: Float[Tensor, "*shape"], tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch"]:
    """Mean cross-entropy of each text's next tokens, in nats; in float32 or wider, averaged in float64."""
    per_token = isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == tokens.shape
    if not per_token or logits.shape[2] <= int(tokens.max()):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"metric must be given for a model that returns no logits (batch, pos, vocabulary), got {got}")
    log_p = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -log_p.gather(-1, tokens[:, 1:, None].to(logits.device)).double().mean((1, 2))


def as_number(value: Any, batch: int) -> float:
    """What a metric returned, as one number."""
    try:
        numbers = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metric must return a number or one per text, got {type(value).__name__}") from error
    if numbers.is_complex() or numbers.shape not in ((), (batch,)):
        raise ValueError(
            f"metric must return a number or one per text, a tensor of shape () or ({batch},), got {numbers.dtype} of "
            f"shape {tuple(numbers.shape)}"
        )
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"metric must return finite numbers, got {numbers.tolist()}")
    return float(numbers.double().mean())


def check_metric(metric: Any) -> None:
    """Refuse what cannot be called, before anything runs."""
    if not callable(metric):
        raise ValueError(f"metric must be a function of (logits, tokens), got {metric!r}")
