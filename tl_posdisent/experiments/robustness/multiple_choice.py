"""Multiple-choice questions, and a model's log-likelihood of each choice, given a context that may be perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.runs import run_under
from tl_posdisent.experiments.robustness.perturb import Perturb
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.models.running.texts import check_tokens, refuse_padding, text_ids
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer

Text = str | Int[Tensor, " _pos"]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class MultipleChoice:
    """A multiple-choice question for ``perturbation_curve``: context, choices and index of the correct choice.

    Attributes:
        context: text, or token ids ``(pos,)`` with the beginning-of-text token that the model expects.
        choices: at least two continuations, as text or token ids ``(pos,)`` without such a token. Each is tokenised
            separately: begin it with a space if the tokenizer puts spaces before words.
        answer: index of the correct choice, from 0.

    Raises:
        ValueError: fewer than two choices; an answer out of range; a context or choice that is neither text nor ids,
            or is empty.
    """

    context: Text
    choices: Sequence[Text]
    answer: int

    def __post_init__(self) -> None:
        if isinstance(self.choices, (str, Tensor)) or not isinstance(self.choices, Sequence) or len(self.choices) < 2:
            raise ArgumentError("choices", f"must be a sequence of at least two continuations, got {self.choices!r}")
        check_integer("answer", self.answer, 0, len(self.choices) - 1)
        for name, text in [("context", self.context), *((f"choices[{i}]", x) for i, x in enumerate(self.choices))]:
            ids = isinstance(text, Tensor) and text.ndim == 1 and text.dtype in _INTEGERS
            if not (isinstance(text, str) or ids) or len(text) == 0:
                got = f"{text.dtype} of shape {tuple(text.shape)}" if isinstance(text, Tensor) else repr(text)
                raise ArgumentError(name, f"must be text or integer token ids of shape (pos,), not empty, got {got}")


def choice_scores(
    model: Any, question: MultipleChoice, *, perturb: Perturb | None = None
) -> Float64[Tensor, " choice"]:
    """Compute the mean log-likelihood per token of each choice, given the context.

    Args:
        model: a causal HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        question: context and choices.
        perturb: the function that ``perturbation_curve`` passes to its ``downstream``; it perturbs the context but not
            the choice.

    Returns:
        Nats per token, one number for each choice; the largest is the model's answer.

    Raises:
        ValueError: text for a model without tokenizer; ids outside the vocabulary or with padding; scores that are not
            finite.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import MultipleChoice, choice_scores
        >>> question = MultipleChoice("In order to form a more perfect", [" Union", " of"], 0)
        >>> int(choice_scores(load_demo_model(), question).argmax()) == question.answer
        True
    """
    if not isinstance(question, MultipleChoice):
        raise ArgumentError("question", f"must be a MultipleChoice, got {type(question).__name__}")
    model = read_model(model).model
    context = _ids(model, "context", question.context, begins=True)
    by = "word" if isinstance(question.context, str) else "token"
    scores = []
    for n, choice in enumerate(question.choices):
        ids = torch.cat([context, _ids(model, f"choices[{n}]", choice, begins=False)])
        tokens, hooks = check_tokens(model, ids, padded=True), []
        if perturb is not None:
            perturbed = perturb(tokens, until=len(context), unit=by)
            tokens, hooks = perturbed.tokens, perturbed.hooks
        logits = run_under(model, tokens, hooks)[0, len(context) - 1 : -1].double()
        following = tokens[0, len(context) :, None].to(logits.device)
        scores.append(logits.log_softmax(-1).gather(-1, following).mean())
    log_likelihoods = torch.stack(scores).cpu()
    if not bool(log_likelihoods.isfinite().all()):
        raise ValueError(f"the model gives the choices log-likelihoods of {log_likelihoods.tolist()}")
    return log_likelihoods


def _ids(model: Any, name: str, text: Text, *, begins: bool) -> Int[Tensor, " pos"]:
    if isinstance(text, Tensor):
        refuse_padding(model, text[None], name, "cut it off")
        return text.to(device_of(model), torch.int64)
    if getattr(model, "tokenizer", None) is None:
        raise ValueError("context and choices were given as text, but the model has no tokenizer: pass token ids")
    return text_ids(model, text, **({} if begins else {"prepend_bos": False}))[0].to(device_of(model))
