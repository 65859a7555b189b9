"""Links of sentences to sections and heads."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.utils.validation import head_label


def link_section(name: str, measurement: Measurement) -> Markup:
    """Return a link to a section, its name in brackets, with the texts that it read and the heads that were run."""
    texts = f", {measurement.read.sizes()}" if measurement.read else ""
    sample = f", {measurement.sample}" if measurement.sample else ""
    return Markup('(<a href="#{0}">{0}</a>{1})').format(name, texts + sample)


def link_head(layer: Any, head: Any) -> Markup:
    """Return the label of a head as a link to its row in the table of all heads."""
    return Markup('<a href="#{0}">{0}</a>').format(head_label(int(layer), int(head)))
