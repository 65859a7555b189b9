"""The data of the panels, for the page's script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from tl_posdisent.page.measuring.distances import shown_distances
from tl_posdisent.page.measuring.measurement import HEAD
from tl_posdisent.page.measuring.panels import SHOWN, Panels
from tl_posdisent.utils.validation import head_label, printable

_MASKED = 255


def panel_data(
    panels: Panels, profiles: pd.DataFrame, sentences: Mapping[tuple[int, int], Sequence[str]]
) -> dict[str, Any]:
    """Encode the panels for the page's script: sentences, and scores as bytes in base64, of each head on its own scale.

    A score is ``low + byte / 254 * (high - low)``, and 255 where it is masked; if all heads are causal, only keys up to
    the query's are there, row by row.
    """
    heads, lines = {}, dict(zip(profiles.index, profiles.to_numpy().tolist(), strict=True))
    near = panels.attention[panels.attention["distance"].isin(shown_distances(panels.attention["distance"]))]
    attention: Any = dict([*near.groupby(HEAD)])
    for (layer, head), scores in panels.scores.items():
        one: dict[str, Any] = {
            "scores": _encoded_scores(scores, panels.causal),
            "says": [*sentences.get((layer, head), ())],
        }
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
