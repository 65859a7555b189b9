"""The table of ``where_or_what``, and what it says: the parts of the sum of all contributions, and the verdicts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, ClassVar, Final, get_args

import pandas as pd

from tl_posdisent.experiments.where_what.parts import PARTS
from tl_posdisent.experiments.where_what.rows import Measured
from tl_posdisent.experiments.where_what.sentences import needs_sentences
from tl_posdisent.experiments.where_what.verdicts import Verdict
from tl_posdisent.utils.statistics import Estimate
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

_NAMED: Final = 3  # heads that are named for each verdict
_FAR_OFF: Final = 3.0  # how many times an estimate may be too small or too large before the table says so


class HeadTable(pd.DataFrame):
    """A table of heads that shows its sentence and a summary before its rows: of ``where_or_what``, the verdicts.

    Selections of it are ordinary data frames.
    """

    _shown: ClassVar[tuple[str, ...]] = (
        *("group", "layer", "head", "contribution", "where_part", "what_part", "neither_part", "joint"),
        *("verdict", "open"),
    )

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    def _summary(self) -> pd.DataFrame:
        return verdict_table(self)

    def __repr__(self) -> str:
        if not self._is_whole:
            return super().__repr__()
        summary, rows = self._summary(), self._few().to_string(**_shown_rows(len(self)))
        counts = [] if summary.empty else [summary.to_string(index=False)]
        return "\n\n".join([self.attrs["statement"], *counts, rows, self._size])

    def _repr_html_(self) -> str:
        if not self._is_whole:
            return pd.DataFrame(self)._repr_html_() or ""  # type: ignore[operator]
        summary, rows = self._summary(), self._few().to_html(**_shown_rows(len(self)))
        counts = "" if summary.empty else summary.to_html(index=False)
        said = html.escape(self.attrs["statement"]).replace(" %", "&nbsp;%")  # no line ends before %
        return f"<p>{said}</p>{counts}{rows}<p>{html.escape(self._size)}</p>"

    def _few(self) -> pd.DataFrame:
        """The columns that a screen has room for."""
        return pd.DataFrame(self)[[name for name in self._shown if name in self]]

    @property
    def _size(self) -> str:
        return f"[{len(self)} rows × {len(self.columns)} columns, all in table.columns]"

    @property
    def _is_whole(self) -> bool:
        """Whether the table still has what its summary is made of: columns can be deleted in place."""
        return "statement" in self.attrs and self._needed <= {*self.columns}

    @property
    def _needed(self) -> set[str]:
        return {"contribution", "verdict", "group" if "group" in self else "layer"}


def _shown_rows(n: int) -> dict[str, Any]:
    """Return how many of n rows pandas shows by its own options, and how numbers are shown."""
    most = pd.get_option("display.max_rows")
    few = pd.get_option("display.min_rows") if most is not None and n > most else most
    return {"max_rows": few, "float_format": "{:.3f}".format}


def verdict_table(table: pd.DataFrame) -> pd.DataFrame:
    """Count the heads of each verdict in a table of ``where_or_what``.

    Returns:
        One row for each verdict that occurs: ``verdict``, ``heads``, ``share`` of the sum of the contributions, and
        ``largest``, the names of the three heads that contribute most.
    """
    total = table["contribution"].sum() or 1.0
    rows = []
    for verdict in get_args(Verdict):
        found = table[table["verdict"] == verdict]
        if len(found):
            largest = found.sort_values("contribution", ascending=False, kind="stable")[:_NAMED]
            share = found["contribution"].sum() / total
            rows.append([verdict, len(found), f"{100 * share:.0f} %", ", ".join(row_names(largest))])
    return pd.DataFrame(rows, columns=["verdict", "heads", "share", "largest"])


def row_names(table: pd.DataFrame) -> list[str]:
    """Return the label of each head, or the name of each group.

    >>> row_names(pd.DataFrame({"layer": [3], "head": [0]})), row_names(pd.DataFrame({"group": ["induction"]}))
    (['L3H0'], ['induction'])
    """
    if "group" in table:
        return [str(name) for name in table["group"]]
    return [head_label(layer, head) for layer, head in zip(table["layer"], table["head"], strict=True)]


def parts_sentence(table: pd.DataFrame, measured: Measured, lengths: Sequence[int]) -> str:
    """Say what the contributions of single heads depend on.

    Args:
        measured: what the rows of the table are made of.
        lengths: of the measured texts, in tokens.
    """
    where, what, neither = (_percent(measured.part_of_sum(name)) for name in PARTS)
    total = table["contribution"].sum() or 1.0
    run = table.loc[table["measured"] == "run", "contribution"].sum() / total
    heads = plural(len(table), "head contributes", "heads contribute")
    by_runs = "all of it" if bool(measured.run.all()) else f"{100 * run:.0f} % of it"
    return (
        f"Of what {heads} in {texts_in_words(lengths)}, each alone, {where} % depends "
        f"on where keys are, {what} % on what they are, {neither} % on neither ({by_runs} measured by runs)."
    )


def verdict_counts(table: pd.DataFrame) -> str:
    """Return the sentence that counts the heads of each verdict."""
    counts = [
        f"{row.verdict} {row.heads}" + (f" ({row.share})" if row.verdict != "not used" else "")
        for row in verdict_table(table).itertuples()
    ]
    may = opened(table)
    return f"Heads (share of the sum): {', '.join(counts)}{may and f', of which {may}'}."


def opened(table: pd.DataFrame) -> str:
    """Say how many undecided heads a run, or more texts, may decide; nothing if there are none."""
    counts = table["open"].value_counts()
    return " and ".join(f"{name} may decide {counts[name]}" for name in ("a run", "more texts") if name in counts)


def groups_statement(table: pd.DataFrame, lengths: Sequence[int]) -> str:
    """Say what each group contributes and needs, its heads replaced together."""
    said = [needs_sentences(row)[0] for row in table.to_dict("records")]
    return " ".join([f"In {texts_in_words(lengths)}, heads of a group replaced together:", *said])


def _percent(estimate: Estimate) -> str:
    value, error = (100 * x.item() for x in estimate)
    digits = 1 if error < 1 else 0
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def texts_in_words(lengths: Sequence[int]) -> str:
    """Format the number of texts and their length.

    >>> texts_in_words([96, 96]), texts_in_words([96, 12])
    ('2 texts of 96 tokens', '2 texts of 12 to 96 tokens')
    """
    shortest, longest = min(lengths), max(lengths)
    tokens = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    return f"{plural(len(lengths), 'text')} of {tokens} tokens"


def estimates_sentences(pairs: Sequence[tuple[int, int]], ratios: Sequence[float]) -> list[str]:
    """Say if an estimate is far from its run, given measured over estimated contributions; NaN where there is none.

    >>> estimates_sentences([(0, 1), (2, 3)], [38.2, float("nan")])[0][:52]
    'The contribution of L0H1 is 38 times its estimate: t'
    """
    off = {pair: max(x, 1 / x) for pair, x in zip(pairs, ratios, strict=True) if x == x and max(x, 1 / x) > _FAR_OFF}
    if not off:
        return []
    pair = max(off, key=lambda pair: off[pair])
    ratio = dict(zip(pairs, ratios, strict=True))[pair]
    times = f"{ratio:.0f} times" if ratio > 1 else f"1/{1 / ratio:.0f} of"
    return [
        f"The contribution of {head_label(*pair)} is {times} its estimate: those of heads that were not run may be off "
        'as far; exact="all" runs them.'
    ]
