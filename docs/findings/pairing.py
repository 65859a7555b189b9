"""Does what is not additive find the heads that match content?

Heads are known by three tests on made texts: *induction* and *duplicate token* on repeated random tokens
(``head_labels``), *retrieval* by needles (``needle_texts``, 12 pairs of 256 tokens). Two statistics of ordinary text,
``pairing`` and 1 − r of ``additivity``, are compared with them and with what could explain them away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from rows import Row
from scipy.stats import rankdata
from texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

STUDIES = ("pairing",)
HEAD = ["layer", "head"]
LENGTH = 256
TEXTS = {LENGTH: 8, 1024: 4}
STATISTICS = ["pairing", "1 - r", "low entropy", "variance of scores", "small share of distance", "layer"]
CLOSEST = ["pairing", "1 - r", "low entropy", "small share of distance"]
LEAST = {"induction": 0.2, "duplicate_token": 0.2, "retrieval": 0.1}  # attention from which a head has the label
GIVEN = ["low entropy", "small share of distance", "layer"]
DRAWS = 500
NEEDLES = {"length": 256, "pairs": 12}  # as those that score heads in docs/figures/retrieval.py


def pairing(model: Any, source: Source) -> Iterator[Row]:
    """AUC of each statistic for each label, by length; on shuffled texts, with random weights, at equal entropy."""
    labels = labels_of(model)
    texts = {length: parts(model, source, how_many(model, source, TEXTS[length]), length) for length in TEXTS}
    by_text = {str(length): statistics(model, some) for length, some in texts.items()}
    by_text["shuffled texts"] = statistics(model, shuffled(texts[LENGTH]))
    by_text["random weights"] = statistics(next(tp.random_control(model, [0])), texts[LENGTH])
    yield from _reliability(by_text[str(LENGTH)], by_text["shuffled texts"])
    for name, table in by_text.items():
        found = table.groupby(HEAD).mean().reset_index().merge(labels)
        over = f"{table['batch'].nunique()} texts"
        of_length = name.isdigit()
        length, kind = (int(name), "") if of_length else (LENGTH, f", {name}")
        for label in LEAST:
            yield from _areas(found, label, length, over, kind, STATISTICS if of_length else CLOSEST)
        if of_length:
            yield from _beyond_sharpness(found, length, over)


def statistics(model: Any, texts: Tensor) -> pd.DataFrame:
    """One row per text and head: the two statistics, and what could explain them."""
    table = tp.additivity(model, texts, sinks=1, controls=["foreign keys"], progress=False)
    table = table[table["scores"] == "own"].assign(**{"1 - r": 1 - table["r"]})
    table["small share of distance"] = -table["share_distance"]
    sharp = [pd.concat(tp.capture(model, text[None], _sharpness)).assign(batch=n) for n, text in enumerate(texts)]
    columns = ["batch", *HEAD, "pairing", "1 - r", "small share of distance"]
    return table[columns].merge(pd.concat(sharp), on=["batch", *HEAD])


def _sharpness(layer: tp.Captured) -> pd.DataFrame:
    """Minus the entropy of the attention, and the variance of the scores, without the first key and eight queries."""
    scores, mask = layer.scores[0].double(), layer.spec.mask(layer.scores.shape[-1])
    pattern = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    entropy = torch.special.entr(pattern).sum(-1)[:, 8:].mean(-1)
    inside = mask.clone()
    inside[:, 0] = False
    columns = {"low entropy": -entropy, "variance of scores": scores[:, inside].var(-1)}
    frame = pd.DataFrame({name: x.tolist() for name, x in columns.items()})
    return frame.assign(layer=layer.layer, head=range(len(frame)))


def labels_of(model: Any) -> pd.DataFrame:
    """One row per head: attention to the token that each of the three tests names."""
    options: dict[str, Any] = {"streaming": False, "seeds": 0, "progress": False}
    needles = tp.experiments.needle_texts(model, **NEEDLES)
    found = tp.head_labels(model, needles=needles, seed=0, **options)
    tables = [found, *(tp.head_labels(model, seed=seed, **options) for seed in (1, 2))]
    return pd.concat(tables).groupby(HEAD)[[*LEAST]].mean().reset_index()


def shuffled(texts: Tensor) -> Tensor:
    """The tokens of each text behind its BOS in a random order."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.cat([x[:1], x[1:][torch.randperm(len(x) - 1, generator=generator)]]) for x in texts])


def area(values: np.ndarray, has: np.ndarray) -> float:
    """The probability that a head with the label has a larger value than one without it (area under the ROC curve)."""
    n, ranks = has.sum(), rankdata(values)
    return float((ranks[has].sum() - n * (n + 1) / 2) / (n * (len(has) - n)))


def _areas(
    found: pd.DataFrame, label: str, length: int, over: str, kind: str = "", names: list[str] = STATISTICS
) -> Iterator[Row]:
    """The area of each statistic, with the standard error of a bootstrap over heads with and without the label."""
    has = (found[label] > LEAST[label]).to_numpy()
    if has.sum() < 2:
        return
    generator = np.random.default_rng(0)
    drawn = [
        np.concatenate([generator.choice(np.flatnonzero(has == x), (has == x).sum()) for x in (True, False)])
        for _ in range(DRAWS)
    ]
    for name in names:
        values = found[name].to_numpy()
        error = np.std([area(values[some], has[some]) for some in drawn])
        said = f"{has.sum()} of {len(has)} heads, {over}"
        yield Row(
            f"AUC for {label}: {name}{kind}", area(values, has), float(error), said, length, "additivity(…, controls)"
        )


def _beyond_sharpness(found: pd.DataFrame, length: int, over: str) -> Iterator[Row]:
    """Induction heads among heads as sharp, and of as small a share of distance, as they are; rank correlations given
    both and the layer; how many of the heads that are largest by each statistic have one of the labels."""
    has = found["induction"] > LEAST["induction"]
    if has.sum() < 2:
        return
    alike = found
    for name in GIVEN[:2]:
        alike = alike[alike[name] >= found[name][has].min()]
    yield from _areas(alike, "induction", length, over, ", sharp heads of small share alone", CLOSEST)
    said = f"{len(found)} heads, {over}"
    for name in STATISTICS[:2]:
        draws = [found, *(found.sample(len(found), replace=True, random_state=seed) for seed in range(200))]
        value, *others = (partial_correlation(some, name, "induction", GIVEN) for some in draws)
        yield Row(
            f"rank correlation with induction, given {', '.join(GIVEN)}: {name}",
            value,
            float(np.std(others)),
            said,
            length,
            "",
        )
    labelled = pd.concat([found[label] > least for label, least in LEAST.items()], axis=1).any(axis=1)
    n = int(labelled.sum())
    for name in STATISTICS:
        share = labelled[found[name].nlargest(n).index].mean()
        yield Row(f"share with a label among the {n} largest: {name}", float(share), float("nan"), said, length, "")


def partial_correlation(table: pd.DataFrame, a: str, b: str, given: list[str]) -> float:
    """The correlation of the ranks of two columns after a linear fit of the ranks of others."""
    ranks = {name: rankdata(table[name]) for name in (a, b, *given)}
    design = np.stack([np.ones(len(table)), *(ranks[name] for name in given)], 1)
    left = [ranks[x] - design @ np.linalg.lstsq(design, ranks[x], rcond=None)[0] for x in (a, b)]
    return float(np.corrcoef(*left)[0, 1])


def _reliability(texts: pd.DataFrame, shuffled: pd.DataFrame) -> Iterator[Row]:
    """Rank correlation of the heads' values between two halves of the texts, and between texts and shuffled texts."""
    halves = {"a": texts[texts["batch"] % 2 == 0], "other texts": texts[texts["batch"] % 2 == 1]}
    halves["shuffled texts"] = shuffled[shuffled["batch"] % 2 == 1]
    found = {name: table.groupby(HEAD).mean() for name, table in halves.items()}
    over = f"{texts['batch'].nunique()} texts"
    for name in STATISTICS[:2]:
        for other in ("other texts", "shuffled texts"):
            value = found["a"][name].corr(found[other][name], method="spearman")
            yield Row(f"rank correlation of heads with {other}: {name}", value, float("nan"), over, LENGTH, "")
