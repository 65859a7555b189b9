"""The model and texts that a report reads, and one measurement per section, from a subject and a seed to a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.additive.attention.rungs import Rung
from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.experiments.attention_scores.head_labels import head_labels
from tl_posdisent.experiments.attention_scores.queries_and_keys import subspace_patterns
from tl_posdisent.experiments.causal.attention_ladder import attention_ladder
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.reading.tokens import token_words
from tl_posdisent.models.size import count_parameters
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.progress import progress_bar

POSITIONS = 1024
"""The longest text that is measured: the size of scores grows with its square."""
STRETCH = 512
"""Longer strings are cut into stretches of at most this many tokens."""
TOKENS = 4096
"""Maximum number of tokens of all texts together."""
_NAMELESS = ("", "custom", "external")  # TransformerLens's names for models that were not loaded by a name


@dataclass(frozen=True)
class Subject:
    """A model, and the layers, heads and texts that are measured.

    Attributes:
        tokens: ids of the measured texts, padded on the right (where ``real`` is False).
        given: number of tokens passed by the caller.
        words: the first text, one string per position.
        asked: the requested layers; None for all.
        specs, heads: specs and heads of these layers.
        n_parameters: number of parameters of the model (``count_parameters``).
        sample: a sentence on how the heads were sampled, or empty; ``sampled`` is the number of requested heads, or 0
            without sampling.
    """

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    given: int
    words: list[str]
    asked: list[int] | None
    specs: list[AttentionSpec]
    heads: dict[int, list[int]]
    n_parameters: int
    sample: str = ""
    sampled: int = 0

    @property
    def model(self) -> Any:
        return self.reading.model

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.real.sum(1)]

    @property
    def first(self) -> Int[Tensor, "1 pos"]:
        return self.tokens[:1, : self.lengths[0]]

    @property
    def texts(self) -> dict[str, Any]:
        """Arguments ``tokens`` and ``attention_mask`` of an experiment on all texts."""
        return {"tokens": self.tokens} | ({} if bool(self.real.all()) else {"attention_mask": self.real})

    @property
    def layers(self) -> list[int]:
        return [spec.layer for spec in self.specs]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Layer and head of each head that is shown."""
        return [(layer, head) for layer, some in self.heads.items() for head in some]

    def some(self, positions: int, tokens: int) -> Subject:
        """Keep the beginnings of the first texts: at most ``positions`` of each, and ``tokens`` altogether."""
        rows = max(1, tokens // min(positions, self.tokens.shape[1]))
        return replace(self, tokens=self.tokens[:rows, :positions], real=self.real[:rows, :positions])

    def only(self, pairs: list[tuple[int, int]], sample: str) -> Subject:
        """Keep a sample of the heads."""
        heads = {layer: [head for head in some if (layer, head) in pairs] for layer, some in self.heads.items()}
        heads = {layer: some for layer, some in heads.items() if some}
        specs = [spec for spec in self.specs if spec.layer in heads]
        return replace(self, asked=list(heads), specs=specs, heads=heads, sample=sample, sampled=len(self.pairs))

    def sizes(self) -> str:
        """Number and lengths of the texts, in words."""
        n, low, high = len(self.tokens), min(self.lengths), max(self.lengths)
        return f"{n} text{'s' if n > 1 else ''} of {low if low == high else f'{low} to {high}'} tokens"

    def name(self) -> str:
        """Return the model's name, or its architecture if it has no name."""
        tokenizer = getattr(self.model, "tokenizer", None)
        for name in (getattr(self.model.cfg, "model_name", None), getattr(tokenizer, "name_or_path", None)):
            if isinstance(name, str) and name not in _NAMELESS:
                files = [*Path(name).glob("*.gguf")] if Path(name).is_dir() else []
                whole = files[0].stem if len(files) == 1 else Path(name).resolve().name
                return whole if Path(name).is_dir() and whole else name
        return self.specs[0].architecture


def read_subject(model: Any, text: Tokens, attention_mask: Tensor | None, layers: Any, heads: Any) -> Subject:
    """Check the arguments of a report and read the model."""
    reading = read_model(model)
    chosen = reading.heads(layers, heads)
    specs = reading.specs(list(chosen))
    model = reading.model
    try:
        texts = read_texts(model, text, attention_mask)
    except ValueError as error:
        if isinstance(error, ArgumentError) and error.argument == "attention_mask":
            raise
        raise ArgumentError("text", f"cannot be used: {error}") from error
    context = getattr(model.cfg, "n_ctx", None) or POSITIONS
    order = texts.real.long().argsort(dim=1, descending=True, stable=True)[:, : texts.longest]
    tokens, real = texts.tokens.gather(1, order), texts.real.gather(1, order)  # padding moved to the right
    if isinstance(text, str) and tokens.shape[1] > min(STRETCH, context):
        tokens = _stretches(model, text, tokens[0], min(STRETCH, context))
        real = torch.ones_like(tokens, dtype=torch.bool)
    asked = list(chosen) if layers is not None or len(chosen) < len(reading.specs()) else None
    whole = Subject(reading, tokens, real, sum(texts.lengths), [], asked, specs, chosen, count_parameters(model))
    subject = whole.some(min(POSITIONS, context), TOKENS)
    return replace(subject, words=token_words(model, subject.first[0]))


def _stretches(model: Any, text: str, ids: Int[Tensor, " whole"], longest: int) -> Int[Tensor, "batch pos"]:
    """Split a long text into texts of equal length, each after the model's BOS token, if it has one."""
    bare = model.to_tokens(text, truncate=False, prepend_bos=False)[0].to(ids.device)
    begin = len(ids) - len(bare)
    if begin < 0 or not torch.equal(ids[begin:], bare):
        begin = 0
    first, rest = ids[:begin], ids[begin:]
    texts = -(-len(rest) // (longest - begin))
    rows = rest[: len(rest) // texts * texts].view(texts, -1)
    return torch.cat([first.expand(texts, -1), rows], 1)


READ = {"labels": (512, 1024), "perturbation": (512, 1024), "ablation": (128, 512), "ladder": (128, 1024)}
"""Positions of each text, and tokens altogether, of sections that read less than the report."""
PASSES = {"ablation": 0.53, "ladder": 5.0}
"""Forward passes per head, measured on a model of 30 layers of 9 heads."""
BUDGET = 3e12
"""Maximum multiplications in the forward passes of such a section: parameters × tokens × passes × heads. They take a
minute or two on a CPU; models of a few million parameters need less for all heads."""
LEAST = 12
"""Minimum number of heads in a sample."""


def narrowed(name: str, subject: Subject, seed: int) -> Subject:
    """Select the texts and heads that a section measures: all heads, or a random sample within its budget."""
    positions, tokens = READ.get(name, (POSITIONS, TOKENS))
    part = subject.some(min(subject.lengths) if name == "distance" else positions, tokens)
    each = PASSES.get(name, 0) * subject.n_parameters * sum(part.lengths)
    n = max(LEAST, int(BUDGET / each)) if each else len(subject.pairs)
    if n >= len(subject.pairs):
        return part
    random = np.random.default_rng(seed)
    layers: dict[int, list[tuple[int, int]]] = {}
    for index in random.permutation(len(subject.pairs)):
        layers.setdefault(subject.pairs[index][0], []).append(subject.pairs[index])
    # Take one head from each layer in turn, with the layers in random order.
    drawn = [pair for some in zip_longest(*layers.values()) for pair in some if pair is not None][:n]
    how = f"Measured on {n} of the {len(subject.pairs)} heads, drawn from all layers with seed {seed}."
    return part.only(drawn, how)


SectionName = Literal[
    "additivity", "distance", "shares", "subspaces", "labels", "heads", "perturbation", "ablation", "ladder"
]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)

HEAD = ["layer", "head"]
SHARES = ["share_distance", "share_query", "share_key"]
FRACTIONS = (0, 0.05, 0.1, 0.2, 0.5)
PERTURBATIONS = 2
_LEAST = 3  # texts of at most this many tokens keep their first key
IDLE = ("not used", "no effect")
"""Verdicts of heads whose output or attention the predictions do not need."""

LADDER: tuple[Rung, ...] = ("first_token", "distance", "distance+sink", "static", "additive", "banded")
_PROFILES = 12  # layers whose distance profiles are drawn


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
    def sampled(self) -> str:
        """The number of measured heads, in words; empty if all were measured."""
        if self.read is None or not self.read.sampled:
            return ""
        return f"{len(self.read.pairs)} of the {self.read.sampled} heads were measured"


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
    with progress_bar(total=len(needed) + copies.n, desc="report", disable=not progress) as bar:
        for name in needed:
            bar.set_postfix_str(name)
            found[name] = _try(name, subject, found, seed, copies)
            bar.update()
        if all(found[name].refused for name in wanted):
            raise ValueError(f"nothing of this can be measured: {found[wanted[0]].refused}")
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
            bar.update()
    for name, tables in chance.items():
        if tables:
            found[name] = replace(found[name], random=pd.concat(tables, ignore_index=True))
    return found


def by_head(table: pd.DataFrame) -> pd.DataFrame:
    """Average over texts and seeds: one row for each layer and head."""
    return table.drop(columns=["batch", "seed"], errors="ignore").groupby(HEAD, as_index=False).mean()


def _try(name: SectionName, subject: Subject, found: Mapping[SectionName, Found], seed: int, copies: Copies) -> Found:
    """Run one measurement, or return why it failed: an unsuitable input (``ValueError``) or a failed computation."""
    part = narrowed(name, subject, seed)
    try:
        if name == "heads":
            return found["additivity"] if found["additivity"].refused else Found(_heads(part, found["additivity"]))
        table = _labels(part, seed, copies) if name == "labels" else _MEASUREMENTS[name](part, seed)
        failures = "; ".join(f"{label}: {reason}" for label, reason in table.attrs.get("failures", {}).items())
        return Found(table, note=f"Not measured: {failures}." if failures else None, read=part)
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
    return {"model": subject.reading, **subject.texts, "layers": subject.asked, "progress": False}


def _chosen(subject: Subject, table: pd.DataFrame) -> pd.DataFrame:
    return table[pd.MultiIndex.from_frame(table[HEAD]).isin(subject.pairs)].reset_index(drop=True)


def _additivity(subject: Subject, seed: int) -> pd.DataFrame:
    """Measure additivity, with ``r_without_first`` for fits without the first key, which often is an attention sink."""
    table = additivity(**_common(subject))
    without = additivity(**_common(subject), sinks=1)["r"] if min(subject.lengths) > _LEAST else np.nan
    return _chosen(subject, table.assign(r_without_first=without))


def _of_layers(experiment: Callable[..., pd.DataFrame], subject: Subject, seed: int) -> pd.DataFrame:
    return _chosen(subject, experiment(**_common(subject)))


def _labels(subject: Subject, seed: int, copies: Copies) -> pd.DataFrame:
    """Label heads, with the mean over random copies beside each measure; ``head_labels`` makes these copies itself."""
    options: dict[str, Any] = {"local": min(8, min(subject.lengths) - 1), "streaming": False, "seed": seed}
    return _chosen(subject, head_labels(**_common(subject), seeds=copies.seeds(seed), std=copies.std, **options))


def _perturbation(subject: Subject, seed: int, kinds: Any = ("order", "index", "feature")) -> pd.DataFrame:
    options: dict[str, Any] = {"fractions": FRACTIONS, "seeds": range(seed, seed + PERTURBATIONS), "progress": False}
    return perturbation_curve(subject.reading, **subject.texts, kinds=kinds, **options)


def _ablation(subject: Subject, seed: int) -> pd.DataFrame:
    return head_ablation(**_common(subject), heads=subject.pairs)


def _ladder(subject: Subject, seed: int) -> pd.DataFrame:
    """Measure uniform attention and the mean output for every head, and the other rungs where neither surely suffices.

    Heads with a failed run have no verdict and therefore no rows.
    """
    tokens, real, order = subject.tokens, subject.real, np.argsort([-n for n in subject.lengths], kind="stable")
    texts: dict[str, Any] = {"tokens": tokens[order[::2]], "attention_mask": real[order[::2]]}
    if len(order) > 1:  # hold out every second text, but not the longest; a single text serves as both
        texts |= {"heldout": tokens[order[1::2]], "heldout_mask": real[order[1::2]]}
    failures: dict[str, str] = {}

    def climb(heads: list[tuple[int, int]], rungs: Sequence[Rung]) -> pd.DataFrame:
        table = attention_ladder(subject.reading, heads=heads, rungs=rungs, controls=[], progress=False, **texts)
        failures.update(table.attrs.get("failures", {}))
        return table[table["loss"].notna().groupby([table[name] for name in HEAD]).transform("all")]

    table = climb(subject.pairs, ["uniform"])
    verdicts = head_verdicts(table)
    idle = verdicts["verdict"].isin(IDLE)
    effective = [*verdicts[~idle][HEAD].astype(int).itertuples(index=False, name=None)]
    if effective:
        without = table[~pd.MultiIndex.from_frame(table[HEAD]).isin(effective)]
        table = pd.concat([without, climb(effective, LADDER)]).sort_values(HEAD, kind="stable", ignore_index=True)
    table.attrs = {"failures": failures}
    return table


def _distance(subject: Subject, seed: int) -> pd.DataFrame:
    """Fit each head's distance component to all texts: ``layer``, ``head``, ``distance``, ``value``, ``cells``."""
    picked = np.unique(np.linspace(0, len(subject.specs) - 1, _PROFILES).round().astype(int))
    tables: list[pd.DataFrame] = []
    tokens = subject.tokens

    def fitted(spec: AttentionSpec, scores: Tensor) -> None:
        fit = fit_additive(scores, pool=True, **_cells(spec))
        table = fit.to_frame("distance").assign(layer=spec.layer)
        tables.append(table.assign(cells=tokens.shape[1] - table["distance"].abs()))

    for_each_scores(subject.model, tokens, [subject.specs[n] for n in picked], fitted)
    return _chosen(subject, pd.concat(tables, ignore_index=True))[[*HEAD, "distance", "value", "cells"]]


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
    "additivity": _additivity,
    "distance": _distance,
    "shares": partial(_of_layers, controlled_distance),
    "subspaces": partial(_of_layers, subspace_patterns),
    "perturbation": _perturbation,
    "ablation": _ablation,
    "ladder": _ladder,
}
_COMPARED: tuple[SectionName, ...] = ("additivity", "shares", "subspaces")  # these have a random-weights baseline
_FAILURES = (ValueError, RuntimeError, MemoryError)
