"""Loss and accuracy of a synthetic model on labelled samples."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.models.reading.forward import evaluating
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.sampling import IGNORED
from tl_posdisent.utils.validation import check_integer

_EIGHT = 8  # lengths are rounded up to this: kernels are faster, and a compiled model sees fewer of them


@torch.no_grad()
def evaluate(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, "sample"],
    *,
    batch_size: int = 1024,
) -> tuple[float, float]:
    """Compute mean cross-entropy and accuracy on labelled samples, without dropout.

    Hooks on the model act: call it within ``model.hooks(fwd_hooks=…)`` to measure an intervention.

    Args:
        model: left in the mode it was in.
        tokens: ``[sample, pos]``, from ``task.batch`` or a split; padding behind.
        labels: ``[sample]``; those of -100 are outside loss and accuracy.
        batch_size: samples at a time, those of like length together.

    Returns:
        Loss in nats, and the share of labels that got the largest logit.

    Raises:
        ValueError: another model; no samples, or another number of labels; ids or labels out of the model's range.

    Example:
        >>> from tl_posdisent.synthetic import evaluate, preset
        >>> small = preset("small")
        >>> loss, accuracy = evaluate(small.model("rope", "count"), *small.tasks["count"].batch(100))
        >>> loss > 1, accuracy < 0.5  # it is untrained
        (True, True)
    """
    check_integer("batch_size", batch_size, 1)
    check_samples(model, tokens, labels)
    pad = model.config.pad_id
    device = next(model.parameters()).device
    lengths = lengths_of(tokens, pad).cpu()
    loss = right = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for piece in lengths.argsort(stable=True).split(batch_size):
            width = padded_width(int(lengths[piece].max()), tokens.shape[1])
            there = piece.to(tokens.device)
            wanted = labels[there].to(device)
            logits = answers(model, tokens[there, :width].to(device), pad).float()
            loss = loss + cross_entropy(logits, wanted, reduction="sum")
            right = right + (logits.argmax(-1) == wanted).sum()
    counted = int((labels != IGNORED).sum())
    return loss.item() / counted, right.item() / counted


def check_samples(model: Any, tokens: Any, labels: Any) -> None:
    """Raise if samples are invalid, or do not fit the model."""
    if not isinstance(model, SyntheticModel):
        raise ValueError(f"model must be a SyntheticModel, got {type(model).__name__}")
    for name, x in (("tokens", tokens), ("labels", labels)):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be integers, got {what}")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f"tokens must have shape (sample, pos) and not be empty, got {tuple(tokens.shape)}")
    if labels.shape != tokens.shape[:1]:
        raise ValueError(
            f"labels must be one per row of tokens, got {tuple(labels.shape)} for tokens of shape {tuple(tokens.shape)}"
        )
    counted = labels[labels != IGNORED]
    if not len(counted):
        raise ValueError(f"labels must have one or more that are not {IGNORED}, got {len(labels)} that are")
    for name, x, n in (("tokens", tokens, model.config.d_vocab), ("labels", counted, model.config.n_out)):
        least, most = (int(value) for value in x.aminmax())
        if least < 0 or most >= n:
            raise ValueError(f"{name} must be from 0 to {n - 1} for this model, got {least} … {most}")


def answers(model: Any, tokens: Int[Tensor, "sample pos"], pad: int | None) -> Tensor:
    """One row of logits per sample; with a read-out at every token, that of the last one."""
    logits: Tensor = model(tokens, checked=True)
    if logits.ndim == 2:
        return logits
    last = lengths_of(tokens, pad) - 1
    return logits[torch.arange(len(tokens), device=tokens.device), last]


def lengths_of(tokens: Int[Tensor, "sample pos"], pad: int | None) -> Int[Tensor, "sample"]:
    """Where the last token stands that is no padding, and one more."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    real = torch.ones_like(tokens) if pad is None else (tokens != pad)
    return (real * place).amax(-1).clamp(min=1)


def padded_width(width: int, most: int) -> int:
    return min(-(-width // _EIGHT) * _EIGHT, most)
