"""The most and the least additive head of a model as widgets: a short piece of the first text, drawn in the browser."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from tl_posdisent.utils.validation import head_label
from tl_posdisent.viz.widgets.layout import Layout, coloured_text
from tl_posdisent.viz.widgets.offline import Widget, text_token
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns

from .markup import paragraph, table
from .measurements import SHARES, Exhibits
from .subject import Subject

SHOWN = 24
"""Tokens on the axes of a chart."""
TEXT = 48
"""Tokens of coloured text."""
ALONE = {name: f"{name.removeprefix('share_')} alone" for name in SHARES}


def exhibits(subject: Subject, shown: Exhibits) -> tuple[str, list[str]]:
    """The HTML of the widgets, with what to look for; and their scripts."""
    n, scripts = min(SHOWN, subject.lengths[0]), list[str]()

    def place(widget: Widget) -> str:
        element, script = widget.element_and_script(f"widget-{len(scripts)}")
        scripts.append(script)
        return f'<div class="widget">{element}</div>'

    ends = shown.ranking if len(shown.ranking) <= 6 else pd.concat([shown.ranking.head(3), shown.ranking.tail(3)])
    content = paragraph(
        f"Scores of the first {n} tokens of the first text: rows are queries, columns keys, red is high, blue low. The "
        "distance component has stripes along the diagonal, the query component rows, the key component columns; "
        "fitted is their sum, and the residual is the difference between scores and fit."
    )
    content += table("ends", "The most and the least additive heads, mean over texts", ends, ALONE)
    both = {"Most additive": shown.most, "Least additive": shown.least}
    for title, (layer, head) in list(both.items())[: len(set(both.values()))]:
        fit, scores, label = shown.fits[layer], shown.scores[layer], head_label(layer, head)
        pattern = scores.double().masked_fill(~fit.mask.to(scores.device), -torch.inf).softmax(-1)
        components, patterns = f"{label}: the scores and their components", f"{label}: softmax of scores and fit"
        content += f"<h3>{title}: {label}</h3>" + paragraph(f"r = {float(fit.r[0, head]):.3f} in this text.")
        options: dict[str, Any] = {"positions": range(n)}
        content += place(show_parts(fit, subject.words, head, scores=scores, title=components, **options))
        content += paragraph("The softmax of these scores, and that of the fit alone.")
        content += place(show_patterns(fit, subject.words, pattern, heads=[head], title=patterns, **options))
    content += "<h3>Key component by token</h3>"
    content += paragraph("The key component of the scores of these layers, as the colours of the text.")
    return content + place(_key_importance(subject, shown)), scripts


def _key_importance(subject: Subject, shown: Exhibits) -> Widget:
    """``show_key_importance`` of the first tokens. The first of all is often a sink, and would leave others pale."""
    n = min(TEXT, subject.lengths[0])
    layers = sorted(shown.fits.items(), key=lambda one: one[0] != shown.most[0])
    heads = sorted({head for layer, _ in layers for head in subject.heads[layer]})
    values = {f"layer {layer}": fit.key[0, heads, :n].double() for layer, fit in layers}
    largest = max(float(key[:, 1:].abs().max()) for key in values.values())
    note = (
        "How much higher than the head’s average a token’s scores are as a key. The first token may be beyond the "
        "scale. Point at a token for its number."
    )
    words = [text_token(word) for word in subject.words[:n]]
    return coloured_text(
        values, [str(head) for head in heads], words, Layout(max(largest, 1e-9), "Key importance", note)
    )
