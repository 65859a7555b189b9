"""Multiple-choice questions made from a text."""

from __future__ import annotations

import random
import re

from tl_posdisent.experiments import MultipleChoice


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
    parts = [asked_part(sentence, ask) for sentence in sentences]
    alike: dict[int, set[str]] = {}
    for part in parts:
        if part:
            alike.setdefault(size(part[1]), set()).add(part[1])
    generator, found = random.Random(0), []
    for at in range(before, len(sentences)):
        part = parts[at]
        wrong = sorted(x for x in alike[size(part[1])] if x.lower() != part[1].lower()) if part else []
        if part and wrong:
            drawn = [part[1], *generator.sample(wrong, 1)]
            generator.shuffle(drawn)
            context = " ".join([*sentences[at - before : at], *([part[0]] if part[0] else [])])
            found.append(MultipleChoice(context, [f" {x}" for x in drawn], drawn.index(part[1])))
    return found
