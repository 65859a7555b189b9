"""Findings about perturbed text: neighbouring tokens exchanged, or only their positions, or only rotary features."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import torch
from rows import Row, row
from texts import Source, documents, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import perturb

TEXTS, LENGTH, DRAWS, QUESTIONS = 3, 256, 6, 50
KINDS = ("order", "index", "feature")
FRACTIONS = (0.05, 0.1, 0.25)
STUDIES = ("perturbation", "questions")


def perturbation(model: Any, source: Source) -> Iterator[Row]:
    """The loss added at intact positions (neither token nor next token moved) and accuracy, by kind and fraction;
    ratios of kinds, over draws and over texts. Where the text is not moved, the added loss at all positions, too."""
    texts, draws = parts(model, source, TEXTS, LENGTH), how_many(model, source, DRAWS)
    found = curves(model, texts, draws)
    over = f"draws, {len(texts)} texts"
    for kind, fraction in found["accuracy"]:
        name, call = f"{kind}, {fraction:.0%}", f'perturbation_curve(model, texts, ["{kind}"], [{fraction}])'
        for what, values in found.items():
            if (what == "accuracy" or fraction) and (kind, fraction) in values:
                yield row(f"{what}, {name}", values[kind, fraction].mean(1), LENGTH, call, over)
    for what, a in (("added loss", "order"), ("added loss", "feature"), ("added loss at all positions", "feature")):
        for fraction in FRACTIONS:
            pair = found[what][a, fraction], found[what]["index", fraction]
            for unit, axis in (("draws", 1), ("texts", 0)):
                value, error = ratio(*(values.mean(axis) for values in pair))
                name = f"{what}, {a} over index, {fraction:.0%}, error over {unit}"
                yield Row(name, value, error, f"{pair[0].shape[1 - axis]} {unit}", LENGTH, "perturbation_curve")


def curves(model: Any, texts: Tensor, draws: int) -> dict[str, dict[Any, Tensor]]:
    """``[draw, text]`` added losses and accuracy, by kind and fraction; accuracy also of the unperturbed text."""
    reading = tp.read_model(model)
    tables = [
        [tp.perturbation_curve(reading, text[None], KINDS, (0, *FRACTIONS), [seed], progress=False) for text in texts]
        for seed in range(draws)
    ]
    by_case = [[table.set_index(["kind", "fraction"]) for table in of_draw] for of_draw in tables]

    def values(kind: str, fraction: float, column: str) -> Tensor:
        return torch.tensor([[table.loc[(kind, fraction), column] for table in some] for some in by_case])

    cases = [(kind, fraction) for kind in KINDS for fraction in FRACTIONS]
    unmoved = values("index", 0, "perplexity").log()  # with "order", next tokens are moved themselves
    at_all = {case: values(*case, "perplexity").log() - unmoved for case in cases if case[0] != "order"}
    return {
        "added loss": {case: values(*case, "added_loss") for case in cases},
        "added loss at all positions": at_all,
        "accuracy": {case: values(*case, "accuracy") for case in [("order", 0), *cases]},
    }


def ratio(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The ratio of two means, and its standard error by leaving out one pair of values after another (jackknife)."""
    n = len(x)
    without = (x.sum() - x) / (y.sum() - y)
    return (x.mean() / y.mean()).item(), ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()


def questions(model: Any, source: Source) -> Iterator[Row]:
    """Which of two words ends a sentence, with exchanged tokens in the context: the share right, and its change.

    Where all tokens are exchanged is the control: questions that this does not make harder show nothing.
    """
    if source != "speeches":
        return
    asked = spread(questions_of(model, " ".join(documents(source))), QUESTIONS)
    right = {fraction: answers(model, asked, fraction) for fraction in (0.0, *FRACTIONS, 1.0)}
    length = round(sum(len(context) for context, _ in asked) / len(asked))
    for fraction, values in right.items():
        call = f'perturb(model, context, "order", {fraction}), contexts of {length} tokens on average'
        yield row(f"right, order, {fraction:.0%}", values, 0, call, "questions")
        if fraction:
            yield row(f"change of right, order, {fraction:.0%}", values - right[0], 0, call, "questions")


Question = tuple[Tensor, list[int]]  # the ids of the context, and the right and the wrong next token


def answers(model: Any, asked: list[Question], fraction: float) -> Tensor:
    """``[question]``: 1 where the right token is likelier, with a fraction of the context's tokens exchanged."""
    found = []
    for context, choices in asked:
        perturbed = perturb(model, context[None], "order", fraction)
        with torch.no_grad():
            right, wrong = model(perturbed.tokens)[0, -1, choices]
        found.append(float(right > wrong))
    return torch.tensor(found)


def spread(some: list[Any], n: int) -> list[Any]:
    """N of a list, evenly spread."""
    return [some[int(at)] for at in torch.linspace(0, len(some) - 1, n)]


def questions_of(model: Any, text: str, before: int = 2) -> list[Question]:
    """Two sentences and a third without its last word; the choices are that word and another sentence's last word of as
    many letters, each of one token. Contexts have up to 600 characters."""
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())]
    last = [sentence.rpartition(" ")[2].rstrip(".!?") for sentence in sentences]
    ids = {word: model.to_tokens(f" {word}", prepend_bos=False)[0] for word in set(last) if word.isalpha()}
    known = {word: int(token[0]) for word, token in ids.items() if len(token) == 1 and len(word) > 3}
    generator, found = random.Random(0), []
    for at in range(before, len(sentences)):
        context = " ".join([*sentences[at - before : at], sentences[at].rpartition(" ")[0]])
        word = last[at]
        wrong = sorted(x for x in known if len(x) == len(word) and x.lower() != word.lower())
        if word in known and wrong and 5 <= len(sentences[at].split()) - 1 <= 25 and len(context) < 600:
            found.append((model.to_tokens(context)[0], [known[word], known[generator.choice(wrong)]]))
    return found
