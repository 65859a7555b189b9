"""What the panel of one head shows: its attention by distance and its scores."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.experiments.attention_scores.attention_by_distance import (
    check_shown,
    mean_attention,
)
from tl_posdisent.hooks.named_hooks import UNMODIFIED
from tl_posdisent.hooks.positions import dummy_distance
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.partial_forward import (
    Clean,
    after_blocks,
    are_separate,
    attempted,
    has_hooks,
    run_clean,
)
from tl_posdisent.models.running.texts import Texts, read_texts
from tl_posdisent.page.measuring.measurement import FAILURES, HEAD
from tl_posdisent.page.measuring.subject import Subject

SHOWN = 48
"""Number of positions of the score map."""
SAME = 5
"""The distance of all keys in the intervention whose attention is shown."""
_READ, _ATTENTION = 128, 256  # tokens of each text and altogether of attention by distance
_COLUMNS = ["distance", "attention", "cells", "first_attention", "first_cells"]  # of ``mean_attention``

Pair = tuple[int, int]


@dataclass(frozen=True)
class Panels:
    """The measurements of the panels.

    Attributes:
        words: tokens of the first text.
        causal: whether keys after the query are masked in all layers.
        attention: table of ``mean_attention`` by ``intervention``: none, and ``dummy_distance`` in the layer itself.
        scores: by layer and head, the scores of the first positions, ``[query, key]``; NaN where they are masked.
        reasons: why attention was not measured, with the layers for which it was not.
    """

    words: list[str]
    causal: bool
    attention: pd.DataFrame
    scores: Mapping[Pair, Float[np.ndarray, "query key"]]
    reasons: Mapping[str, Sequence[int]]


def measure_panels(subject: Subject, pairs: Sequence[Pair]) -> Panels:
    """Measure attention by distance and scores of some heads."""
    specs = [spec for spec in subject.specs if spec.layer in {layer for layer, _ in pairs}]
    attention, reasons = _attention(subject, specs, pairs)
    scores = _scores(subject, specs, pairs)
    return Panels(subject.words, all(spec.causal for spec in specs), attention, scores, reasons)


def panel_tokens(subject: Subject) -> float:
    """Count the tokens that the panels run through all layers: those of the score map, and of mean attention.

    Texts of one length are run unmodified, once more to store the inputs of layers, and from these layer by layer;
    whether that is possible takes three runs of one text. Other texts are run up to each layer.
    """
    part, shown = subject.cut(_READ, _ATTENTION), min(SHOWN, subject.lengths[0])
    if len(set(part.lengths)) == 1:
        return shown + 3 * (sum(part.lengths) + part.lengths[0])
    return shown + sum(part.lengths) * (1 + (len(subject.layers) + 1) / 2)


def _attention(
    subject: Subject, specs: list[AttentionSpec], pairs: Sequence[Pair]
) -> tuple[pd.DataFrame, dict[str, list[int]]]:
    """Measure attention by distance in layers that show it, and under an intervention in one layer at a time.

    In a layer under its intervention, only that layer is run, if blocks depend on the residual stream alone.

    Returns:
        The table, and why layers are not in it.
    """
    reading, texts = subject.reading, _texts_of_attention(subject)
    shown = [spec for spec in specs if spec.taps.pattern or spec.taps.scores]
    chosen = [(spec, sorted(head for layer, head in pairs if layer == spec.layer)) for spec in shown]
    tables = [pd.DataFrame(columns=["intervention", *HEAD, *_COLUMNS])]
    reasons: dict[str, list[int]] = {}
    if not chosen:
        return tables[0], reasons
    try:
        tables.append(mean_attention(reading, texts, chosen, [], whole=False).assign(intervention=UNMODIFIED))
    except FAILURES as error:
        reasons[f"Mean attention: {error}"] = [spec.layer for spec, _ in chosen]
    clean = _clean_run(reading.model, texts, [spec.layer for spec in shown])
    for spec, heads in chosen:
        try:
            hooks = dummy_distance(reading, SAME, layers=[spec.layer])
            check_shown(spec, hooks)
            inputs: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if clean is not None:
                inputs = after_blocks(reading.model, spec.layer, clean.after.get(spec.layer - 1))
            with inputs:
                table = mean_attention(reading, texts, [(spec, heads)], hooks, whole=False)
            tables.append(table.assign(intervention=f"every distance {SAME}"))
        except FAILURES as error:
            reasons.setdefault(f"Mean attention with every key at distance {SAME}: {error}", []).append(spec.layer)
    return pd.concat(tables[1:] or tables, ignore_index=True), reasons


def _texts_of_attention(subject: Subject) -> Texts:
    beginnings = subject.cut(_READ, _ATTENTION)
    return read_texts(subject.model, beginnings.tokens, beginnings.mask)


def _clean_run(model: Any, texts: Texts, layers: Sequence[int]) -> Clean | None:
    """Store the inputs of layers, if each block can be run alone; None for texts of several lengths."""
    tokens = texts.groups[0].tokens
    if len(texts.groups) > 1 or has_hooks(model) or not attempted(lambda: are_separate(model, tokens[:1])):
        return None
    return run_clean(model, tokens, layers)


def _scores(subject: Subject, specs: list[AttentionSpec], pairs: Sequence[Pair]) -> dict[Pair, Any]:
    scores_by_head: dict[Pair, Any] = {}

    def keep(spec: AttentionSpec, scores: Tensor) -> None:
        visible = spec.mask(scores.shape[-1]).to(scores.device)
        for layer, head in pairs:
            if layer == spec.layer:
                scores_by_head[layer, head] = scores[0, head].double().masked_fill(~visible, torch.nan).cpu().numpy()

    for_each_scores(subject.model, subject.first[:, :SHOWN], specs, keep)
    return scores_by_head
