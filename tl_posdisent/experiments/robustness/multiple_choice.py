"""Multiple-choice questions: made from any text, and scored by the log-likelihood of each choice."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.forward import check_tokens, device_of, evaluating, output_of, refuse_padding
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.utils.validation import check_choice, check_integer, is_integer

from .perturb import Perturb

Text = str | Int[Tensor, "_pos"]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class MultipleChoice:
    """A multiple-choice question for ``perturbation_curve``: context, choices and index of the correct choice.

    Attributes:
        context: text, or token ids ``(pos,)`` with the beginning-of-text token that the model expects.
        choices: at least two continuations, as text or token ids ``(pos,)`` without such a token. Each is tokenised on
            its own: let it begin with a space where the tokenizer has spaces before words.
        answer: which choice is right, from 0.

    Raises:
        ValueError: fewer than two choices; an answer out of range; neither text nor ids, or empty ones.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import MultipleChoice, choice_scores
        >>> question = MultipleChoice("We the people of the", [" United States", " people the"], 0)
        >>> int(choice_scores(load_demo_model(), question).argmax()) == question.answer
        True
    """

    context: Text
    choices: Sequence[Text]
    answer: int

    def __post_init__(self) -> None:
        if isinstance(self.choices, (str, Tensor)) or not isinstance(self.choices, Sequence) or len(self.choices) < 2:
            raise ValueError(f"choices must be a sequence of at least two continuations, got {self.choices!r}")
        check_integer("answer", self.answer, 0, len(self.choices) - 1)
        for name, text in [("context", self.context), *((f"choices[{i}]", x) for i, x in enumerate(self.choices))]:
            ids = isinstance(text, Tensor) and text.ndim == 1 and text.dtype in _INTEGERS
            if not (isinstance(text, str) or ids) or len(text) == 0:
                got = f"{text.dtype} of shape {tuple(text.shape)}" if isinstance(text, Tensor) else repr(text)
                raise ValueError(f"{name} must be text or integer token ids of shape (pos,), not empty, got {got}")


def choice_scores(model: Any, question: MultipleChoice, *, perturb: Perturb | None = None) -> Float64[Tensor, "choice"]:
    """Compute the mean log-likelihood per token of each choice, given the context.

    Args:
        model: a causal HookedTransformer, TransformerBridge or alike.
        question: context and choices.
        perturb: what ``perturbation_curve`` passes to its ``downstream``: it perturbs the context; the choice follows
            unperturbed.

    Returns:
        Nats per token, one number for each choice; the likeliest is the model's answer.

    Raises:
        ValueError: no ``MultipleChoice``; text for a model without tokenizer; ids outside the vocabulary or with
            padding; scores that are not finite.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import MultipleChoice, choice_scores
        >>> question = MultipleChoice("In order to form a more perfect", [" Union", " of"], 0)
        >>> bool(choice_scores(load_demo_model(), question).max() < 0)
        True
    """
    if not isinstance(question, MultipleChoice):
        raise ValueError(f"question must be a MultipleChoice, got {type(question).__name__}")
    n_layers(model)  # or it is no model
    context = _ids(model, "context", question.context, begins=True)
    by = "word" if isinstance(question.context, str) else "token"
    scores = []
    for n, choice in enumerate(question.choices):
        ids = torch.cat([context, _ids(model, f"choices[{n}]", choice, begins=False)])
        tokens, hooks = check_tokens(model, ids, padded=True), []
        if perturb is not None:
            perturbed = perturb(tokens, until=len(context), unit=by)
            tokens, hooks = perturbed.tokens, perturbed.hooks
        with torch.no_grad(), evaluating(model), applied(model, hooks):
            logits = output_of(model, tokens)[0, len(context) - 1 : -1].double()
        scores.append(logits.log_softmax(-1).gather(-1, tokens[0, len(context) :, None]).mean())
    found = torch.stack(scores).cpu()
    if not bool(found.isfinite().all()):
        raise ValueError(f"the model gives the choices log-likelihoods of {found.tolist()}")
    return found


Ask = Literal["next_sentence", "last_word"]
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def questions_from_text(
    text: str,
    ask: Ask = "next_sentence",
    *,
    n: int | None = 200,
    choices: int = 2,
    before: int = 3,
    words: tuple[int, int] = (5, 25),
    seed: int = 0,
) -> list[MultipleChoice]:
    """Make multiple-choice questions from a text that the model was not trained on.

    The context is ``before`` consecutive sentences of the text, and the model chooses how it goes on:

    * ``"next_sentence"``: the sentence that follows, or one from elsewhere in the text with as many words;
    * ``"last_word"``: the context goes on up to the last word of that sentence, and the model chooses between it and
      the last word of another sentence, of as many letters.

    What tells the choices apart is thus the context. Chance is ``1 / choices``.

    Args:
        text: with punctuation; a sentence ends at ``.``, ``!`` or ``?`` before white space and a capital letter.
        ask: as above.
        n: how many questions, drawn at random; None for all that the text allows.
        choices: per question, the correct one included; 2 or more.
        before: sentences in the context, 1 or more.
        words: shortest and longest sentence to ask about; in ``"last_word"`` the last word is not counted.
        seed: of the questions, the wrong choices and their order.

    Returns:
        Questions whose choices begin with a space, in the order of the text.

    Raises:
        ValueError: arguments out of range; a text that does not allow ``n`` questions, or none at all.

    Example:
        >>> from tl_posdisent.demo import demo_text
        >>> from tl_posdisent.experiments import questions_from_text
        >>> question = questions_from_text(demo_text(), "last_word", n=3, before=1)[0]
        >>> len(question.choices), len(question.choices[0]) == len(question.choices[1])
        (2, True)
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}")
    check_choice("ask", ask, get_args(Ask))
    for name, value, least in (("choices", choices, 2), ("before", before, 1), ("seed", seed, 0)):
        check_integer(name, value, least)
    if n is not None:
        check_integer("n", n, 1)
    if not isinstance(words, Sequence) or len(words) != 2 or not all(is_integer(x) for x in words):
        raise ValueError(f"words must be two integers, the fewest and the most, got {words!r}")
    sentences = [" ".join(sentence.split()) for sentence in _SENTENCE_ENDS.split(text.strip())]
    parts = [_asked(sentence, ask, words) for sentence in sentences]
    alike: dict[int, set[str]] = {}
    for part in parts:
        if part:
            alike.setdefault(_size(part[1], ask), set()).add(part[1])
    generator, questions = random.Random(seed), []
    for at in range(before, len(sentences)):
        part = parts[at]
        wrong = sorted(x for x in alike[_size(part[1], ask)] if x.lower() != part[1].lower()) if part else []
        if part and len(wrong) >= choices - 1:
            drawn = [part[1], *generator.sample(wrong, choices - 1)]
            generator.shuffle(drawn)
            context = " ".join([*sentences[at - before : at], *([part[0]] if part[0] else [])])
            questions.append(MultipleChoice(context, [f" {x}" for x in drawn], drawn.index(part[1])))
    if len(questions) < (n or 1):
        raise ValueError(
            f"text must be long enough for {n or 1} questions, got {len(sentences)} sentences that allow "
            f"{len(questions)}: pass a longer text, a smaller n or wider words="
        )
    chosen = sorted(generator.sample(range(len(questions)), n)) if n else range(len(questions))
    return [questions[i] for i in chosen]


def _asked(sentence: str, ask: Ask, words: tuple[int, int]) -> tuple[str, str] | None:
    """Split a sentence into its part in the context and the one to choose; None for one that is not asked about."""
    given, _, last = sentence.rpartition(" ")
    if ask == "next_sentence":
        return ("", sentence) if words[0] <= len(sentence.split()) <= words[1] else None
    last = last.rstrip(".!?")
    return (given, last) if words[0] <= len(given.split()) <= words[1] and last.isalpha() and len(last) > 3 else None


def _size(choice: str, ask: Ask) -> int:
    return len(choice.split()) if ask == "next_sentence" else len(choice)


def _ids(model: Any, name: str, text: Text, *, begins: bool) -> Int[Tensor, " pos"]:
    if isinstance(text, Tensor):
        refuse_padding(model, text[None], name, "cut it off")
        return text.to(device_of(model), torch.int64)
    if getattr(model, "tokenizer", None) is None:
        raise ValueError("context and choices were given as text, but the model has no tokenizer: pass token ids")
    row: Tensor = model.to_tokens(text, truncate=False, **({} if begins else {"prepend_bos": False}))[0]
    return row.to(device_of(model))
