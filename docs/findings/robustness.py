"""Findings about perturbed text: neighbouring tokens exchanged, or only their positions, or only rotary features."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rows import Row, row
from texts import Source, documents, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import MultipleChoice, choice_scores, perturb

TEXTS, LENGTH, DRAWS, QUESTIONS = 3, 256, 6, 40
KINDS = ("order", "index", "feature")
FRACTIONS = (0.05, 0.1, 0.25)
ASKED = {"last_word": "last word", "next_sentence": "next sentence"}
STUDIES = ("perturbation", "questions")


def perturbation(model: Any, source: Source) -> Iterator[Row]:
    """The loss added at intact positions, by kind and fraction; and ratios of kinds, over draws and over texts."""
    texts, draws = parts(model, source, TEXTS, LENGTH), how_many(model, source, DRAWS)
    added, accuracy = curves(model, texts, draws)
    for (kind, fraction), values in added.items():
        name, call = f"{kind}, {fraction:.0%}", f'perturbation_curve(model, texts, ["{kind}"], [{fraction}])'
        if fraction:
            yield row(f"added loss, {name}", values.mean(1), LENGTH, call, f"draws, {len(texts)} texts")
        yield row(f"accuracy, {name}", accuracy[kind, fraction].mean(1), LENGTH, call, f"draws, {len(texts)} texts")
    for a, b in (("order", "index"), ("feature", "index")):
        for fraction in FRACTIONS:
            pair = added[a, fraction], added[b, fraction]
            for over, axis in (("draws", 1), ("texts", 0)):
                value, error = ratio(*(values.mean(axis) for values in pair))
                name = f"{a} over {b}, {fraction:.0%}, error over {over}"
                yield Row(name, value, error, f"{pair[0].shape[1 - axis]} {over}", LENGTH, "perturbation_curve")


def curves(model: Any, texts: Tensor, draws: int) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """``[draw, text]`` added loss and accuracy, by kind and fraction; accuracy also of the unperturbed text."""
    reading = tp.read_model(model)
    tables = [
        [tp.perturbation_curve(reading, text[None], KINDS, (0, *FRACTIONS), [seed], progress=False) for text in texts]
        for seed in range(draws)
    ]
    cases = [("order", 0), *((kind, fraction) for kind in KINDS for fraction in FRACTIONS)]
    by_case = [[table.set_index(["kind", "fraction"]) for table in of_draw] for of_draw in tables]
    added, accuracy = (
        {case: torch.tensor([[table.loc[case, name] for table in some] for some in by_case]) for case in cases}
        for name in ("added_loss", "accuracy")
    )
    return added, accuracy


def ratio(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The ratio of two means, and its standard error by leaving out one pair of values after another (jackknife)."""
    n = len(x)
    without = (x.sum() - x) / (y.sum() - y)
    return (x.mean() / y.mean()).item(), ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()


def questions(model: Any, source: Source) -> Iterator[Row]:
    """Multiple choice with exchanged neighbours in the context: the share right, and its change, over questions.

    Where all tokens are exchanged is the control: questions that this does not make harder show nothing.
    """
    if source != "speeches":
        return
    for ask, name in ASKED.items():
        asked = questions_of(model, " ".join(documents(source)), ask)
        right = {fraction: answers(model, asked, fraction) for fraction in (0.0, *FRACTIONS, 1.0)}
        length = round(sum(len(question.context) for question in asked) / len(asked))
        for fraction, values in right.items():
            call = f"perturb(model, context, 'order', {fraction})"
            yield row(f"{name} right, order, {fraction:.0%}", values, length, call, "questions")
            if fraction:
                yield row(
                    f"{name}, change of right, order, {fraction:.0%}", values - right[0], length, call, "questions"
                )


def answers(model: Any, asked: list[MultipleChoice], fraction: float) -> Tensor:
    """``[question]``: 1 where the right choice is the likeliest, with a fraction of the context's tokens exchanged."""
    change = partial(perturb, model, kind="order", fraction=fraction)
    found = [choice_scores(model, question, perturb=change).argmax() == question.answer for question in asked]
    return torch.stack(found).double()


def questions_of(model: Any, text: str, ask: str) -> list[MultipleChoice]:
    """Questions with contexts of up to 600 characters, evenly spread over a text, as token ids."""
    drawn = [question for question in questions_from_text(text, ask) if len(str(question.context)) < 600]
    some = [drawn[int(n)] for n in torch.linspace(0, len(drawn) - 1, QUESTIONS)]
    return [
        MultipleChoice(
            model.to_tokens(question.context)[0],
            [model.to_tokens(choice, prepend_bos=False)[0] for choice in question.choices],
            question.answer,
        )
        for question in some
    ]


def asked_part(sentence: str, ask: str) -> tuple[str, str] | None:
    """Split a sentence into its part in the context and the one to choose; None for one that is not asked about."""
    given, _, last = sentence.rpartition(" ")
    if ask == "next_sentence":
        return ("", sentence) if 5 <= len(sentence.split()) <= 25 else None
    last = last.rstrip(".!?")
    return (given, last) if 5 <= len(given.split()) <= 25 and last.isalpha() and len(last) > 3 else None


def questions_from_text(text: str, ask: str, before: int = 2) -> list[MultipleChoice]:
    """How does the text go on after some sentences: with the next sentence or one of as many words; or, within the next
    sentence, with its last word or one of as many letters?"""

    def size(choice: str) -> int:
        return len(choice.split()) if ask == "next_sentence" else len(choice)

    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())]
    split = [asked_part(sentence, ask) for sentence in sentences]
    alike: dict[int, set[str]] = {}
    for part in split:
        if part:
            alike.setdefault(size(part[1]), set()).add(part[1])
    generator, found = random.Random(0), []
    for at in range(before, len(sentences)):
        part = split[at]
        wrong = sorted(x for x in alike[size(part[1])] if x.lower() != part[1].lower()) if part else []
        if part and wrong:
            drawn = [part[1], *generator.sample(wrong, 1)]
            generator.shuffle(drawn)
            context = " ".join([*sentences[at - before : at], *([part[0]] if part[0] else [])])
            found.append(MultipleChoice(context, [f" {x}" for x in drawn], drawn.index(part[1])))
    return found
