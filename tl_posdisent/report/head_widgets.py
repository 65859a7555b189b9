"""The most and the least additive head of a model as widgets: a short piece of the first text, drawn in the browser."""

from __future__ import annotations

import pandas as pd
import torch

from tl_posdisent.viz.widgets.layout import coloured_text
from tl_posdisent.viz.widgets.offline import Widget, text_token
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns, show_scores

from .markup import paragraph, table
from .measurements import SHARES, Exhibits, Found
from .subject import Subject

SHOWN = 24
"""Tokens on the axes of a chart."""
TEXT = 48
"""Tokens of coloured text."""
ALONE = {name: f"{name.removeprefix('share_')} alone" for name in SHARES}
_HEADS = 12  # of one layer, each with a chart


def exhibits(subject: Subject, found: Found) -> str:
    """Places for the widgets of ``widgets``, with what to look for."""
    shown: Exhibits = found.trained
    n = min(SHOWN, subject.lengths[0])
    said = paragraph(
        f"Scores of the first {n} tokens of the first text: rows are queries, columns keys, red is high, blue low. The "
        "distance part has stripes along the diagonal, the query part rows, the key part columns; fitted is their sum, "
        "and the residual is the difference between scores and fit."
    )
    both = [("Most additive", shown.most)]
    both += [("Least additive", shown.least)] if shown.least != shown.most else []
    ends = _ends(shown.ranking)
    content = table("ends", "The most and the least additive heads, mean over texts", ends, ALONE, index=2)
    for number, (title, (layer, head)) in enumerate(both):
        r = float(shown.fits[layer].r[0, head])
        content += f"<h3>{title}: layer {layer}, head {head}</h3>"
        content += paragraph(f"r = {r:.3f} in this text.") + place(2 * number)
        content += paragraph("The softmax of these scores, and that of the fit alone.") + place(2 * number + 1)
    content += f"<h3>Heads of layer {shown.most[0]}</h3>"
    content += paragraph("Their scores. Point at a head or select it to see it in full.")
    content += f'<div class="narrow">{place(2 * len(both))}</div>'
    content += "<h3>Key part by token</h3>"
    content += paragraph("The key part of their scores, as the colours of the text.") + place(2 * len(both) + 1)
    return said + content


def place(number: int) -> str:
    """Where the page puts a widget."""
    return f"<!--widget {number}-->"


def _patterns(subject: Subject, shown: Exhibits, layer: int, head: int, n: int) -> Widget:
    fit, scores = shown.fits[layer], shown.scores[layer].double()
    pattern = scores.masked_fill(~fit.mask.to(scores.device), -torch.inf).softmax(-1)
    title = f"Layer {layer}, head {head}: softmax of the scores and of their fit"
    return show_patterns(fit, subject.words, pattern, heads=[head], positions=range(n), title=title)


def widgets(subject: Subject, shown: Exhibits) -> list[Widget]:
    """In the order of their places."""
    n = min(SHOWN, subject.lengths[0])
    drawn = []
    for layer, head in dict.fromkeys((shown.most, shown.least)):
        scores, fit = shown.scores[layer], shown.fits[layer]
        title = f"Layer {layer}, head {head}: the scores and their parts"
        drawn.append(show_parts(fit, subject.words, head, scores=scores, positions=range(n), title=title))
        drawn.append(_patterns(subject, shown, layer, head, n))
    layer = shown.most[0]
    heads = _most_additive(shown, layer, subject.heads[layer])
    drawn.append(
        show_scores(
            shown.fits[layer],
            subject.words,
            "scores",
            scores=shown.scores[layer],
            heads=heads,
            positions=range(n),
            title=f"Scores of layer {layer}, heads {', '.join(map(str, heads))}",
        )
    )
    return [*drawn, _key_importance(subject, shown)]


def _most_additive(shown: Exhibits, layer: int, heads: list[int]) -> list[int]:
    """At most twelve heads of a layer, those with the highest r, in ascending order."""
    r = shown.fits[layer].r[0].nan_to_num(nan=-1.0)
    return sorted(sorted(heads, key=lambda head: -float(r[head]))[:_HEADS])


def _key_importance(subject: Subject, shown: Exhibits) -> Widget:
    """``show_key_importance`` of the first tokens. The first of all is often a sink, and would leave others pale."""
    n = min(TEXT, subject.lengths[0])
    layers = sorted(shown.fits.items(), key=lambda one: one[0] != shown.most[0])
    heads = sorted({head for layer, _ in layers for head in subject.heads[layer]})
    values = {f"layer {layer}": fit.key[0, heads, :n].double() for layer, fit in layers}
    largest = max(float(key[:, 1:].abs().max()) for key in values.values())
    return coloured_text(
        values,
        [str(head) for head in heads],
        [text_token(word) for word in subject.words[:n]],
        scale=max(largest, 1e-9),
        title="Key importance",
        note="How much higher than the head’s average a token’s scores are as a key. The first token may be beyond the "
        "scale. Point at a token for its number.",
        cdn=False,
    )


def _ends(ranking: pd.DataFrame) -> pd.DataFrame:
    """The three heads at each end."""
    return ranking if len(ranking) <= 6 else pd.concat([ranking.head(3), ranking.tail(3)])
