"""Render a section with its heading, or the reason for its absence."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.page.drawing.markup import render
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.measuring.subject import Subject
from tl_posdisent.page.sections.section import Content, Section


def show_section(section: Section, subject: Subject, measurement: Measurement) -> Content:
    """Render one section; return it with the scripts of its widgets."""
    absent = measurement.refused is not None
    content = Content(Markup()) if absent else section.show(subject, measurement)
    html = render(
        "section",
        id=section.name,
        title=section.heading,
        content=content.html,
        refused=measurement.refused,
        failed=measurement.failed,
        note=None if absent else measurement.note,
        read=None if absent or measurement.read is None else _texts_read(subject, measurement.read),
    )
    return Content(html, content.scripts)


def _texts_read(subject: Subject, read: Subject) -> str:
    """State which of the report's texts the section measured."""
    whole = "" if read.lengths == subject.lengths else f", of {subject.sizes()}"
    return f"Read: {read.sizes()}{whole}."
