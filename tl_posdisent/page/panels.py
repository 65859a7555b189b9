"""What the panel of one head shows: its attention by distance and its scores."""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.experiments.attention_scores.attention_by_distance import (
    UNMODIFIED,
    check_shown,
    mean_attention,
)
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
from tl_posdisent.page.every_head import HEAD
from tl_posdisent.page.measurements import powers
from tl_posdisent.page.subject import Subject
from tl_posdisent.utils.validation import head_label, printable

SHOWN = 48
"""Number of positions of the score map."""
SAME = 5
"""The distance of all keys in the intervention whose attention is shown."""
_READ, _ATTENTION = 128, 256  # tokens of each text and altogether of attention by distance
_MASKED = 255

Pair = tuple[int, int]


@dataclass(frozen=True)
class Panels:
    """The measurements of the panels.

    Attributes:
        words: tokens of the first text.
        causal: whether keys after the query are masked in all layers.
        attention: table of ``attention_by_distance``, with and without ``dummy_distance`` in the layer itself.
        scores: by layer and head, the scores of the first positions, ``[query, key]``; NaN where they are masked.
    """

    words: list[str]
    causal: bool
    attention: pd.DataFrame
    scores: Mapping[Pair, Float[np.ndarray, "query key"]]


def measure_panels(subject: Subject, pairs: Sequence[Pair]) -> Panels:
    """Measure attention by distance and scores of some heads."""
    specs = [spec for spec in subject.specs if spec.layer in {layer for layer, _ in pairs}]
    scores, attention = _scores(subject, specs, pairs), _attention(subject, specs, pairs)
    return Panels(subject.words, all(spec.causal for spec in specs), attention, scores)


def _attention(subject: Subject, specs: list[AttentionSpec], pairs: Sequence[Pair]) -> pd.DataFrame:
    """Measure attention by distance in layers that show it, and under an intervention in one layer at a time.

    In a layer under its intervention, only that layer is run, if blocks depend on the residual stream alone.
    """
    reading, texts = subject.reading, read_texts(subject.model, *subject.some(_READ, _ATTENTION).texts.values())
    shown = [spec for spec in specs if spec.taps.pattern or spec.taps.scores]
    chosen = [(spec, sorted(head for layer, head in pairs if layer == spec.layer)) for spec in shown]
    tables = [pd.DataFrame(columns=["intervention", *HEAD, "distance"])]
    if not chosen:
        return tables[0]
    with contextlib.suppress(ValueError, RuntimeError, MemoryError):
        tables.append(mean_attention(reading, texts, chosen, [], whole=False).assign(intervention=UNMODIFIED))
    clean = _clean_run(reading.model, texts, [spec.layer for spec in shown])
    for spec, some in chosen:
        with contextlib.suppress(ValueError, RuntimeError, MemoryError), contextlib.ExitStack() as stack:
            hooks = dummy_distance(reading, SAME, layers=[spec.layer])
            check_shown(spec, hooks)
            if clean is not None:
                stack.enter_context(after_blocks(reading.model, spec.layer, clean.after.get(spec.layer - 1)))
            table = mean_attention(reading, texts, [(spec, some)], hooks, whole=False)
            tables.append(table.assign(intervention=f"every distance {SAME}"))
    return pd.concat(tables[1:] or tables, ignore_index=True)


def _clean_run(model: Any, texts: Texts, layers: Sequence[int]) -> Clean | None:
    """Store the inputs of layers, if each block can be run alone; None for texts of several lengths."""
    tokens = texts.groups[0].tokens
    if len(texts.groups) > 1 or has_hooks(model) or not attempted(lambda: are_separate(model, tokens[:1])):
        return None
    return run_clean(model, tokens, layers)


def _scores(subject: Subject, specs: list[AttentionSpec], pairs: Sequence[Pair]) -> dict[Pair, Any]:
    found: dict[Pair, Any] = {}

    def keep(spec: AttentionSpec, scores: Tensor) -> None:
        visible = spec.mask(scores.shape[-1]).to(scores.device)
        for layer, head in pairs:
            if layer == spec.layer:
                found[layer, head] = scores[0, head].double().masked_fill(~visible, torch.nan).cpu().numpy()

    for_each_scores(subject.model, subject.first[:, :SHOWN], specs, keep)
    return found


def panel_data(panels: Panels, profiles: pd.DataFrame) -> dict[str, Any]:
    """Encode the panels for the page's script: numbers as bytes in base64, of each head on its own scale.

    A score is ``low + byte / 254 * (high - low)``, and 255 where it is masked; if all heads are causal, only keys up to
    the query's are there, row by row.
    """
    heads, lines = {}, dict(zip(profiles.index, profiles.to_numpy().tolist(), strict=True))
    near = panels.attention[panels.attention["distance"].isin(powers(panels.attention["distance"]))]
    attention: Any = dict([*near.groupby(HEAD)])
    for (layer, head), scores in panels.scores.items():
        one: dict[str, Any] = {"scores": _encoded_scores(scores, panels.causal)}
        if (layer, head) in lines:
            one["profile"] = [None if np.isnan(x) else round(x, 3) for x in lines[layer, head]]
        if (layer, head) in attention:
            by_name = attention[layer, head].groupby("intervention", sort=False)["attention"]
            one["attention"] = {name: [float(f"{x:.3g}") for x in values] for name, values in by_name}
        heads[head_label(layer, head)] = one
    return {
        "words": [printable(word) for word in panels.words[:SHOWN]],
        "shown": min(SHOWN, len(panels.words)),
        "causal": panels.causal,
        "distances": [int(x) for x in profiles.columns],
        "attended": sorted({int(x) for x in near["distance"]}),
        "heads": heads,
    }


def _encoded_scores(scores: Float[np.ndarray, "query key"], causal: bool) -> list[Any]:
    """Return the lowest and highest score, and the bytes."""
    known = np.isfinite(scores)
    low, high = (float(end) for end in (scores[known].min(), scores[known].max())) if known.any() else (0.0, 0.0)
    with np.errstate(invalid="ignore"):
        steps = (scores - low) / ((high - low) or 1.0) * (_MASKED - 1)
    cells = np.where(known, np.nan_to_num(steps).round().clip(0, _MASKED - 1), _MASKED).astype(np.uint8)
    return [low, high, _base64(cells[np.tril_indices(len(cells))] if causal else cells.ravel())]


def _base64(values: np.ndarray) -> str:
    return b64encode(values.tobytes()).decode("ascii")
