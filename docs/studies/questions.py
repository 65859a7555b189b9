"""Are questions answered with exchanged tokens in their context?"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, row
from shared.texts import Source, documents
from torch import Tensor

from tl_posdisent.experiments import perturb

QUESTIONS = 50
FRACTIONS = (0.0, 0.1, 1.0)
Question = tuple[Tensor, list[int]]  # the ids of the context, and the right and the wrong next token


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Which of two words ends a sentence, with exchanged tokens in the context: the share right.

    Where all tokens are exchanged is the control: questions that this does not make harder show nothing.
    """
    if source != "speeches":
        return
    every = questions_of(model, " ".join(documents(source)))
    asked = [every[int(at)] for at in torch.linspace(0, len(every) - 1, QUESTIONS)]
    for fraction in FRACTIONS:
        call = f'perturb(model, context, "order", {fraction})'
        yield row(f"right, order, {fraction:.0%}", answers(model, asked, fraction), 0, call, "questions")


def answers(model: Any, asked: list[Question], fraction: float) -> Tensor:
    """``[question]``: 1 where the right token is likelier, with a fraction of the context's tokens exchanged."""
    collected = []
    for context, choices in asked:
        perturbed = perturb(model, context[None], "order", fraction)
        with torch.no_grad():
            right, wrong = model(perturbed.tokens)[0, -1, choices]
        collected.append(float(right > wrong))
    return torch.tensor(collected)


def questions_of(model: Any, text: str, before: int = 2) -> list[Question]:
    """Two sentences and a third without its last word; the choices are that word and another sentence's last word of as
    many letters, each of one token. Contexts have up to 600 characters."""
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())]
    last = [sentence.rpartition(" ")[2].rstrip(".!?") for sentence in sentences]
    ids = {word: model.to_tokens(f" {word}", prepend_bos=False)[0] for word in set(last) if word.isalpha()}
    known = {word: int(token[0]) for word, token in ids.items() if len(token) == 1 and len(word) > 3}
    generator, collected = random.Random(0), []
    for at in range(before, len(sentences)):
        context = " ".join([*sentences[at - before : at], sentences[at].rpartition(" ")[0]])
        word = last[at]
        wrong = sorted(x for x in known if len(x) == len(word) and x.lower() != word.lower())
        if word in known and wrong and 5 <= len(sentences[at].split()) - 1 <= 25 and len(context) < 600:
            collected.append((model.to_tokens(context)[0], [known[word], known[generator.choice(wrong)]]))
    return collected
