"""Measurements that take runs for each head: of as many heads as a budget allows, and estimates for the others.

Runs of the heads with the largest estimates, and a bound for the others: ``head_effects``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tl_posdisent.additive.attention.rungs import Rung
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.experiments.causal.ladder import attention_ladder
from tl_posdisent.experiments.measuring.metrics import next_token_loss, value_of
from tl_posdisent.experiments.measuring.runs import run_texts
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.page.subject import Subject
from tl_posdisent.utils.words import plural

HEAD = ["layer", "head"]
IDLE = ("not used", "no effect")
"""Verdicts of heads without a measurable effect."""
LADDER: tuple[Rung, ...] = ("first_token", "distance", "distance+sink", "static", "additive")

PASSES = {"ablation": 0.62, "ladder": 7.0}
"""Forward passes of all texts per head that is run, by measured time on a model of 30 layers of 9 heads."""
BUDGET = 1e12
"""Maximum multiplications in the forward passes of such a section: parameters × tokens × passes × heads. Models of a
few million parameters need less for all heads."""
DRAWS = 8
"""Draws of labels for the estimates of heads that are not run."""
LEAST = 6
"""Minimum number of heads that are run."""


def affordable(name: str, subject: Subject) -> int:
    """Return how many heads a section can run within its budget."""
    each = PASSES[name] * subject.n_parameters * sum(subject.lengths)
    return min(len(subject.pairs), max(LEAST, int(BUDGET / each)))


def ablation(subject: Subject, seed: int, progress: bool) -> pd.DataFrame:
    """Measure the added loss without each head: the table of ``head_ablation``, and whether a head was run (``exact``).

    If not all heads are run, ``attrs["search"]`` is that of ``head_effects``.
    """
    options: dict[str, Any] = {"model": subject.reading, **subject.texts, "heads": subject.pairs, "progress": progress}
    n = affordable("ablation", subject)
    if n == len(subject.pairs):
        return head_ablation(**options).assign(exact=True)
    zero = {"zero": ablate_heads(subject.reading, subject.pairs)}
    most = max(LEAST, n - len(subject.layers))  # each layer takes a run of its own
    effects = head_effects(**options, interventions=zero, exact=max(1, most // 4), draws=DRAWS, seed=seed)
    known = effects["exact"].notna()
    table = (
        effects[HEAD]
        .astype(int)
        .assign(baseline=_loss(subject), effect=effects["exact"].where(known, effects["estimate"]), exact=known)
    )
    table.insert(3, "value", table["baseline"] + table["effect"])
    table.attrs = {"search": effects.attrs["runs"]["zero"]}
    return table


def _loss(subject: Subject) -> float:
    """Compute the loss of the unmodified model."""
    model = subject.model
    texts = read_texts(model, *subject.texts.values())
    with running(model):
        return value_of(next_token_loss, run_texts(model, texts, [[]] * len(texts.groups)), texts)


def ladder(subject: Subject, seed: int, progress: bool) -> pd.DataFrame:
    """Measure the ladder of each head, or of as many as the budget allows: those with the largest added loss.

    In that case ``attrs["selection"]`` says which. A head with a failed run has no verdict and therefore no rows.

    Raises:
        ValueError: a run of every head failed.
    """
    n_heads, heads = affordable("ladder", subject), subject.pairs
    if n_heads < len(subject.pairs):
        largest = ablation(subject, seed, progress).nlargest(n_heads, "effect")
        heads = sorted(largest[HEAD].astype(int).itertuples(index=False, name=None))
    texts = _held_out(subject)
    table = attention_ladder(subject.reading, heads=heads, rungs=LADDER, controls=[], progress=progress, **texts)
    known = table["kl"].notna().groupby([table[name] for name in HEAD]).transform("all")
    if not known.any():
        raise ValueError(next(iter(table.attrs["failures"].values())))
    table = table[known].reset_index(drop=True)
    if n_heads < len(subject.pairs):
        measured = f"{n_heads} of {plural(len(subject.pairs), 'head')}"
        table.attrs["selection"] = f"Measured for {measured}: those with the largest added loss when ablated."
    return table


def _held_out(subject: Subject) -> dict[str, Any]:
    """Fit every second text, the longest among them, and hold out the others; a single text serves as both."""
    order = np.argsort([-n for n in subject.lengths], kind="stable")
    rest = np.delete(order, np.s_[::2])
    chosen = {"tokens": order[::2], "heldout": rest} if len(rest) else {"tokens": order}
    return {
        name: {"input_ids": subject.tokens[rows], "attention_mask": subject.real[rows]} for name, rows in chosen.items()
    }
