"""The section ``two_models``: which heads changed between the model and another of its architecture."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pandas as pd

from tl_posdisent.experiments.where_what.compare_heads import compare_heads
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.cut_text import LENGTH, MOST
from tl_posdisent.page.section import Section, Settings, Shown
from tl_posdisent.page.subject import Subject
from tl_posdisent.page.where_or_what import plane
from tl_posdisent.utils.tables import HEAD

TWO_MODELS: Final = "two_models"
"""The name of the section, which is there if another model is given."""
_CHANGES: Final = ("contribution", "where_part", "what_part", "neither_part")
_COLUMNS: Final = [
    "changed",
    "verdict_before",
    "verdict_after",
    *(f"{name}_change{end}" for name in _CHANGES for end in ("", "_se")),
    "contribution_before",
    "contribution_after",
    "measured",
    "same_weights",
]
"""The columns of the table of heads that changed; the first are shown, the others on request."""
_DIGITS: Final = {f"contribution_{when}": 4 for when in ("before", "after", "change", "change_se")}

_ABOUT = """
Both models read the same texts, and the contribution of each head and its parts are measured as for one model: before
is this model, after the other one. A change is after minus before, paired by text, with its standard error over texts.
It is named if its false discovery rate (Benjamini–Hochberg) is at most 5 %, of contributions among all heads, of parts
among those of all heads. A head that changed need not be one that was changed: others make up for it, and later layers
receive something else. The heads that contribute most in either model are run in both, the others are estimated.
"""


def two_models(after: ModelReading) -> Section:
    """Return the section that compares the model of the report with another one."""
    return Section("Two models", _ABOUT, partial(_measure, after=after), _show, positions=LENGTH, tokens=LENGTH * MOST)


def _measure(subject: Subject, settings: Settings, *, after: ModelReading) -> pd.DataFrame:
    options: Any = {"seed": settings.seed, "progress": settings.progress}
    return compare_heads(subject.reading, after, subject.tokens, heads=subject.pairs, **options)


def _show(changes: pd.DataFrame, random: pd.DataFrame | None) -> Shown:
    before, after = (_one_model(changes, when) for when in ("before", "after"))
    drawn = plane(before, after=after)
    caption = "Parts of each head’s contribution before, and arrows to those after, whether the change is sure or not"
    changed = changes[changes["changed"] != ""].sort_values("contribution_change", key=abs, ascending=False)
    rows = changed[[*HEAD, *_COLUMNS]].assign(same_weights=changed["same_weights"].map({True: "yes", False: "no"}))
    table = (rows, "Heads that changed, the largest change of the contribution first") if len(rows) else None
    titles = {name: _title(name) for name in _COLUMNS}
    return Shown([changes.attrs["statement"]], [(drawn, caption)], table, titles, _DIGITS)


def _one_model(changes: pd.DataFrame, when: str) -> pd.DataFrame:
    """Return the columns of one of the two models, as a table of ``where_or_what``."""
    own = {name: name.replace(f"_{when}", "") for name in map(str, changes) if f"_{when}" in name}
    return changes[[*HEAD, *own]].rename(columns=own).assign(measured=changes["measured"])


def _title(name: str) -> str:
    """Write the title of a column.

    >>> _title("where_part_change"), _title("where_part_change_se")
    ('where change', 'error of where change')
    """
    words = name.replace("_part", "").removesuffix("_se").replace("_", " ")
    return f"error of {words}" if name.endswith("_se") else words
