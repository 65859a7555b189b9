"""Metrics of a run: from logits and tokens to a number, or one for each text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.texts import Texts, read_texts

Metric = Callable[[Any, Tensor], Any]
"""From what the model returns (logits ``[batch, pos, vocab]``) and tokens ``[batch, pos]`` to a number, or one for each
text. In a padded batch logits are NaN at padding."""


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


# The metric of a run, and the effect of a patch relative to two runs.


def outputs_of(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]]) -> list[Any]:
    """What the model returns for each group of texts, with hooks for each."""
    outputs = []
    with torch.no_grad():
        for group, some in zip(texts.groups, hooks, strict=True):
            with applied(model, some):
                outputs.append(model(group.tokens))
    return outputs


def value_of(metric: Metric, outputs: Sequence[Any], texts: Texts) -> float:
    """The metric of a run: the mean over texts where it is one number for each.

    Metrics of the user's get logits and tokens laid out like the batch, with NaN at padding.
    """
    n = len(texts.tokens)
    if metric is next_token_loss:
        losses = [next_token_loss(some, group.tokens) for some, group in zip(outputs, texts.groups, strict=True)]
        return as_number(torch.cat(losses), n)
    if len(outputs) == 1 and bool(texts.real.all()):
        return as_number(metric(outputs[0], texts.tokens), n)
    if not all(isinstance(some, Tensor) for some in outputs):
        raise ValueError(
            f"attention_mask needs a model that returns logits, got {type(outputs[0]).__name__}: call the model for "
            "each length of text"
        )
    return as_number(metric(texts.lay_out(outputs), texts.tokens), n)


def measure(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]], metric: Metric, target: Texts) -> float:
    """The metric of one run with hooks for each group of texts, by the tokens of ``target``."""
    return value_of(metric, outputs_of(model, texts, hooks), target)


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


def read_pair(model: Any, texts: Texts, names: tuple[str, str], tokens: Any, attention_mask: Any) -> Texts:
    """Texts that are compared with others one by one, each as long as its counterpart; same padding, if any.

    Raises:
        ValueError: another number of texts, or a text of another length.
    """
    name, of = names
    given_as_ids = isinstance(tokens, Tensor)
    if given_as_ids and tokens.shape != texts.tokens.shape and tokens.shape != texts.tokens.shape[1:]:
        raise ValueError(f"{name} must have the shape of {of}, {tuple(texts.tokens.shape)}, got {tuple(tokens.shape)}")
    other = read_texts(model, tokens, attention_mask if given_as_ids else None)
    if other.lengths != texts.lengths:
        raise ValueError(
            f"{name} must be texts of as many tokens as those of {of}, {texts.lengths}, got {other.lengths}"
        )
    return other
