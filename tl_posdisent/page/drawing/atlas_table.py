"""The table behind the atlas: a row for each head, with the measurements of several sections."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.page.deciding.where_or_what import DIFFERENCE, ERROR, OVER_RANDOM, looks_at
from tl_posdisent.page.deciding.words import NO_LABEL, label_words
from tl_posdisent.page.measuring.distances import shown_distances
from tl_posdisent.page.measuring.measurement import HEAD, Measurement, by_head
from tl_posdisent.viz.plots.heatmaps import verdict_texts

_BLOCKS = "▁▂▃▄▅▆▇█"


class AtlasTable(NamedTuple):
    """A row for each head, and its distance component at distances 0, 1, 2, 4 … (the columns of ``profiles``)."""

    heads: pd.DataFrame
    profiles: pd.DataFrame


def atlas_table(
    additivity: Measurement,
    *,
    labels: pd.DataFrame | None = None,
    ablation: pd.DataFrame | None = None,
    ladder: pd.DataFrame | None = None,
    distance: pd.DataFrame | None = None,
) -> AtlasTable:
    """Join the tables of the sections that were measured; the shares of ``additivity`` colour the map."""
    heads = _where_and_what(additivity)
    if labels is not None:
        words = label_words(labels)[[*HEAD, "label"]].fillna({"label": NO_LABEL})
        heads = heads.merge(words, on=HEAD, how="left")
    if ablation is not None:
        heads = heads.merge(ablation[[*HEAD, "effect"]], on=HEAD, how="left")
    if ladder is not None:
        heads = heads.merge(_verdicts(ladder), on=HEAD, how="left")
    profiles = pd.DataFrame(index=pd.MultiIndex.from_arrays([[], []], names=HEAD))
    if distance is not None:
        profiles = distance.pivot(index=HEAD, columns="distance", values="value")
        profiles = profiles[shown_distances(profiles.columns)]
        heads = heads.merge(_profile_lines(profiles), on=HEAD, how="left")
    return AtlasTable(heads, profiles)


def _where_and_what(additivity: Measurement) -> pd.DataFrame:
    """Return what − where of each head, with its errors, and the shares and correlations behind it."""
    means = by_head(additivity.trained)
    columns = ["share_distance", "share_key", *(name for name in ("r", "r_held_out") if name in means)]
    looks = looks_at(additivity.trained, additivity.random)
    unknown = [name for name in (ERROR, OVER_RANDOM) if looks[name].isna().all()]  # a single text, no baseline
    looks = looks[[*HEAD, "looks", DIFFERENCE, ERROR, OVER_RANDOM]].drop(columns=unknown)
    return looks.merge(means[[*HEAD, *columns]], on=HEAD)


def _verdicts(ladder: pd.DataFrame) -> pd.DataFrame:
    """Return the divergence with the mean output, the verdict of each head, and the verdict in words for hovering."""
    verdicts = head_verdicts(ladder)
    verdicts["verdict_text"] = verdict_texts(verdicts, ladder)
    columns = [*HEAD, "gap_mean", "verdict", "between", "verdict_text"]
    return verdicts[columns].rename(columns={"gap_mean": "kl"}).astype(dict.fromkeys(HEAD, int))


def _profile_lines(profiles: pd.DataFrame) -> pd.DataFrame:
    """Draw each profile as a line of blocks, on its own scale, with its range; a blank where a window has no keys."""
    heights = profiles.sub(profiles.min(axis=1), axis=0)
    ranges = heights.max(axis=1)
    steps = heights.div(ranges.replace(0.0, 1.0), axis=0).mul(len(_BLOCKS) - 1).round().fillna(-1).astype(int)
    lines = ["".join("\u2002" if step < 0 else _BLOCKS[step] for step in row) for row in steps.to_numpy()]
    return ranges.to_frame("range").assign(profile=lines).reset_index()
