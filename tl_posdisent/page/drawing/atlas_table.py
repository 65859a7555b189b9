"""The table behind the atlas: a row for each head, with the measurements of several sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pandas as pd

from tl_posdisent.experiments.causal.head_verdicts import head_verdicts
from tl_posdisent.page.deciding.words import NO_LABEL, label_words
from tl_posdisent.page.measuring.distances import shown_distances
from tl_posdisent.page.measuring.measurement import HEAD, by_head
from tl_posdisent.viz.plots.heatmaps import verdict_texts

_BLOCKS = "▁▂▃▄▅▆▇█"
_VARIANCE: Final = ("share_distance", "share_key", "r_held_out", "r")


class AtlasTable(NamedTuple):
    """A row for each head, and its distance component at distances 0, 1, 2, 4 … (the columns of ``profiles``)."""

    heads: pd.DataFrame
    profiles: pd.DataFrame


def atlas_table(
    pairs: Sequence[tuple[int, int]],
    *,
    needs: pd.DataFrame | None = None,
    additivity: pd.DataFrame | None = None,
    labels: pd.DataFrame | None = None,
    ablation: pd.DataFrame | None = None,
    ladder: pd.DataFrame | None = None,
    distance: pd.DataFrame | None = None,
) -> AtlasTable:
    """Join the tables of the sections that were measured; the heads that contribute most are first."""
    heads = pd.DataFrame([*pairs], columns=HEAD)
    if needs is not None:
        heads = heads.merge(needs, on=HEAD, how="left").sort_values("contribution", ascending=False, kind="stable")
    if additivity is not None:
        means = by_head(additivity)
        columns = [name for name in _VARIANCE if name in means and not (name == "r" and "r_held_out" in means)]
        heads = heads.merge(means[[*HEAD, *columns]], on=HEAD, how="left")
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
    return AtlasTable(heads.reset_index(drop=True), profiles)


def _verdicts(ladder: pd.DataFrame) -> pd.DataFrame:
    """Return the verdict of the ladder on each head, and this verdict in words for hovering."""
    verdicts = head_verdicts(ladder)
    verdicts["ladder_text"] = verdict_texts(verdicts, ladder)
    columns = [*HEAD, "gap", "verdict", "between", "ladder_text"]
    return verdicts[columns].rename(columns={"verdict": "ladder"}).astype(dict.fromkeys(HEAD, int))


def _profile_lines(profiles: pd.DataFrame) -> pd.DataFrame:
    """Draw each profile as a line of blocks, on its own scale, with its range; a blank where a window has no keys."""
    heights = profiles.sub(profiles.min(axis=1), axis=0)
    ranges = heights.max(axis=1)
    steps = heights.div(ranges.replace(0.0, 1.0), axis=0).mul(len(_BLOCKS) - 1).round().fillna(-1).astype(int)
    lines = ["".join("\u2002" if step < 0 else _BLOCKS[step] for step in row) for row in steps.to_numpy()]
    return ranges.to_frame("range").assign(profile=lines).reset_index()
