"""Loss and accuracy of a synthetic model on labelled samples."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tensor_checks import described
from tl_posdisent.utils.validation import check_integer


@torch.no_grad()
def evaluate(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    batch_size: int = 1024,
) -> tuple[float, float]:
    """Compute mean cross-entropy and accuracy on labelled samples, without dropout.

    Call it within ``model.hooks(fwd_hooks=…)`` to measure an intervention.

    Args:
        tokens: ``[sample, pos]``, from ``task.batch`` or a split; with padding at the end.
        labels: ``[sample]``; loss and accuracy ignore labels of -100.
        batch_size: number of samples at a time; samples of similar length are batched together.

    Returns:
        Loss in nats, and the share of labels with the largest logit.

    Raises:
        ValueError: another kind of model; no samples, or another number of labels; ids or labels out of range.

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
    with running(model):
        for piece in lengths.argsort(stable=True).split(batch_size):
            expected = labels[piece.to(labels.device)].to(device)
            texts = tokens[piece.to(tokens.device), : padded_width(lengths[piece])].to(device)
            logits = answers(model(texts, checked=True), texts, pad).float()
            loss = loss + cross_entropy(logits, expected, reduction="sum")
            right = right + (logits.argmax(-1) == expected).sum()
    counted = int((labels != IGNORED).sum())
    return loss.item() / counted, right.item() / counted


def check_samples(model: Any, tokens: Any, labels: Any) -> None:
    """Raise if samples are invalid for the model."""
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    for name, x, ndim in (("tokens", tokens, 2), ("labels", labels, 1)):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool or x.ndim != ndim:
            raise ArgumentError(name, f"must be integers of shape {('sample', 'pos')[:ndim]}, got {described(x)}")
    if len(labels) != len(tokens):
        raise ArgumentError("labels", f"must be one per row of tokens, got {len(labels)} for {len(tokens)} rows")
    model.check_tokens(tokens)
    counted = labels[labels != IGNORED]
    if not len(counted):
        raise ArgumentError("labels", f"must have at least one other than {IGNORED}, got {len(labels)} of {IGNORED}")
    least, most = (int(value) for value in counted.aminmax())
    if least < 0 or most >= model.config.n_out:
        raise ArgumentError(
            "labels", f"must be from 0 to {model.config.n_out - 1} for this model, got {least} … {most}"
        )


def answers(logits: Tensor, tokens: Int[Tensor, "sample pos"], pad: int | None) -> Float[Tensor, "sample class"]:
    """Return one row of logits per sample: with a read-out at every token, that of the last token."""
    if logits.ndim == 2:
        return logits
    return logits[torch.arange(len(tokens), device=tokens.device), lengths_of(tokens, pad) - 1]


def lengths_of(tokens: Int[Tensor, "sample pos"], pad: int | None) -> Int[Tensor, " sample"]:
    """Return the length of each text up to its last token that is not padding."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    real = torch.ones_like(tokens) if pad is None else (tokens != pad)
    return (real * place).amax(-1).clamp(min=1)


def padded_width(lengths: Int[Tensor, " sample"]) -> int:
    """Round the largest length up to a multiple of 8, for which kernels are faster."""
    return -(-int(lengths.max()) // 8) * 8
