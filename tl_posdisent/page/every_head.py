"""Measurements that take runs for each head: of as many heads as a budget allows, and estimates for the others.

The heads with the largest estimates are run, and in the ladder some of the others at random, which show how well
estimates agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from tl_posdisent.additive.attention.rungs import Rung
from tl_posdisent.experiments.causal.attention_ladder import MEAN, attention_ladder
from tl_posdisent.experiments.causal.estimated_ladder import estimated_ladder
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.head_effects import head_effects
from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.experiments.causal.metrics import next_token_loss, value_of
from tl_posdisent.experiments.causal.runs import run_texts
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.page.subject import Subject

HEAD = ["layer", "head"]
IDLE = ("not used", "no effect")
"""Verdicts of heads whose output or attention the predictions do not need."""
LADDER: tuple[Rung, ...] = ("first_token", "distance", "distance+sink", "static", "additive", "banded")

PASSES = {"ablation": 0.62, "ladder": 7.0}
"""Forward passes of all texts per head that is run, by processor time on a model of 30 layers of 9 heads."""
BUDGET = 2.5e12
"""Maximum multiplications in the forward passes of such a section: parameters × tokens × passes × heads. They take
a minute or two on a CPU; models of a few million parameters need less for all heads."""
LEAST = 8
"""Minimum number of heads that are run."""
AUDIT = 12
"""Number of these heads that are drawn at random, at most half of them."""
DRAWS = 16
"""Draws of labels for each text, for estimates: with fewer, these are most of the spread over texts."""
TEXTS, SHORTEST = 8, 64
"""Estimates of the ladder need several held-out texts: texts are cut into so many parts, of at least so many tokens."""


def affordable(name: str, subject: Subject) -> int:
    """Return how many heads a section can run within its budget."""
    each = PASSES[name] * subject.n_parameters * sum(subject.lengths)
    return min(len(subject.pairs), max(LEAST, int(BUDGET / each)))


def for_estimates(subject: Subject, part: Subject, positions: int, tokens: int) -> Subject:
    """Return the texts of the ladder: ``part`` if all heads are run or there are enough texts, else parts of texts."""
    if affordable("ladder", part) == len(subject.pairs) or len(part.tokens) >= TEXTS:
        return part
    total = min(tokens, sum(subject.lengths))
    length = min(positions, max(total // TEXTS, min(SHORTEST, total // 4)))
    return subject.pieces(length, tokens) if length > 1 else part


def ablation(subject: Subject, seed: int, progress: bool) -> pd.DataFrame:
    """Measure the added loss without each head: the table of ``head_ablation``, and whether a head was run (``exact``).

    If not all heads are run, ``attrs["search"]`` is that of ``head_effects``.
    """
    options: dict[str, Any] = {"model": subject.reading, **subject.texts, "heads": subject.pairs, "progress": progress}
    n = affordable("ablation", subject)
    if n == len(subject.pairs):
        return head_ablation(**options, layers=subject.asked).assign(exact=True)
    zero = {"zero": ablate_heads(subject.reading, subject.pairs)}
    most = max(LEAST, n - len(subject.layers))  # each layer takes a run of its own
    effects = head_effects(**options, interventions=zero, draws=DRAWS, exact=LEAST // 2, most=most, seed=seed)
    known = effects["exact"].notna()
    table = (
        effects[HEAD]
        .astype(int)
        .assign(baseline=_loss(subject), effect=effects["exact"].where(known, effects["estimate"]), exact=known)
    )
    table.insert(3, "value", table["baseline"] + table["effect"])
    table.attrs = {"search": effects.attrs["search"]["zero"]}
    return table


def _loss(subject: Subject) -> float:
    """Compute the loss of the unmodified model."""
    model = subject.model
    texts = read_texts(model, *subject.texts.values())
    with running(model):
        return value_of(next_token_loss, run_texts(model, texts, [[]] * len(texts.groups)), texts)


def ladder(subject: Subject, seed: int, progress: bool) -> pd.DataFrame:
    """Measure the ladder of each head: rows of ``attention_ladder`` for heads that are run (``exact``), else estimates.

    If not all heads are run, ``attrs["audit"]`` compares the divergences with the mean output (``_audit``). A head that
    fails in all runs has no rows, or its estimates.
    """
    n = affordable("ladder", subject)
    if n == len(subject.pairs):
        table = _climbed(subject, subject.pairs, [], _held_out(subject, 2), progress)
        return _with_attrs(table.assign(exact=True), table.attrs)
    texts = {"heldout": subject.tokens, "heldout_mask": subject.real} | _held_out(subject, 4)
    options: dict[str, Any] = {"heads": subject.pairs, "draws": DRAWS, "seed": seed, "progress": progress}
    estimates = estimated_ladder(subject.reading, **texts, exact=0, **options)
    means = estimates[estimates["rung"] == MEAN].set_index(HEAD)["kl"].sort_values(ascending=False, kind="stable")
    drawn = min(AUDIT, n // 2)
    largest, others = means.index[: n - drawn], means.index[n - drawn :].sort_values()
    at_random = others[np.random.default_rng(seed).permutation(len(others))[:drawn]]
    chosen, used = [(int(layer), int(head)) for layer, head in sorted(largest.append(at_random))], _used(estimates)
    run = _climbed(subject, chosen, [head for head in chosen if head in used], texts, progress)
    rest = estimates[~_within(estimates, pd.MultiIndex.from_frame(run[HEAD]))]
    table = pd.concat([run.assign(exact=True), rest.assign(exact=False)]).sort_values(HEAD, kind="stable")
    exact = run[run["rung"] == MEAN].set_index(HEAD)["kl"]
    audit = _audit(means, exact, [x for x in largest if x in exact.index], [x for x in at_random if x in exact.index])
    return _with_attrs(table.reset_index(drop=True), run.attrs | {"audit": audit})


def _audit(
    estimates: pd.Series, exact: pd.Series, largest: Sequence[Any], drawn: Sequence[Any]
) -> dict[str, float | int]:
    """Compare estimates with runs, for heads that were run for their ``largest`` estimates and others that were drawn.

    ``overlooked`` is the number of drawn heads whose exact number is among those of the largest.
    """
    ranks = pd.DataFrame({"estimate": estimates[drawn], "exact": exact[drawn]}).rank()
    correlation = ranks["estimate"].corr(ranks["exact"]) if len(drawn) > 2 else np.nan
    top = exact[[*largest, *drawn]].nlargest(len(largest)).index
    counts = {"exact": len(largest), "audited": len(drawn), "overlooked": sum(head in drawn for head in top)}
    return {**counts, "rank_correlation": float(correlation)}


def _held_out(subject: Subject, every: int) -> dict[str, Any]:
    """Fit every second (or fourth) text, the longest among them, and hold out the others.

    A single text serves as both. Estimates have errors over the texts held out, so they need more of these.
    """
    tokens, real, order = subject.tokens, subject.real, np.argsort([-n for n in subject.lengths], kind="stable")
    rest = np.delete(order, np.s_[::every])
    texts: dict[str, Any] = {"tokens": tokens[order[::every]], "attention_mask": real[order[::every]]}
    return texts | ({"heldout": tokens[rest], "heldout_mask": real[rest]} if len(rest) else {})


def _climbed(
    subject: Subject,
    heads: Sequence[tuple[int, int]],
    effective: Sequence[tuple[int, int]],
    texts: dict[str, Any],
    progress: bool,
) -> pd.DataFrame:
    """Measure uniform attention and the mean output for each head, and the other rungs where neither surely suffices.

    For ``effective`` heads, this is presumed. Heads with a failed run have no verdict and therefore no rows.

    Raises:
        ValueError: a run of every head failed.
    """
    failures: dict[str, str] = {}

    def climb(heads: Sequence[tuple[int, int]], rungs: Sequence[Rung]) -> pd.DataFrame:
        options: dict[str, Any] = {"controls": [], "progress": progress}
        table = attention_ladder(subject.reading, heads=heads, rungs=rungs, **options, **texts)
        failures.update(table.attrs.get("failures", {}))
        return table[table["loss"].notna().groupby([table[name] for name in HEAD]).transform("all")]

    tables = [climb(effective, LADDER)] if effective else []
    if others := [head for head in heads if head not in effective]:
        table = climb(others, ["uniform"])
        used = _used(table)
        tables.append(table[~_within(table, pd.MultiIndex.from_tuples(used))] if used else table)
        tables += [climb(used, LADDER)] if used else []
    table = pd.concat(tables).sort_values(HEAD, kind="stable", ignore_index=True)
    if table.empty:
        raise ValueError(next(iter(failures.values())))
    return _with_attrs(table, {"failures": failures})


def _used(table: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the heads for which neither uniform attention nor the mean output surely suffices."""
    if table.empty:
        return []
    verdicts = head_verdicts(table)
    return [*verdicts[~verdicts["verdict"].isin(IDLE)][HEAD].astype(int).itertuples(index=False, name=None)]


def _within(table: pd.DataFrame, heads: pd.MultiIndex) -> Any:
    return pd.MultiIndex.from_frame(table[HEAD]).isin(heads)


def _with_attrs(table: pd.DataFrame, attrs: dict[Any, Any]) -> pd.DataFrame:
    table.attrs = attrs
    return table
