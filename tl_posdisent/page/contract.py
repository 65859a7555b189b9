"""The data of the atlas and its panels: what ``atlas.py`` writes into the page is what ``templates/atlas.js`` reads.

Lists by head are in the order of ``labels``, which is that of the table of all heads.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Colour(TypedDict):
    """A measure of the heads: the colours of the map, and the numbers of an axis.

    Attributes:
        values: by head; for verdicts, their places in ``names``; null without a number.
        scale, low, high: plotly's colour scale, and the numbers at its ends.
        names: the verdicts; empty for a number.
    """

    title: str
    values: list[float | None]
    scale: list[Any]
    low: float
    high: float
    names: list[str]


class Panel(TypedDict):
    """The panel of one head.

    Attributes:
        says: its description, sentence by sentence.
        scores: the lowest and the highest score of the first tokens, and bytes in base64, row by row; a score is
            ``low + byte / 254 * (high - low)``, and 255 where it is masked. If ``causal``, only keys up to the query's
            are there.
        attention: mean attention at the distances ``attended``, by intervention.
        profile: the distance component at ``distances``.
    """

    says: list[str]
    scores: tuple[float, float, str]
    attention: NotRequired[dict[str, list[float]]]
    profile: NotRequired[list[float | None]]


class AtlasData(TypedDict):
    """What is in the page for the atlas.

    Attributes:
        labels: of the heads, such as L4H2.
        hover: the label and the numbers of each head, in lines.
        layers: the name of each layer of the map, by its number.
        colours: by name; the first is shown first.
        words: the tokens of the score maps.
        panels: of the heads in the table, by label.
    """

    labels: list[str]
    hover: list[str]
    layers: dict[str, str]
    colours: dict[str, Colour]
    words: list[str]
    causal: bool
    distances: list[int]
    attended: list[int]
    panels: dict[str, Panel]
