"""The table of ``compare_heads``, and what it says: how many heads changed in which way, and which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import pandas as pd

from tl_posdisent.experiments.where_what.changes import RATE, WORDS
from tl_posdisent.experiments.where_what.head_table import HeadTable, row_names, texts_in_words
from tl_posdisent.utils.words import plural

_NAMED: Final = 3  # heads that are named for each change
_RATE: Final = f"{100 * RATE:.0f} %"


class ChangeTable(HeadTable):
    """A table of ``compare_heads`` that shows its sentence and what changed before its rows."""

    _shown: ClassVar[tuple[str, ...]] = (
        *("layer", "head", "contribution_before", "contribution_change", "where_change", "what_change"),
        *("verdict_before", "verdict_after", "changed"),
    )

    def _summary(self) -> pd.DataFrame:
        return changes_in(self)

    @property
    def _needed(self) -> set[str]:
        changes = {"difference_change", *(f"{name}_change" for name in WORDS)}
        return {"layer", "head", "changed", "verdict_before", "verdict_after", *changes}


def changes_in(table: pd.DataFrame) -> pd.DataFrame:
    """Count the heads of each change in a table of ``compare_heads``.

    Returns:
        One row for each change that occurs: ``change``, such as ``"contributes less"``, or verdicts ``"where → what"``
        of heads that changed; ``heads``, their number; and ``largest``, the names of the three of largest change.
    """
    named = [said.split(", ") for said in table["changed"]]
    found = [
        (word, table[[word in words for words in named]], f"{column}_change")
        for column, both in WORDS.items()
        for word in both
    ]
    for (before, after), heads in _other_verdicts(table).groupby(["verdict_before", "verdict_after"], sort=False):
        found.append((f"{before} → {after}", heads, "difference_change"))
    rows = [
        [
            change,
            len(heads),
            ", ".join(row_names(heads.sort_values(by, key=abs, ascending=False, kind="stable")[:_NAMED])),
        ]
        for change, heads, by in found
        if len(heads)
    ]
    return pd.DataFrame(rows, columns=["change", "heads", "largest"])


def _other_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads that surely changed and are decided in both models, but not alike."""
    decided = (table["verdict_before"] != "undecided") & (table["verdict_after"] != "undecided")
    return table[decided & (table["verdict_before"] != table["verdict_after"]) & (table["changed"] != "")]


def change_statement(table: pd.DataFrame, lengths: Sequence[int], *, equal: bool) -> str:
    """Say how many heads changed, in which way, and which.

    Args:
        lengths: of the measured texts, in tokens.
        equal: whether all weights of the two models are equal.
    """
    changed = table[table["changed"] != ""]
    none = not table[["contribution_change", "difference_change"]].fillna(0).to_numpy().any()
    said = ["All weights of the two models are equal" + ("." if none else "; settings or buffers differ.")] * equal
    if none:
        return " ".join([*said, "All differences are 0."])
    counts = [
        f"{row['change']} {row['heads']} ({row['largest']}{' and others' if row['heads'] > _NAMED else ''})"
        for row in changes_in(table).to_dict("records")
    ]
    among = (
        f"of {plural(len(table), 'head')} in {texts_in_words(lengths)} surely changed (false discovery rate {_RATE})"
    )
    said.append(f"{len(changed)} {among}: {', '.join(counts)}." if counts else f"None {among}.")
    if not equal and (same := int(changed["same_weights"].sum())):
        said.append(f"{same} of them have the weights they had: they change with what other layers and heads do.")
    total = table[["contribution_before", "contribution_after"]].sum(axis=1)
    run = total[table["measured"] == "run"].sum() / (total.sum() or 1.0)
    return " ".join([*said, f"{100 * run:.0f} % of the contributions were measured by runs."])
