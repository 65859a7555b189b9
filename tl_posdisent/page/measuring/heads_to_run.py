"""The heads for which sections run the model."""

from __future__ import annotations

import numpy as np

from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

MOST_HEADS = 40
"""Maximum number of heads of a section that runs the model for each head."""


def heads_to_run(subject: Subject) -> list[tuple[int, int]]:
    """Choose layer and head of each head that is run: all, or ``MOST_HEADS`` of them at equal steps.

    >>> from tl_posdisent import demo_tokens, load_demo_model
    >>> from tl_posdisent.page.measuring.subject import read_subject
    >>> len(heads_to_run(read_subject(load_demo_model(), demo_tokens(length=8))))
    40
    """
    pairs = subject.pairs
    if len(pairs) <= MOST_HEADS:
        return pairs
    return [pairs[place] for place in np.linspace(0, len(pairs) - 1, MOST_HEADS).round().astype(int)]


def runs_of_heads(subject: Subject) -> float:
    """Number of passes of one run for each head, from its layer on."""
    n_layers = len(subject.model.blocks)
    return sum(1 - layer / n_layers for layer, _ in heads_to_run(subject))


def sample_size(subject: Subject) -> str | None:
    """Return ``40 of 270 heads``; None if all heads are run."""
    n_run, n_heads = len(heads_to_run(subject)), len(subject.pairs)
    return None if n_run == n_heads else f"{n_run} of {plural(n_heads, 'head')}"


def sample_note(subject: Subject) -> str | None:
    """State how many heads are run, and where they are listed, if not all are."""
    size = sample_size(subject)
    return size and f"Measured for {size} at equal steps, which are listed under “What was analysed”."


def sample_list(subject: Subject) -> str:
    """List the heads that are run."""
    labels = ", ".join(head_label(*pair) for pair in heads_to_run(subject))
    return f"{sample_size(subject)} at equal steps: {labels}. Select other heads with heads=."
