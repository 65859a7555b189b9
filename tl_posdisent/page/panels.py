"""The panel of each head: its attention by distance, its scores, and its description."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.experiments.attention_scores.attention_by_distance import check_shown, mean_attention
from tl_posdisent.experiments.where_what.head_looks import (
    first_token_share,
    frequent_distances,
    profile_without_first,
)
from tl_posdisent.experiments.where_what.sentences import (
    Row,
    disagreement_sentence,
    looks_sentences,
    needs_sentences,
)
from tl_posdisent.hooks.named_hooks import UNMODIFIED
from tl_posdisent.hooks.positions import dummy_distance
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import read_texts
from tl_posdisent.page.contract import Panel
from tl_posdisent.page.section import FAILURES, Measured, by_head
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.words import unbroken
from tl_posdisent.utils.tables import HEAD
from tl_posdisent.utils.validation import head_label

SHOWN = 48
"""Number of positions of the score map."""
SAME = 5
"""The distance of all keys in the intervention whose attention is shown."""
_POSITIONS, _TOKENS = 128, 256
"""Tokens of each text, and of all texts together, of attention by distance."""
_COLUMNS = ["intervention", *HEAD, "distance", "attention", "cells", "first_attention", "first_cells"]
_MASKED = 255

Place = tuple[int, int]


def shown_distances(distances: Any) -> list[int]:
    """Return those of the distances 0, 1, 2, 4, 8 … that are there.

    >>> shown_distances(range(7))
    [0, 1, 2, 4]
    """
    known = set(distances)
    return [distance for distance in (0, *(2**power for power in range(20))) if distance in known]


class Panels(NamedTuple):
    """The panels of the heads that have one.

    Attributes:
        by_label: the panel of each head.
        attended, distances: the distances of attention, and of the profiles.
        causal: whether keys after the query are masked in all layers.
        reasons: why attention was not measured, with the layers for which it was not.
    """

    by_label: dict[str, Panel]
    attended: list[int]
    distances: list[int]
    causal: bool
    reasons: dict[str, list[int]]


def make_panels(subject: Subject, places: Sequence[Place], measured: Mapping[str, Measured]) -> Panels:
    """Measure attention and scores of some heads, and describe these heads."""
    attention, reasons = measure_attention(subject, places)
    scores, said = _scores(subject, places), describe_heads(measured, attention)
    near = attention[attention["distance"].isin(shown_distances(attention["distance"]))]
    near_by_head, (distances, profiles) = _by_head(near), _profiles(measured)
    panels: dict[str, Panel] = {}
    for place in places:
        panel: Panel = {"says": [*map(unbroken, said.get(place, []))], "scores": scores[place]}
        if place in near_by_head:
            by_name = near_by_head[place].groupby("intervention", sort=False)["attention"]
            panel["attention"] = {str(name): [float(f"{x:.3g}") for x in values] for name, values in by_name}
        if place in profiles:
            panel["profile"] = [None if np.isnan(x) else round(x, 3) for x in profiles[place]]
        panels[head_label(*place)] = panel
    attended = sorted({int(x) for x in near["distance"]})
    return Panels(panels, attended, distances, _is_causal(subject), reasons)


def measure_attention(subject: Subject, places: Sequence[Place]) -> tuple[pd.DataFrame, dict[str, list[int]]]:
    """Measure attention by distance in layers that show it, and under an intervention in one layer at a time.

    Returns:
        The table of ``mean_attention`` by ``intervention``: none, and ``dummy_distance`` in the layer itself; and why
        layers are not in it.
    """
    part = subject.cut(_POSITIONS, _TOKENS)
    reading, texts = part.reading, read_texts(part.model, part.tokens)
    chosen = [
        (spec, sorted(head for layer, head in places if layer == spec.layer))
        for spec in _specs(subject, places)
        if spec.taps.pattern or spec.taps.scores
    ]
    tables, reasons = [pd.DataFrame(columns=_COLUMNS)], dict[str, list[int]]()
    if not chosen:
        return tables[0], reasons
    try:
        tables.append(mean_attention(reading, texts, chosen, [], whole=False).assign(intervention=UNMODIFIED))
    except FAILURES as error:
        reasons[f"Mean attention: {error}"] = [spec.layer for spec, _ in chosen]
    for spec, heads in chosen:
        try:
            hooks = dummy_distance(reading, SAME, layers=[spec.layer])
            check_shown(spec, hooks)
            table = mean_attention(reading, texts, [(spec, heads)], hooks, whole=False)
            tables.append(table.assign(intervention=f"every distance {SAME}"))
        except FAILURES as error:
            reasons.setdefault(f"Mean attention with every key at distance {SAME}: {error}", []).append(spec.layer)
    return pd.concat(tables[1:] or tables, ignore_index=True), reasons


def _profiles(measured: Mapping[str, Measured]) -> tuple[list[int], dict[Place, list[float]]]:
    """Return the shown distances, and each head's distance component there; empty if it was not measured."""
    if "distance" not in measured or (table := measured["distance"].trained) is None:
        return [], {}
    distances = shown_distances(table["distance"])
    profiles = table.pivot(index=HEAD, columns="distance", values="value")[distances]
    return distances, dict(zip(profiles.index, profiles.to_numpy().tolist(), strict=True))


def describe_heads(measured: Mapping[str, Measured], attention: pd.DataFrame) -> dict[Place, list[str]]:
    """Describe each head, as far as it was measured, in the sentences of ``describe_head``.

    A head is compared with the mean of the random heads of its layer.
    """
    tables = {name: one.trained for name, one in measured.items() if one.trained is not None}
    needs, labels = (_rows(tables[name]) if name in tables else {} for name in ("where_or_what", "labels"))
    looks = _rows(by_head(tables["additivity"])) if "additivity" in tables else {}
    random: dict[int, Row] = {}
    if looks and (copies := measured["additivity"].random) is not None:
        means = by_head(copies).groupby("layer", as_index=False).mean()
        random = {int(row["layer"]): row for row in means.to_dict("records")}
    unmodified = attention[attention["intervention"] == UNMODIFIED]
    of_first, profiles = _by_head(unmodified), _by_head(profile_without_first(unmodified))
    said = {}
    for place in {**needs, **looks}:
        need, look, chance = needs.get(place), looks.get(place), random.get(place[0])
        sentences = [] if need is None else needs_sentences(need, tables["where_or_what"].attrs["df"])
        if look is not None:
            first = first_token_share(of_first[place]) if place in of_first else None
            profile = frequent_distances(profiles[place]) if place in profiles else None
            label = labels[place]["label"] if place in labels else None
            sentences += looks_sentences(look, chance, label=label, profile=profile, first_token=first)
            sentences += [x for x in [need and disagreement_sentence(need, look, chance)] if x]
        said[place] = sentences
    return said


def _rows(table: pd.DataFrame) -> dict[Place, Row]:
    """Return the rows of a table with one row per layer and head."""
    return {(int(row["layer"]), int(row["head"])): row for row in table.to_dict("records")}


def _by_head(table: pd.DataFrame) -> dict[Place, pd.DataFrame]:
    """Return the rows of each layer and head."""
    groups: Any = table.groupby(HEAD)
    return {(int(layer), int(head)): rows for (layer, head), rows in groups}


def _specs(subject: Subject, places: Sequence[Place]) -> list[AttentionSpec]:
    layers = {layer for layer, _ in places}
    return [spec for spec in subject.specs if spec.layer in layers]


def _scores(subject: Subject, places: Sequence[Place]) -> dict[Place, tuple[float, float, str]]:
    """Encode the scores of the first tokens of the first text."""
    encoded: dict[Place, tuple[float, float, str]] = {}
    causal = _is_causal(subject)

    def keep(spec: AttentionSpec, scores: Tensor) -> None:
        visible = spec.mask(scores.shape[-1]).to(scores.device)
        for layer, head in places:
            if layer == spec.layer:
                of_head = scores[0, head].double().masked_fill(~visible, torch.nan).cpu().numpy()
                encoded[layer, head] = _encoded(of_head, causal=causal)

    for_each_scores(subject.model, subject.tokens[:1, :SHOWN], _specs(subject, places), keep)
    return encoded


def _is_causal(subject: Subject) -> bool:
    """Whether keys after the query are masked in all layers."""
    return all(spec.causal for spec in subject.specs)


def _encoded(scores: Float[np.ndarray, "query key"], *, causal: bool) -> tuple[float, float, str]:
    """Return the lowest and highest score, and the bytes in base64."""
    known = np.isfinite(scores)
    low, high = (float(end) for end in (scores[known].min(), scores[known].max())) if known.any() else (0.0, 0.0)
    with np.errstate(invalid="ignore"):
        steps = (scores - low) / ((high - low) or 1.0) * (_MASKED - 1)
    cells = np.where(known, np.nan_to_num(steps).round().clip(0, _MASKED - 1), _MASKED).astype(np.uint8)
    kept = cells[np.tril_indices(len(cells))] if causal else cells.ravel()
    return low, high, b64encode(kept.tobytes()).decode("ascii")
