"""The section ``ladder``: the simplest attention that suffices for each head."""

from __future__ import annotations

import numpy as np
import pandas as pd
from markupsafe import Markup
from torch import Tensor

from tl_posdisent.additive.attention.rungs import Rung
from tl_posdisent.experiments.causal.head_verdicts import NEGLIGIBLE, head_verdicts
from tl_posdisent.experiments.causal.ladder import attention_ladder
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.words import MISSING, are, counted, number
from tl_posdisent.page.drawing.maps import head_map, with_attention
from tl_posdisent.page.drawing.markup import render, table
from tl_posdisent.page.measuring.heads_to_run import heads_to_run, runs_of_heads, sample_note, sample_size
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, Settings, failures_note, join_notes
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Measured, Section
from tl_posdisent.utils.words import plural
from tl_posdisent.viz.plots.heatmaps import bar_title, plot_heads, plot_verdicts

_POSITIONS, _TOKENS = 128, 512
"""Positions of each text, and tokens altogether, that are read."""
MEASURED_RUNGS: tuple[Rung, ...] = ("first_token", "distance", "distance+sink", "static", "additive")
"""The rungs that are measured."""
_ERROR = "standard error over texts (or parts of long texts)"
_IDLE = ("not used", "no effect")
"""Verdicts of heads without a measurable effect."""
_KINDS = ("first token", "distance", "static", "additive", "more than additive", "undecided")
"""Verdicts of the other heads."""


def _measure(subject: Subject, settings: Settings, _: Measured) -> Measurement:
    """Measure the ladder of each head that is run. A head with a failed run has no verdict and therefore no rows."""
    part = subject.cut(_POSITIONS, _TOKENS)
    texts, heldout = split_texts(part)
    table = attention_ladder(
        part.reading,
        texts,
        heldout=heldout,
        heads=heads_to_run(part),
        rungs=MEASURED_RUNGS,
        controls=[],
        progress=settings.progress,
    )
    known = table["kl"].notna().groupby([table[name] for name in HEAD]).transform("all")
    if not known.any():
        raise ValueError(next(iter(table.attrs["failures"].values())))
    note = join_notes(sample_note(part), failures_note(table))
    return Measurement(table[known].reset_index(drop=True), note=note, read=part, sample=sample_size(part))


def split_texts(subject: Subject) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return every second text, the longest among them, for fits, and the others, held out; None for a single text."""
    order = np.argsort([-length for length in subject.lengths], kind="stable")
    fitted, heldout = order[::2], np.delete(order, np.s_[::2])

    def select(rows: np.ndarray) -> dict[str, Tensor]:
        return {"input_ids": subject.tokens[rows], "attention_mask": subject.real[rows]}

    return select(fitted), select(heldout) if len(heldout) else None


def _passes(subject: Subject, settings: Settings) -> float:
    part = subject.cut(_POSITIONS, _TOKENS)
    return (1 + len(MEASURED_RUNGS) * runs_of_heads(part)) * sum(part.lengths)


def _show(subject: Subject, measurement: Measurement) -> Content:
    rungs, verdicts = measurement.trained, head_verdicts(measurement.trained)
    gaps = plot_heads(verdicts.assign(gap_se=verdicts["error"]), "gap")
    gaps.update_traces(colorbar_title_text=bar_title("divergence (nats per token)"))
    caption = f"Gap: divergence of the predictions with uniform attention, ± a {_ERROR}"
    values = {
        "held_out": len((measurement.read or subject).tokens) > 1,
        "negligible": NEGLIGIBLE,
        "verdicts": head_map(plot_verdicts(verdicts, rungs=rungs), "Verdict by head", subject),
        "gaps": head_map(gaps, caption, subject),
        "table": _table(subject, rungs, verdicts),
    }
    return Content(render("sections/ladder", **values))


def _table(subject: Subject, rungs: pd.DataFrame, verdicts: pd.DataFrame) -> Markup:
    """List the heads with a possible effect; empty without any."""
    shown = verdicts[~verdicts["verdict"].isin(_IDLE)].sort_values("gap", ascending=False, kind="stable")
    if shown.empty:
        return Markup()
    recovered = (
        rungs.pivot(index=HEAD, columns="rung", values="recovered_kl").reindex(columns=[*MEASURED_RUNGS]).reset_index()
    )
    rows = shown.replace({"between": {"": MISSING}}).merge(recovered, on=HEAD, how="left")
    last = ["first_token", "error", "between"]
    rows = rows[[*HEAD, "verdict", "gap", *(rung for rung in MEASURED_RUNGS if rung not in last), *last]]
    titles = {"gap": "gap (nats per token)", "error": "standard error of the gap", "distance+sink": "distance + sink"}
    titles |= {"first_token": "first token", "between": "undecided between"}
    caption = f"Heads with a possible effect: the gap with its {_ERROR}, and the share that each pattern recovers"
    return table("ladder", caption, with_attention(rows, subject.attention), titles)


def _sentences(measurement: Measurement) -> list[Markup]:
    verdicts = head_verdicts(measurement.trained)
    used = _are_used(verdicts)
    n_used = int(used.sum())
    sentence = Markup("The predictions depend on {}, by more than {} nats per token{} {}.")
    heads = f"{n_used or 'none'} of {plural(len(verdicts), 'head')}"
    n_unsure = int((~used & ~verdicts["verdict"].isin(_IDLE)).sum())
    unsure = f"; {are(n_unsure)} undecided" if n_unsure else ""
    link = link_section(LADDER.name, measurement)
    if not n_used:
        return [sentence.format(heads, NEGLIGIBLE, unsure, link)]
    depend = sentence.format(heads, NEGLIGIBLE, unsure, link)
    return [depend, _kinds(verdicts[used]), _by_chance(len(verdicts))]


def _kinds(used: pd.DataFrame) -> Markup:
    """Count the verdicts of the heads that change the predictions."""
    n_heads = used["verdict"].value_counts()
    kinds = counted({kind: int(n_heads[kind]) for kind in _KINDS if kind in n_heads})
    return Markup(
        "They diverge by so much both with the head’s mean output in its place and with uniform attention there. By "
        "the simplest attention that recovers 95 % of the latter divergence, the {} are: {}."
    ).format(len(used), kinds)


def _by_chance(n_heads: int) -> Markup:
    """State how many heads without an effect would be counted."""
    return Markup(
        "Each head has a 95 % interval of its own: of {} heads that diverge by no more than {} nats, at most {} would "
        "be counted by chance on average."
    ).format(n_heads, NEGLIGIBLE, number(0.025 * n_heads, 1))


def _are_used(verdicts: pd.DataFrame) -> pd.Series:
    """Whether a head surely changes the predictions, with its mean output in its place and with uniform attention."""
    return ~verdicts["simplest"].isin(["mean_output", "uniform"])


LADDER = Section("ladder", "Attention ladder", _measure, _passes, _show, _sentences)
