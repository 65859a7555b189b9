"""One measurement per section of a report, from a subject and a seed to a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.experiments.attention_scores.head_labels import head_labels
from tl_posdisent.experiments.attention_scores.queries_and_keys import subspace_patterns
from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve
from tl_posdisent.models.capture import for_each_scores, of_heads
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.page.every_head import HEAD, ablation, ladder
from tl_posdisent.page.subject import FRACTIONS, PERTURBATIONS, POSITIONS, TOKENS, Subject
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import number_heads

READ = {"labels": (512, 1024), "perturbation": (512, 512), "ablation": (96, 384), "ladder": (128, 512)}
"""Positions of each text, and tokens altogether, of sections that read less than the report."""


def narrowed(name: str, subject: Subject) -> Subject:
    """Select the texts that a section measures."""
    positions, tokens = READ.get(name, (POSITIONS, TOKENS))
    return subject.some(min(subject.lengths) if name == "distance" else positions, tokens)


SectionName = Literal[
    "additivity", "distance", "shares", "subspaces", "labels", "heads", "perturbation", "ablation", "ladder"
]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)

SHARES = ["share_distance", "share_query", "share_key"]
_LEAST = 3  # texts of at most this many tokens keep their first key
_PROFILES = 12  # layers whose distance profiles are drawn
_BAR = "{l_bar}{bar}| [{elapsed}{postfix}]"
_PARTS = {"additivity": 5, "distance": 2, "shares": 1, "subspaces": 2, "labels": 4, "heads": 1, "perturbation": 14}
_PARTS |= {"ablation": 19, "ladder": 48}
_COPY = 4
"""Parts of the bar, in percent, of sections and of each random copy: by measured time, SmolLM2-135M, demo text."""


@dataclass(frozen=True)
class Found:
    """The measurement of a section, or the reason for its absence.

    Attributes:
        trained: a table, or ``Exhibits`` for the section ``heads``; None if refused.
        random: the same table for all random initialisations, with a column ``seed``; None without.
        refused: why there is no measurement: the model does not support it, or (``failed``) there was an error.
        note: what was left out of the measurement, and why.
        read: the texts and heads that were measured.
    """

    trained: Any = None
    random: pd.DataFrame | None = None
    refused: str | None = None
    failed: bool = False
    note: str | None = None
    read: Subject | None = None

    @property
    def run(self) -> list[tuple[int, int]]:
        """Layer and head of the heads that were run, if the numbers of the others are estimates; else empty."""
        if self.refused or "exact" not in self.trained or self.trained["exact"].all():
            return []
        exact = self.trained[self.trained["exact"]][HEAD].drop_duplicates().astype(int)
        return [*exact.itertuples(index=False, name=None)]

    @property
    def agreement(self) -> str:
        """State for how many heads the model was run, and how far the estimates of the others can be trusted."""
        if not self.run:
            return ""
        statement = self.trained.attrs["search"]["statement"]
        return f"{statement[0].upper()}{statement[1:]}. The numbers of the others are estimated from gradients."


class Copies(NamedTuple):
    """The random-weights baseline: the number of copies, and the standard deviation of their weights."""

    n: int
    std: float

    def seeds(self, first: int) -> range:
        return range(first, first + self.n)


@dataclass(frozen=True)
class Exhibits:
    """The most and the least additive head (layer, head), with the fits and scores of their layers."""

    most: tuple[int, int]
    least: tuple[int, int]
    fits: dict[int, AdditiveFit]
    scores: dict[int, Float[Tensor, "1 head query key"]]


def measure(
    subject: Subject, wanted: Sequence[SectionName], *, copies: Copies, seed: int, progress: bool
) -> dict[SectionName, Found]:
    """Run the measurements of the requested sections; raise if this model supports none of them."""
    needed = [name for name in SECTIONS if name in wanted or (name == "additivity" and "heads" in wanted)]
    found: dict[SectionName, Found] = {}
    total = sum(_PARTS[name] for name in needed) + _COPY * copies.n * any(name in _COMPARED for name in wanted)
    with progress_bar(total=total, desc="report", bar_format=_BAR, disable=not progress) as bar:
        for name in needed:
            bar.set_postfix_str(name)
            found[name] = _try(name, subject, found, seed, copies, progress)
            bar.update(_PARTS[name])
        if all(found[name].refused for name in wanted):
            raise ValueError(f"none of the requested sections can be measured: {found[wanted[0]].refused}")
        compared = [name for name in _COMPARED if name in wanted and not found[name].refused]
        chance: dict[SectionName, list[pd.DataFrame]] = {name: [] for name in compared}
        seeds = copies.seeds(seed) if compared else range(0)
        models = random_control(subject.model, seeds, std=copies.std) if seeds else ()
        for n, copy in zip(seeds, models, strict=True):
            bar.set_postfix_str("random initialisation")
            untrained = replace(subject, reading=read_model(copy))
            for name, tables in chance.items():
                try:
                    tables.append(_MEASUREMENTS[name](untrained, seed).assign(seed=n))
                except _FAILURES as error:
                    missing = f"Not measured with random weights of seed {n}: {type(error).__name__}: {error}."
                    found[name] = replace(found[name], note=" ".join(filter(None, [found[name].note, missing])))
            del copy, untrained  # free their memory before the next
            bar.update(_COPY)
    for name, tables in chance.items():
        if tables:
            found[name] = replace(found[name], random=pd.concat(tables, ignore_index=True))
    return found


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Average over texts and seeds: one row for each layer and head."""
    return table.drop(columns=["batch", "seed"], errors="ignore").groupby(HEAD, as_index=False).mean()


def _try(
    name: SectionName,
    subject: Subject,
    found: Mapping[SectionName, Found],
    seed: int,
    copies: Copies,
    progress: bool,
) -> Found:
    """Run one measurement, or return why it failed: an unsuitable input (``ValueError``) or a failed computation."""
    part = narrowed(name, subject)
    try:
        if name == "heads":
            return found["additivity"] if found["additivity"].refused else Found(_heads(part, found["additivity"]))
        if name == "labels":
            table = _labels(part, seed, copies)
        elif name == "additivity":
            table = _additivity_and_controls(part, seed)
        elif name in _BY_HEAD:
            table = _BY_HEAD[name](part, seed, progress)
        else:
            table = _MEASUREMENTS[name](part, seed)
        failures = "; ".join(f"{label}: {reason}" for label, reason in table.attrs.get("failures", {}).items())
        notes = [table.attrs.get("selection"), f"Not measured: {failures}." if failures else None]
        return Found(table, note=" ".join(filter(None, notes)) or None, read=part)
    except ValueError as error:
        if name != "perturbation":
            return Found(refused=str(error))
        try:  # the order of the text can be perturbed without RoPE
            note = f"Only the order of the text: {error}."
            return Found(_perturbation(part, seed, ["order"]), note=note, read=part)
        except ValueError as second:
            return Found(refused=str(second))
    except _FAILURES as error:
        warnings.warn(f"the section {name} could not be measured: {type(error).__name__}: {error}", stacklevel=4)
        return Found(refused=f"{type(error).__name__}: {error}", failed=True)


def _common(subject: Subject) -> dict[str, Any]:
    return {"model": subject.reading, **subject.texts, **subject.asked, "progress": False}


def _additivity_and_controls(subject: Subject, seed: int) -> pd.DataFrame:
    """Measure additivity, with the r of foreign keys as a column, ``r, foreign keys``."""
    try:
        table = additivity(**_common(subject), controls=["foreign keys"])
    except ValueError as error:  # scores that are not those of queries and keys alone, or the model's only layer
        found = _without_first(subject, additivity(**_common(subject)))
        found.attrs["failures"] = {"controls": str(error)}
        return found
    rows = {name: part.reset_index(drop=True) for name, part in table.groupby("scores")}
    own = rows["own"].drop(columns="scores")
    own = own.assign(**{"r, foreign keys": rows["foreign keys"][told_apart(own)]})
    return _without_first(subject, own)


def _without_first(subject: Subject, table: pd.DataFrame) -> pd.DataFrame:
    """Add ``r_without_first``, of fits without the first key, which often is an attention sink."""
    without = additivity(**_common(subject), sinks=1)["r"] if min(subject.lengths) > _LEAST else np.nan
    return table.assign(r_without_first=without)


def told_apart(table: pd.DataFrame) -> str:
    """Return the column of ``additivity`` that best separates trained from random weights."""
    return "r_held_out" if "r_held_out" in table else "r"


def _of_layers(experiment: Callable[..., pd.DataFrame], subject: Subject, seed: int) -> pd.DataFrame:
    return experiment(**_common(subject))


def _labels(subject: Subject, seed: int, copies: Copies) -> pd.DataFrame:
    """Label heads, with the mean over random copies beside each measure; ``head_labels`` makes these copies itself."""
    return head_labels(**_common(subject), seed=seed, seeds=copies.seeds(seed), std=copies.std)


def _perturbation(subject: Subject, seed: int, kinds: Any = ("order", "index", "feature")) -> pd.DataFrame:
    options: dict[str, Any] = {"fractions": FRACTIONS, "seeds": range(seed, seed + PERTURBATIONS), "progress": False}
    return perturbation_curve(subject.reading, **subject.texts, kinds=kinds, **options)


def profiled(specs: Sequence[AttentionSpec]) -> list[int]:
    """Choose the layers whose distance profiles are drawn, at equal steps."""
    picked = np.unique(np.linspace(0, len(specs) - 1, _PROFILES).round().astype(int))
    return [specs[n].layer for n in picked]


def powers(distances: Any) -> list[int]:
    """Return those of the distances 0, 1, 2, 4, 8 … that are there: the places of the profiles in the atlas."""
    known = set(distances)
    return [distance for distance in (0, *(2**n for n in range(20))) if distance in known]


def _distance(subject: Subject, seed: int) -> pd.DataFrame:
    """Fit each head's distance component to all texts: ``layer``, ``head``, ``distance``, ``value``, ``cells``.

    Layers that are not drawn have the distances of the atlas only, so that the table of a large model is small.
    """
    tables: list[pd.DataFrame] = []
    tokens, drawn = subject.tokens, profiled(subject.specs)

    def fitted(spec: AttentionSpec, scores: Tensor) -> None:
        some = subject.heads[spec.layer]
        fit = fit_additive(of_heads(scores, sorted(some)), pool=True, **_cells(spec))
        table = number_heads(fit.to_frame("distance"), sorted(some)).assign(layer=spec.layer)
        if spec.layer not in drawn:
            table = table[table["distance"].isin(powers(table["distance"]))]
        tables.append(table.assign(cells=tokens.shape[1] - table["distance"].abs()))

    for_each_scores(subject.model, tokens, subject.specs, fitted)
    return pd.concat(tables, ignore_index=True)[[*HEAD, "distance", "value", "cells"]]


def _heads(subject: Subject, found: Found) -> Exhibits:
    r = by_head(found.trained).dropna(subset="r").sort_values("r", ascending=False, kind="stable")
    if r.empty:
        raise ValueError("no head has scores that vary, so none is more additive than another")
    most, least = ((int(row["layer"]), int(row["head"])) for row in (r.iloc[0], r.iloc[-1]))
    fits: dict[int, AdditiveFit] = {}
    kept: dict[int, Tensor] = {}

    def fitted(spec: AttentionSpec, scores: Tensor) -> None:
        fits[spec.layer], kept[spec.layer] = fit_additive(scores, **_cells(spec)), scores

    specs = subject.reading.specs(sorted({most[0], least[0]}))
    for_each_scores(subject.model, subject.first, specs, fitted)
    return Exhibits(most, least, fits, kept)


def _cells(spec: AttentionSpec) -> dict[str, Any]:
    return {"mask": "causal" if spec.causal else "full", "window": spec.window}


_MEASUREMENTS: dict[SectionName, Callable[[Subject, int], pd.DataFrame]] = {
    "additivity": partial(_of_layers, additivity),
    "distance": _distance,
    "shares": partial(_of_layers, controlled_distance),
    "subspaces": partial(_of_layers, subspace_patterns),
    "perturbation": _perturbation,
}
_BY_HEAD: dict[SectionName, Callable[[Subject, int, bool], pd.DataFrame]] = {"ablation": ablation, "ladder": ladder}
"""The long sections, which show a bar of their own."""
_COMPARED: tuple[SectionName, ...] = ("additivity", "shares", "subspaces")  # these have a random-weights baseline
_FAILURES = (ValueError, RuntimeError, MemoryError)
