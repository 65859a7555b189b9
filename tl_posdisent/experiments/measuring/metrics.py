"""Metrics of a run: functions of logits, or of logits and tokens, that return a number or one per text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.token_losses import in_blocks, mean_counted
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import is_integer, shown

Metric = Callable[..., Any]
"""A function of the model's output (logits ``[batch, pos, vocab]``), or of output and tokens ``[batch, pos]``, that
returns a number, or one number per text. It receives tokens if its second parameter has no default or is called
``tokens``: metrics of TransformerLens's examples, ``metric(logits, answers=...)``, work unchanged. In a padded batch
logits are NaN at padding."""


def next_token_loss(logits: Float[Tensor, "*shape"], tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """Compute the mean cross-entropy of each text's next tokens, in nats; in float32 or wider, averaged in float64."""
    return _losses(logits, tokens).double().mean(1)


def _losses(logits: Float[Tensor, "*shape"], tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch predicted"]:
    return torch.cat([losses for _, _, losses in in_blocks(logits, tokens)], 1)


def is_loss(metric: Metric) -> bool:
    """Say whether a metric is the loss of next tokens, which is averaged over predicted tokens."""
    return metric is next_token_loss


def is_separable(metric: Metric) -> bool:
    """Say whether a metric's value for each text is known to depend on this text alone."""
    return is_loss(metric) or isinstance(metric, LogitDifference)


@dataclass(frozen=True)
class LogitDifference:
    """Logit of the correct answer minus that of the wrong one, for each text (see ``logit_difference``).

    Attributes:
        answers: token ids of the correct answers, one row per text, or one row for all.
        wrong: token ids of the wrong answers in the same form, or None for all tokens of the vocabulary.
        position: where each text's answer is predicted, one per text or one for all; counted from the text's first
            token or, if negative, from its end.
    """

    answers: tuple[tuple[int, ...], ...]
    wrong: tuple[tuple[int, ...], ...] | None
    position: tuple[int, ...]

    def __call__(
        self, logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, " batch"]:
        """Compute the differences for a batch of logits without padding; the tokens are not read."""
        self._check(logits)
        self.check_batch(len(logits))
        return self.of_texts(logits, torch.arange(len(logits)))

    @staticmethod
    def _check(logits: Any) -> None:
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError("logits", f"must have shape (batch, pos, vocab) for a logit difference, got {got}")

    def of_texts(self, logits: Float[Tensor, "text pos vocab"], rows: Int[Tensor, " text"]) -> Float[Tensor, " text"]:
        """Compute the differences for some texts (``rows`` of the batch) without padding; float32 or wider."""
        self._check(logits)
        n = logits.shape[1]
        values = []
        for text_logits, row in zip(logits, rows.tolist(), strict=True):
            position = _row(self.position, row)
            if not -n <= position < n:
                raise ArgumentError("position", f"must lie within each text, got {position} in a text of {n} tokens")
            answer_logits = text_logits[position].to(torch.promote_types(logits.dtype, torch.float32))
            right = _mean_logit("answers", answer_logits, _row(self.answers, row))
            if self.wrong is None:
                wrong = answer_logits.mean()
            else:
                wrong = _mean_logit("wrong", answer_logits, _row(self.wrong, row))
            values.append(right - wrong)
        return torch.stack(values)

    def of_rows(self, rows: Sequence[int]) -> LogitDifference:
        """Return the metric of some texts of the batch alone."""
        answers, position = (tuple(_row(x, row) for row in rows) for x in (self.answers, self.position))
        wrong = None if self.wrong is None else tuple(_row(self.wrong, row) for row in rows)
        return LogitDifference(answers, wrong, position)

    def check_batch(self, batch: int) -> None:
        """Raise if the answers are for another number of texts."""
        named = {"answers": self.answers, "wrong": self.wrong, "position": self.position}
        for name, rows in named.items():
            if rows is not None and len(rows) not in (1, batch):
                raise ArgumentError(
                    name, f"must be one for each text or one for all, got {len(rows)} for {batch} texts"
                )


def logit_difference(answers: Any, wrong: Any = None, *, position: Any = -1) -> LogitDifference:
    """Create the metric *logit difference*: logit of the correct answer minus that of a wrong one, after each prompt.

    Prompts may differ in length: pass them with ``attention_mask=``, or as a list of texts.

    Args:
        answers: token id of the correct answer: an integer, one per text ``[batch]``, or several per text
            ``[batch, n]``, whose logits are averaged. For words, use ``model.to_single_token(" Mary")``.
        wrong: the wrong answers in one of these forms; default the mean logit of the whole vocabulary.
        position: where the answer is predicted: an integer, or one per text, counted from the text's first token or, if
            negative, from its end.

    Returns:
        A function of logits ``[batch, pos, vocab]``, or of logits and tokens as any metric, that returns one number per
        text, in logits.

    Raises:
        ValueError: ids that are not integers; when called: another number of texts, ids or positions out of range.

    Example:
        >>> import torch
        >>> from tl_posdisent import logit_difference
        >>> metric = logit_difference(answers=[2, 0], wrong=1)
        >>> metric
        LogitDifference(answers=((2,), (0,)), wrong=((1,),), position=(-1,))
        >>> logits = torch.tensor([[[0.0, 1.0, 5.0]], [[3.0, 1.0, 0.0]]])  # two texts of one token
        >>> metric(logits).tolist()
        [4.0, 2.0]
    """
    places = _elements(position)
    if not places or not all(is_integer(x) for x in places):
        raise ArgumentError("position", f"must be an integer or one for each text, got {shown(position)}")
    wrong_rows = None if wrong is None else _id_rows("wrong", wrong)
    return LogitDifference(_id_rows("answers", answers), wrong_rows, tuple(int(x) for x in places))


def _id_rows(name: str, ids: Any) -> tuple[tuple[int, ...], ...]:
    """Convert token ids to one row per text, or one row for all."""
    rows = [_elements(x) for x in _elements(ids)]
    if not rows or not all(row and all(is_integer(x) and x >= 0 for x in row) for row in rows):
        raise ArgumentError(
            name,
            f"must be token ids: an integer, one per text, or several per text, got {shown(ids)}; for words, use "
            "model.to_single_token",
        )
    return tuple(tuple(int(x) for x in row) for row in rows)


def _elements(value: Any) -> list[Any]:
    """List the elements of a sequence, a tensor or an array; anything else is one element."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple, range)) else [value]


def _row(rows: Sequence[Any], row: int) -> Any:
    return rows[0] if len(rows) == 1 else rows[row]


def _mean_logit(name: str, logits: Tensor, ids: Sequence[int]) -> Tensor:
    if max(ids) >= len(logits):
        raise ArgumentError(name, f"must be token ids from 0 to {len(logits) - 1}, got {max(ids)}")
    return logits[list(ids)].mean()


def as_numbers(value: Any, batch: int) -> Tensor:
    """Validate a metric's value, a number or one per text, and convert it to float64."""
    try:
        dtype = None if hasattr(value, "dtype") else torch.float64  # Python's numbers would become float32
        numbers = torch.as_tensor(value, dtype=dtype, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError("metric", f"must return a number or one per text, got {type(value).__name__}") from error
    if numbers.is_complex() or numbers.shape not in ((), (batch,)):
        advice = ": average it over each text's tokens" if numbers.ndim == 2 and len(numbers) == batch else ""
        raise ArgumentError(
            "metric",
            f"must return a number or one per text, a tensor of shape () or ({batch},), got {numbers.dtype} of "
            f"shape {tuple(numbers.shape)}{advice}",
        )
    if not bool(numbers.isfinite().all()):
        raise ArgumentError("metric", f"must return finite numbers, got {shown(numbers.tolist())}")
    return numbers.double()


def check_metric(metric: Any, ignore: Any = None) -> None:
    """Raise if ``metric`` cannot be called with logits, or with logits and tokens, before anything runs.

    Only the loss leaves out predictions: other metrics receive all logits.
    """
    needed = "must be a function of (logits) or (logits, tokens)"
    if not callable(metric):
        raise ArgumentError("metric", f"{needed}, got {shown(metric)}")
    try:
        parameters = signature(metric)
        parameters.bind(*("logits", "tokens")[: 1 + _takes_tokens(metric)])
    except TypeError as error:
        raise ArgumentError(
            "metric", f"{needed}, got a function of {parameters}: give further parameters a default"
        ) from error
    except ValueError:  # a C function whose signature Python does not know
        pass
    if ignore is not None and not is_loss(metric):
        raise ArgumentError(
            "ignore",
            f"must be None with a metric other than the loss, got {shown(ignore)}: such a metric receives all logits",
        )


def metric_name(metric: Metric) -> str:
    """Return a metric's name for tables and figures: the function's name in words; ``"metric"`` for a lambda.

    >>> metric_name(next_token_loss), metric_name(logit_difference(3)), metric_name(lambda logits: 0)
    ('loss', 'logit difference', 'metric')
    """
    if is_separable(metric):
        return "loss" if is_loss(metric) else "logit difference"
    name = str(getattr(metric, "__name__", "metric"))
    return "metric" if name == "<lambda>" else " ".join(name.split("_")).strip()


def _takes_tokens(metric: Metric) -> bool:
    """Say whether a metric is called with (logits, tokens) instead of logits alone."""
    try:
        parameters = list(signature(metric).parameters.values())
    except (TypeError, ValueError):
        return True
    if any(x.kind is Parameter.VAR_POSITIONAL for x in parameters):
        return True
    second = [x for x in parameters if x.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)][1:2]
    return any(x.default is Parameter.empty or x.name == "tokens" for x in second)


def values_of(metric: Metric, outputs: Sequence[Any], texts: Texts) -> Any:
    """Compute a metric of a run: a number, or one per text (in any order); the loss, of predictions that count.

    Metrics of this file receive texts of equal length without padding; others the batch, with NaN logits at padding.
    """
    parts = list(zip(outputs, texts.groups, strict=True))
    if is_loss(metric):
        return torch.cat([mean_counted(_losses(logits, group.tokens), group.predictions) for logits, group in parts])
    if isinstance(metric, LogitDifference):
        metric.check_batch(len(texts.tokens))
        return torch.cat([metric.of_texts(logits, group.rows) for logits, group in parts])
    whole = len(outputs) == 1 and bool(texts.real.all())
    if not (whole or all(isinstance(output, Tensor) for output in outputs)):
        raise ArgumentError(
            "attention_mask",
            f"needs a model that returns logits, got {type(outputs[0]).__name__}: call the tool separately for "
            "each length of text",
        )
    logits = outputs[0] if whole else texts.lay_out(outputs)
    return metric(logits, texts.tokens) if _takes_tokens(metric) else metric(logits)


def metric_values(metric: Metric) -> Callable[..., Callable[[Sequence[Any]], Float64[Tensor, " text"]]]:
    """Return what compares texts by a metric, for ``run_changes``; a number for all texts is that of each of them."""

    def read(
        unmodified: Sequence[Any], texts: Texts, rows: Sequence[int]
    ) -> Callable[[Sequence[Any]], Float64[Tensor, " text"]]:
        own = metric.of_rows(rows) if isinstance(metric, LogitDifference) else metric
        clean = as_numbers(values_of(own, unmodified, texts), len(texts.tokens))

        def compare(outputs: Sequence[Any]) -> Float64[Tensor, " text"]:
            same = outputs is unmodified  # a metric is called once for each run
            numbers = clean if same else as_numbers(values_of(own, outputs, texts), len(texts.tokens))
            if numbers.shape != clean.shape:
                got = f"{clean.numel()} for the unmodified run and {numbers.numel()} for another"
                raise ArgumentError("metric", f"must return the same number of values for each run, got {got}")
            if numbers.ndim and is_separable(own):  # in the order of the groups
                return numbers[torch.cat([group.rows for group in texts.groups]).cpu().argsort()]
            return numbers.expand(len(texts.tokens))

        return compare

    return read


def value_of(metric: Metric, outputs: Sequence[Any], texts: Texts) -> float:
    """Compute the metric of a run, averaged over texts if it is one number per text (see ``values_of``).

    The loss of next tokens is averaged over all predictions that count, as in every table of losses.
    """
    numbers = as_numbers(values_of(metric, outputs, texts), len(texts.tokens))
    if is_loss(metric):
        predicted = torch.cat([group.predictions.sum(1) for group in texts.groups])
        numbers = numbers.repeat_interleave(predicted.cpu())
    return float(numbers.mean())
