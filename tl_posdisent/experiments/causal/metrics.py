"""What a metric is: from logits and tokens to a number, or one for each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.forward import Hook

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


# What a run is worth by a metric, and how far a patch takes it from one run to another.


def measure(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    hooks: Sequence[Hook],
    metric: Metric,
    target: Int[Tensor, "batch pos"],
) -> float:
    """The metric of one run with these hooks, the mean over texts; the hooks are off when the metric is asked."""
    with torch.no_grad():
        with applied(model, hooks):
            logits = model(tokens)
        return as_number(metric(logits, target), len(tokens))


def check_apart(model: Any, measured: dict[str, float], argument: str) -> None:
    """Refuse two runs whose metrics differ by no more than rounding: every effect would be 0/0."""
    (one, a), (other, b) = measured.items()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if abs(a - b) <= max(1e-5, torch.finfo(dtype).eps / 8) * max(abs(a), abs(b)):
        raise ValueError(
            f"{argument} must change the metric, but it is {a:.6g} in the {one} run and {b:.6g} in the {other} one: "
            "there is no effect to divide"
        )


def as_table(rows: list[tuple[int, int, float]], measured: dict[str, float]) -> pd.DataFrame:
    """Layer, head and metric of patched runs, beside those of the run patched from and of the run patched (in this
    order, by the names of their columns), and the effect: 1 as in the first, 0 as in the second."""
    table = pd.DataFrame(rows, columns=["layer", "head", "value"])
    (source, everything), (base, nothing) = measured.items()
    table.insert(2, source, everything)
    table.insert(3, base, nothing)
    table["effect"] = (table["value"] - nothing) / (everything - nothing)
    return table.sort_values(["layer", "head"], ignore_index=True)
