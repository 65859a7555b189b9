"""Measurements of a report: a function for each section, from a subject and a seed to a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.attention.rungs import Rung
from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.experiments.attention_scores.subspace_patterns import subspace_patterns
from tl_posdisent.experiments.causal.attention_ladder import attention_ladder, head_verdicts
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec

from .subject import Subject

SectionName = Literal["additivity", "distance", "shares", "subspaces", "heads", "perturbation", "ablation", "ladder"]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)

HEAD = ["layer", "head"]
SHARES = ["share_distance", "share_query", "share_key"]
FRACTIONS = (0, 0.05, 0.1, 0.2, 0.5)
PERTURBATIONS = 2
_PERTURBED = (512, 1024)  # positions, tokens: each run is a forward pass with logits
_LEAST = 3  # keys below which none is left out
_ABLATED = (128, 512)  # the same for a pass without each head
_CLIMBED = (128, 1024)  # positions, tokens of the ladder, half of which its static heads are fitted to
LADDER: tuple[Rung, ...] = ("distance", "distance+sink", "static", "additive", "banded")
_PROFILES = 12  # layers whose distance profiles are drawn


@dataclass(frozen=True)
class Found:
    """The measurement of a section, or the reason for its absence.

    Attributes:
        trained: a table; for the section ``heads`` an ``Exhibits``; None if refused.
        random: the same table for all random initialisations, with a column ``seed``; None without.
        refused: why the model does not support this measurement.
        note: what was left out of it, and why.
    """

    trained: Any = None
    random: pd.DataFrame | None = None
    refused: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Exhibits:
    """The most and the least additive head (layer, head), and their layers in the first text.

    Attributes:
        most, least: layer and head.
        ranking: ``layer``, ``head``, ``r`` and shares of heads, most additive first; means over texts.
        fits, scores: of each of their layers, ``[1, head, query, key]``.
    """

    most: tuple[int, int]
    least: tuple[int, int]
    ranking: pd.DataFrame
    fits: dict[int, AdditiveFit]
    scores: dict[int, Float[Tensor, "1 head query key"]]


def measure(
    subject: Subject, wanted: Sequence[SectionName], *, control: int, seed: int, progress: bool
) -> dict[SectionName, Found]:
    """Run the measurements of the sections wanted, each with the same numbers as when it is called alone.

    Raises:
        ValueError: none of them can be made for this model.
    """
    needed = [name for name in SECTIONS if name in wanted or (name == "additivity" and "heads" in wanted)]
    found: dict[SectionName, Found] = {}
    with tqdm(total=len(needed) + control, desc="report", disable=not progress) as bar:
        for name in needed:
            bar.set_postfix_str(name)
            found[name] = _heads(subject, found["additivity"]) if name == "heads" else _try(name, subject, seed)
            bar.update()
        if all(one.refused for one in found.values()):
            raise ValueError(f"nothing of this can be measured: {next(iter(found.values())).refused}")
        compared = [name for name in _COMPARED if name in found and not found[name].refused]
        chance: dict[SectionName, list[pd.DataFrame]] = {name: [] for name in compared}
        seeds = range(seed, seed + control if compared else seed)
        for n, copy in zip(seeds, random_control(subject.model, seeds) if seeds else (), strict=True):
            bar.set_postfix_str("random initialisation")
            untrained = replace(subject, reading=read_model(copy))
            for name, tables in chance.items():
                tables.append(_MEASUREMENTS[name](untrained, seed).assign(seed=n))
            del copy, untrained  # free their memory before the next
            bar.update()
    for name, tables in chance.items():
        if tables:
            found[name] = replace(found[name], random=pd.concat(tables, ignore_index=True))
    return found


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over texts and seeds, one row for each layer and head."""
    return table.drop(columns=["batch", "seed"], errors="ignore").groupby(HEAD, as_index=False).mean()


def _try(name: SectionName, subject: Subject, seed: int) -> Found:
    """A measurement, or the reason of the ``ValueError`` with which it refuses; other exceptions are mistakes."""
    shorter = name == "distance" and len(set(subject.lengths)) > 1
    note = f"Of each text the first {min(subject.lengths)} tokens, as many as the shortest has." if shorter else None
    try:
        return Found(_MEASUREMENTS[name](subject, seed), note=note)
    except ValueError as error:
        if name != "perturbation":
            return Found(refused=str(error))
        try:  # the order of the text can be perturbed without RoPE
            return Found(_perturbation(subject, seed, ["order"]), note=f"Only the order of the text: {error}.")
        except ValueError as second:
            return Found(refused=str(second))


def _common(subject: Subject) -> dict[str, Any]:
    return {"model": subject.reading, **subject.texts, "layers": subject.asked, "progress": False}


def _chosen(subject: Subject, table: pd.DataFrame) -> pd.DataFrame:
    shown = pd.MultiIndex.from_frame(table[HEAD]).isin(subject.pairs)
    return table[shown].reset_index(drop=True)


def _additivity(subject: Subject, seed: int) -> pd.DataFrame:
    """With ``r_without_first``, of the fit without the first key of each text, which often is an attention sink."""
    table = additivity(**_common(subject))
    enough = min(subject.lengths) > _LEAST
    without = additivity(**_common(subject), sinks=1)["r"] if enough else np.nan
    return _chosen(subject, table.assign(r_without_first=without))


def _of_layers(experiment: Callable[..., pd.DataFrame], subject: Subject, seed: int) -> pd.DataFrame:
    return _chosen(subject, experiment(**_common(subject)))


def _perturbation(subject: Subject, seed: int, kinds: Any = ("order", "index", "feature")) -> pd.DataFrame:
    texts, seeds = subject.some(*_PERTURBED).texts, range(seed, seed + PERTURBATIONS)
    return perturbation_curve(subject.reading, **texts, kinds=kinds, fractions=FRACTIONS, seeds=seeds, progress=False)


def _ablation(subject: Subject, seed: int) -> pd.DataFrame:
    return head_ablation(**_common(subject.some(*_ABLATED)), heads=subject.pairs)


def _ladder(subject: Subject, seed: int) -> pd.DataFrame:
    """Uniform attention for every head, and the other rungs for the heads to which that makes a difference."""
    texts = ladder_texts(subject)
    options: dict[str, Any] = {**texts, "controls": [], "progress": False}
    ends = attention_ladder(subject.reading, heads=subject.pairs, rungs=["uniform"], **options)
    verdicts = head_verdicts(ends)
    found = verdicts[verdicts["verdict"] != "no effect"]
    if found.empty:
        return ends
    effective = [(int(layer), int(head)) for layer, head in zip(found["layer"], found["head"], strict=True)]
    table = attention_ladder(subject.reading, heads=effective, rungs=LADDER, **options)
    without = ~pd.MultiIndex.from_frame(ends[HEAD]).isin(effective)
    return pd.concat([ends[without], table]).sort_values(HEAD, kind="stable", ignore_index=True)


def ladder_texts(subject: Subject) -> dict[str, Any]:
    """Arguments of the ladder: every second text is held out, the longest is not; a single text is both."""
    some = subject.some(*_CLIMBED)
    order = np.argsort([-n for n in some.lengths], kind="stable")
    texts: dict[str, Any] = {"tokens": some.tokens[order[::2]], "attention_mask": some.real[order[::2]]}
    if len(order) > 1:
        texts |= {"heldout": some.tokens[order[1::2]], "heldout_mask": some.real[order[1::2]]}
    return texts


def _distance(subject: Subject, seed: int) -> pd.DataFrame:
    """The distance component of each head over all texts: ``layer``, ``head``, ``distance``, ``value``, ``cells``."""
    picked = np.unique(np.linspace(0, len(subject.specs) - 1, _PROFILES).round().astype(int))
    tables: list[pd.DataFrame] = []
    tokens = subject.tokens[:, : min(subject.lengths)]

    def fitted(spec: AttentionSpec, scores: Tensor) -> None:
        fit = fit_additive(scores, pool=True, **_cells(spec))
        table = fit.to_frame("distance").assign(layer=spec.layer)
        tables.append(table.assign(cells=tokens.shape[1] - table["distance"].abs()))

    for_each_scores(subject.model, tokens, [subject.specs[n] for n in picked], fitted)
    return _chosen(subject, pd.concat(tables, ignore_index=True))[[*HEAD, "distance", "value", "cells"]]


def _heads(subject: Subject, found: Found) -> Found:
    if found.refused:
        return found
    r = by_head(found.trained).dropna(subset="r").sort_values("r", ascending=False, kind="stable")
    if r.empty:
        return Found(refused="no head has scores that vary, so none is more additive than another")
    most, least = ((int(row["layer"]), int(row["head"])) for row in (r.iloc[0], r.iloc[-1]))
    fits: dict[int, AdditiveFit] = {}
    kept: dict[int, Tensor] = {}

    def fitted(spec: AttentionSpec, scores: Tensor) -> None:
        fits[spec.layer], kept[spec.layer] = fit_additive(scores, **_cells(spec)), scores

    specs = subject.reading.specs(sorted({most[0], least[0]}))
    for_each_scores(subject.model, subject.first, specs, fitted)
    return Found(Exhibits(most, least, r[[*HEAD, "r", *SHARES]], fits, kept))


def _cells(spec: AttentionSpec) -> dict[str, Any]:
    return {"mask": "causal" if spec.causal else "full", "window": spec.window}


_MEASUREMENTS: dict[SectionName, Callable[[Subject, int], pd.DataFrame]] = {
    "additivity": _additivity,
    "distance": _distance,
    "shares": partial(_of_layers, controlled_distance),
    "subspaces": partial(_of_layers, subspace_patterns),
    "perturbation": _perturbation,
    "ablation": _ablation,
    "ladder": _ladder,
}
_COMPARED = ("additivity", "shares", "subspaces")  # with random initialisations
