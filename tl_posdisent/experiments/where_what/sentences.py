"""What a head needs and what its scores look like, in sentences: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, log10, nan
from typing import Any, Final, Literal

import pandas as pd

from tl_posdisent.experiments.where_what.verdicts import CONFIDENCE
from tl_posdisent.utils.statistics import significance
from tl_posdisent.utils.validation import head_label
from tl_posdisent.utils.words import plural

Row = Mapping[Any, Any] | pd.Series
"""A row of a table, such as ``row._asdict()`` of ``itertuples()`` or a ``pandas.Series``."""

CLEAR: Final = 0.1
"""A share of variance by which one component has to exceed the other, so that scores look like *where* or *what*."""
_NEEDS: Final = {
    "where": "its contribution depends on where keys are",
    "what": "its contribution depends on what keys are",
    "mixed": "its contribution depends on where and what alike",
    "neither": "its contribution does not depend on the pattern",
    "not used": "the predictions do not use the head",
}
_LISTED: Final = 4  # heads of a group that a sentence lists
_PROFILE_SHOWN: Final = (0, 1, 5, 32)


@dataclass(frozen=True)
class Cost:
    """What it costs to put every key but the query's own at one distance.

    Attributes:
        distance: in positions.
        kl, kl_se: KL(unmodified ‖ changed), nats per predicted token, and its standard error over texts.
        loss, loss_se: change of the loss, nats per predicted token.
    """

    distance: float
    kl: float
    kl_se: float
    loss: float
    loss_se: float


def needs_sentences(row: Row, df: float = inf) -> list[str]:
    """Say what a head's contribution depends on; the first sentence is the answer.

    Args:
        row: of the table of ``where_or_what``, also of a group. Estimated numbers are called so.
        df: degrees of freedom of its errors (``table.attrs["df"]``).

    >>> row = {"layer": 8, "head": 1, "contribution": 0.011, "where_part": 0.06, "what_part": 0.84, "neither_part": 0.1,
    ...        "joint": 0.02, "kept_distance": -0.4, "kept_content": 0.88, "kept_uniform": 0.1, "gate": 0.31,
    ...        "content_distance": 1, "measured": "run", "verdict": "what", "open": ""}
    >>> for sentence in needs_sentences(row | {f"{name}_se": 0.04 for name in row} | {"contribution_se": 0.002}):
    ...     print(sentence)
    L8H1 contributes 0.011 ± 0.002 nats per predicted token: 6 ± 4 % where, 84 ± 4 % what, 10 ± 4 % neither: what.
    Distances alone keep none of it, content alone 88 ± 4 %, uniform attention 10 ± 4 %; its own attention to the ...
    Attention by the distance alone costs 0.015, more than the head contributes: wrong attention does harm.
    """
    return [_answer(row), *_kept_shares(row, df), *_harm(row, df)]


def looks_sentences(
    shares: Row,
    random: Row | None = None,
    *,
    label: str | None = None,
    profile: Mapping[int, float] | None = None,
    first_token: float | None = None,
) -> list[str]:
    """Say what a head's scores and its attention look like.

    Args:
        shares: means over texts of ``share_distance``, ``share_key``, ``share_query``, ``r`` and, if present,
            ``r_held_out`` of ``additivity``.
        random: the same of random weights.
        label: of ``head_labels``; None if it was not measured, empty for a head that has none of the usual labels.
        profile: mean attention by distance, without the first token if ``first_token``, its attention, is given.

    >>> shares = {"share_distance": 0.62, "share_key": 0.08, "share_query": 0.1, "r": 0.91}
    >>> random = {"share_distance": 0.01, "share_key": 0.5, "share_query": 0.3, "r": 0.88}
    >>> for sentence in looks_sentences(shares, random, label="previous_token", profile={0: 0.1, 1: 0.7, 2: 0.05}):
    ...     print(sentence)
    Of the variance of its scores, the distance alone explains 62 %, the key 8 %, the query 10 % (random weights: ...).
    The sum of the three correlates with the scores by 0.91 (random weights: 0.88).
    Its attention is largest at distance 1: 0.70 on average (at 0: 0.10).
    Usual label: previous token.
    """
    names = ("share_distance", "share_key", "share_query")
    if not all(isfinite(shares[name]) for name in names):
        return ["Its scores do not vary.", *_profile(profile, first_token), *_label(label)]
    distance, key, query = (_percent(shares[name]) for name in names)
    beside = "" if random is None else f" (random weights: {', '.join(_percent(random[x]) for x in names)} %)"
    sentences = [
        f"Of the variance of its scores, the distance alone explains {distance} %, the key {key} %, the query {query} %"
        f"{beside}."
    ]
    column, means = "r", "The sum of the three correlates with the scores by"
    if isfinite(shares.get("r_held_out", nan)):
        column, means = "r_held_out", "With the other texts' distance profile, their sum correlates with the scores by"
    if isfinite(shares[column]):
        beside = "" if random is None else f" (random weights: {random[column]:.2f})"
        sentences.append(f"{means} {shares[column]:.2f}{beside}.")
    return [*sentences, *_profile(profile, first_token), *_label(label)]


def looks_like(shares: Row, random: Row | None = None) -> Literal["where", "what"] | None:
    """Say whether the scores vary with *where* a key is or with *what* it is; None if neither prevails.

    The share of the variance that the key explains alone, minus that of the distance, has to differ from 0 by more than
    ``CLEAR``, and on the same side from that of random weights.

    >>> looks_like({"share_key": 0.5, "share_distance": 0.1}, {"share_key": 0.2, "share_distance": 0.1})
    'what'
    >>> looks_like({"share_key": 0.5, "share_distance": 0.1}, {"share_key": 0.6, "share_distance": 0.1})
    """
    own = _key_minus_distance(shares)
    over = own if random is None else own - _key_minus_distance(random)
    if min(own, over) > CLEAR:
        return "what"
    return "where" if max(own, over) < -CLEAR else None


def disagreement_sentence(row: Row, shares: Row, random: Row | None = None) -> str | None:
    """Say why scores that look like one thing may not be what the predictions need; None where the two agree.

    Args:
        row: of the table of ``where_or_what``.
        shares, random: as in ``looks_sentences``.

    >>> shares = {"share_distance": 0.7, "share_key": 0.1}
    >>> disagreement_sentence({"verdict": "what"}, shares)[:75]
    'Its scores look like where (the distance explains 70 % of their variance, t'
    >>> disagreement_sentence({"verdict": "where"}, shares)
    """
    looks, verdict = looks_like(shares, random), row["verdict"]
    if looks is None or verdict in (looks, "undecided"):
        return None
    distance, key = _percent(shares["share_distance"]), _percent(shares["share_key"])
    return (
        f"Its scores look like {looks} (the distance explains {distance} % of their variance, the key {key} %), but "
        f"{_NEEDS[verdict]}: a share of variance weighs all pairs alike, most of them far apart, where attention may "
        "be small, and says nothing of what the predictions use."
    )


def hooks_sentences(table: pd.DataFrame) -> list[str]:
    """Say under which hooks of the user's a table was measured, if any."""
    names = table.attrs.get("hooks", ())
    return [f"Measured under hooks of your own at {', '.join(names)}."] if names else []


def _answer(row: Row) -> str:
    """Return the answer in one sentence."""
    name = _group(row) if "group" in row else head_label(row["layer"], row["head"])
    estimated = "" if row["measured"] == "run" else "an estimated "
    size = _with_error(row["contribution"], row["contribution_se"])
    contribution = f"{name} contributes {estimated}{size} nats per predicted token"
    if row["verdict"] == "not used":
        return f"{contribution}, which is negligible: not used."
    parts = (f"{_kept(row[f'{part}_part'], row[f'{part}_part_se'])} {part}" for part in ("where", "what", "neither"))
    return f"{contribution}: {', '.join(parts)}: {_verdict(row)}."


def _group(row: Row) -> str:
    """Name a group, with its heads if they are few."""
    labels = row["heads"].split(", ")
    return f"{row['group']} ({row['heads'] if len(labels) <= _LISTED else plural(len(labels), 'head')})"


def _verdict(row: Row) -> str:
    """Return the verdict, what is open of an undecided head, and that *neither* is larger than *where* or *what*."""
    verdict = str(row["verdict"])
    if verdict == "undecided":
        return f"undecided, {row['open']}{'' if ' or ' in row['open'] else ' may decide'}"
    other = {"where": "what", "what": "where"}.get(verdict)
    if other and row["neither_part"] > row[f"{verdict}_part"]:
        return f"more {verdict} than {other}"
    return verdict


def _kept_shares(row: Row, df: float) -> list[str]:
    """Say what is kept under each replacement, and whether position and content are needed together."""
    if row["verdict"] == "not used":
        return []
    distance, content, uniform, gate = (
        _kept(row[name], row[f"{name}_se"]) for name in ("kept_distance", "kept_content", "kept_uniform", "gate")
    )
    joint, error = row["joint"], row["joint_se"]
    together = "position and content are needed together" if joint > 0 else "either position or content serves"
    sure = significance(abs(joint), error, df) >= CONFIDENCE
    said = f" (joint {joint:.2f} ± {error:.2f}: {together})" if sure else ""
    return [
        f"Distances alone keep {distance} of it, content alone {content}, uniform attention {uniform}{said}; its own "
        f"attention to the first token and uniform attention to the rest keep {gate}.".replace("-", "−")
    ]


def _harm(row: Row, df: float) -> list[str]:
    """Say which attention costs more than the head contributes."""
    if row["verdict"] == "not used":
        return []
    found: list[tuple[str, float]] = []
    surely = {x: significance(-row[x], row[f"{x}_se"], df) >= CONFIDENCE for x in ("kept_distance", "kept_content")}
    if surely["kept_distance"]:
        found.append(("attention by the distance alone", (1 - row["kept_distance"]) * row["contribution"]))
    if surely["kept_content"]:
        cost = (1 - row["kept_content"]) * row["contribution"]
        found.append((f"every other key at distance {row['content_distance']:g}", cost))
    if not found:
        return []
    estimated = "" if row["measured"] == "run" else "an estimated "
    costs_in_nats = nats_of_list([cost for _, cost in found])
    words = " and ".join(
        f"{name} costs {estimated if n == 0 else ''}{costs_in_nats[n]}" for n, (name, _) in enumerate(found)
    )
    each = "each more" if len(found) > 1 else "more"
    return [f"{words[0].upper()}{words[1:]}, {each} than the head contributes: wrong attention does harm."]


def _profile(profile: Mapping[int, float] | None, first_token: float | None) -> list[str]:
    first = "" if first_token is None else f"The first token gets {_percent(first_token)} % of its attention"
    if not profile:
        return [f"{first}."] if first else []
    peak = max(profile, key=lambda distance: profile[distance])
    others = [f"at {d}: {profile[d]:.2f}" for d in _PROFILE_SHOWN if d in profile and d != peak]
    beside = f" ({', '.join(others)})" if others else ""
    begin = f"{first}; that to others" if first else "Its attention"
    return [f"{begin} is largest at distance {peak}: {profile[peak]:.2f} on average{beside}."]


def _label(label: str | None) -> list[str]:
    if label is None:
        return []
    words = label.replace("_", " ").replace("+", ", ") or "none"
    return [f"Usual label{'s' if '+' in label else ''}: {words}."]


def _key_minus_distance(shares: Row) -> float:
    difference: float = shares["share_key"] - shares["share_distance"]
    return difference


def _kept(share: float, error: float) -> str:
    """Format a share of the contribution, which is none where it is surely not above 0."""
    digits = 1 if error < 0.01 else 0
    return "none" if share + error < 0 else f"{_percent(share, digits)} ± {_percent(error, digits)} %"


def _percent(share: float, digits: int = 0) -> str:
    return f"{round(100 * share, digits) + 0.0:.{digits}f}".replace("-", "−")


def nats(value: float, *, sign: str = "-") -> str:
    """Format a number of nats with two significant digits, and at most six decimals.

    >>> nats(0.0123), nats(-0.00000312), nats(0.5, sign="+")
    ('0.012', '−0.000003', '+0.5')
    """
    digits = f"{round(float(f'{value:.2g}'), 6) + 0.0:{sign}.6f}"
    return digits.rstrip("0").rstrip(".").replace("-", "−")


def nats_of_list(values: Sequence[float], *, sign: str = "-") -> list[str]:
    """Format numbers of nats of one list with the same number of decimals, six at most.

    They are two significant digits of the largest number, and one of the smallest.

    >>> nats_of_list([0.1134, 0.1, 0.02]), nats_of_list([0.1134, 0.0021, 0.0], sign="+")
    (['0.11', '0.10', '0.02'], ['+0.113', '+0.002', '+0.000'])
    """
    places = [floor(log10(abs(float(f"{value:.2g}")))) for value in values if value] or [0]
    decimals = min(6, max(0, 1 - max(places), -min(places)))
    return [f"{round(value, decimals) + 0.0:{sign}.{decimals}f}".replace("-", "−") for value in values]


def _with_error(value: float, error: float) -> str:
    """Format a number and its error with as many decimals as the error needs: one digit, two if the first is 1.

    >>> _with_error(0.11342, 0.00744), _with_error(0.0312, 0.00193), _with_error(0.000025, 0.0023)
    ('0.113 ± 0.007', '0.0312 ± 0.0019', '0.000025 ± 0.002')
    """
    if not error > 0:
        return f"{nats(value)} ± {nats(error)}"
    first = floor(log10(error))
    decimals = min(6, max(0, -first + (error < 2 * 10**first)))
    shown = f"{value:.{decimals}f}" if round(abs(value), decimals) else nats(value)
    return f"{shown} ± {error:.{decimals}f}".replace("-", "−")
