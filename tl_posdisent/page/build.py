"""``report``: measure a model on a text, and write the results as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tl_posdisent.models.loading.random_init import USUAL_STD, initial_scale
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.page.deciding.heads import describe_heads
from tl_posdisent.page.drawing.atlas import atlas, listed
from tl_posdisent.page.drawing.atlas_table import atlas_table
from tl_posdisent.page.drawing.document import page
from tl_posdisent.page.drawing.opening import headline, verdict
from tl_posdisent.page.drawing.provenance import analysed, reproduce
from tl_posdisent.page.measuring.measurement import Measurement, Settings
from tl_posdisent.page.measuring.panels import measure_panels
from tl_posdisent.page.measuring.subject import Subject, read_subject
from tl_posdisent.page.sections.ablation import ABLATION
from tl_posdisent.page.sections.additivity import ADDITIVITY
from tl_posdisent.page.sections.all_sections import SECTIONS, verdict_sentences
from tl_posdisent.page.sections.distance import DISTANCE
from tl_posdisent.page.sections.labels import LABELS
from tl_posdisent.page.sections.ladder import LADDER
from tl_posdisent.page.sections.measure import measure_sections
from tl_posdisent.page.sections.names import DEFAULT, SectionName
from tl_posdisent.page.sections.needs import NEEDS
from tl_posdisent.page.sections.section import Section
from tl_posdisent.page.sections.shares import SHARES
from tl_posdisent.page.sections.show import show_section
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import check_writable, whole_file
from tl_posdisent.utils.validation import check_integer, check_seed, check_subset, head_label, shown


def report(
    model: Any,
    text: Tokens,
    path: str | PathLike[str],
    *,
    layers: Layers = None,
    heads: int | str | Iterable[int | str | tuple[int, int]] | None = None,
    sections: Iterable[SectionName] | None = None,
    control: int = 1,
    title: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Measure what the heads of a model need, *where* keys are or *what* they are, and write one HTML file.

    The file has plotly figures and circuitsvis widgets and loads nothing from a network. The same call writes the same
    file, byte for byte. Its numbers are those of the experiments called alone, and random initialisations read the same
    text.

    Texts of at most 1024 tokens (or the model's context) are read, at most 4096 tokens altogether. It takes about six
    texts to decide something, so a string is cut into six to eight equal stretches, of 64 to 256 tokens. Each section
    states what it read. Before the model runs, a line says how many forward passes the report takes.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; hooks on it act on
            all of its measurements, but not on random initialisations. It is read once.
        text: ids ``[batch, pos]``; ids with their mask as a tokenizer returns them; or, if the model has a tokenizer,
            a string or a list of strings of any lengths. Each text is run without its padding.
        path: file to write, ending in .html. Missing folders are created.
        layers: default all.
        heads: integers (in each layer), pairs ``(layer, head)`` or labels ``"L3H4"``; default all.
        sections: which of ``"where_or_what"``, ``"additivity"``, ``"distance"``, ``"shares"``, ``"subspaces"``,
            ``"labels"``, ``"heads"``, ``"perturbation"``, ``"ablation"``, ``"ladder"``; default all but the last two,
            which run the model for each head. A section that cannot be measured states the reason.
        control: number of random initialisations (seeds ``seed``, ``seed + 1`` …) for the baseline; 0 for none.
        title: title of the page; the default names the model.
        seed: seed of random initialisations, estimates and perturbations.
        progress: say the number of passes, and show a bar of the passes of the sections, with the name of the one that
            runs, and another within those that run single heads.

    Raises:
        ValueError: invalid arguments; a path that does not end in .html, or where no file can be written; a model for
            which none of these sections can be measured.

    Example:
        >>> import pathlib, tempfile
        >>> from tl_posdisent import demo_tokens, load_demo_model, report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = report(
        ...         load_demo_model(), demo_tokens(length=64), pathlib.Path(folder, "report.html"),
        ...         sections=["additivity"], progress=False,
        ...     )
        ...     path.name, "What the scores look like" in path.read_text(encoding="utf-8")
        ('report.html', True)
    """
    target = check_page(path)
    subject = read_subject(model, text, layers, heads)
    chosen = check_sections(sections)
    settings = read_settings(subject, seed, control, progress=progress)
    names = None if sections is None else [section.name for section in chosen]
    call = _call(text, target.name, subject, settings, names, every_head=heads is None)
    return write_report(target, subject, chosen, settings, title, call)


def write_report(
    target: Path, subject: Subject, sections: list[Section], settings: Settings, title: str | None, command: str
) -> Path:
    """Measure the sections and write the page, with the command that makes it under "How to reproduce"."""
    if title is not None and not isinstance(title, str):
        raise ArgumentError("title", f"must be text, got {shown(title)}")
    measurements = measure_sections(sections, subject, settings)
    html = _document(title or f"Where and what in {subject.name()}", subject, measurements, settings, command)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(html.encode("utf-8"))
    return target


def check_page(path: str | PathLike[str]) -> Path:
    """Check that a page can be written there."""
    target = check_writable("path", path)
    if target.suffix.lower() != ".html":
        raise ArgumentError("path", f"must be a file such as report.html, ending in .html, got {brief(target)}")
    return target


def check_sections(names: Iterable[SectionName] | None) -> list[Section]:
    """Return the requested sections in the order of the page; without a request, all but those on request."""
    chosen = check_subset("sections", DEFAULT if names is None else names, tuple(SECTIONS))
    if not chosen:
        raise ArgumentError("sections", f"must be some of {', '.join(SECTIONS)}, got none")
    return [section for section in SECTIONS.values() if section.name in chosen]


def read_settings(subject: Subject, seed: int, control: int, *, progress: bool) -> Settings:
    """Check the seed and the number of random copies, whose weights have the configuration's standard deviation."""
    check_seed(seed)
    copies = check_integer("control", control, 0)
    return Settings(seed, copies, initial_scale(subject.model, "config") if copies else USUAL_STD, progress)


def _call(
    text: Tokens,
    file_name: str,
    subject: Subject,
    settings: Settings,
    sections: list[SectionName] | None,
    *,
    every_head: bool,
) -> str:
    """Write the call in Python that makes this report."""
    options = {
        "layers": subject.asked_layers,
        "heads": None if every_head else [head_label(*pair) for pair in subject.pairs],
        "sections": sections,
        "control": settings.copies if settings.copies != 1 else None,
        "seed": settings.seed or None,
    }
    arguments = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    source = "text" if isinstance(text, (str, list)) else "tokens"
    return f"from tl_posdisent import report\n\nreport(model, {source}, {file_name!r}{arguments})"


def _document(
    title: str,
    subject: Subject,
    measurements: Mapping[SectionName, Measurement],
    settings: Settings,
    command: str,
) -> str:
    """Render all parts of the page and their table of contents; the first section stands before the atlas."""
    measured = {name: measurement for name, measurement in measurements.items() if not measurement.refused}
    contents = {name: show_section(SECTIONS[name], subject, measurement) for name, measurement in measurements.items()}
    html = {name: content.html for name, content in contents.items()}
    first = {name: html.pop(name) for name in [NEEDS.name] if name in html}
    opening = _atlas(subject, measurements)
    parts = [
        verdict(verdict_sentences(measurements)),
        *first.values(),
        opening,
        analysed(subject, [name for name, measurement in measured.items() if measurement.sample]),
        headline(subject, measurements.get(SHARES.name), measurements.get(ADDITIVITY.name)),
        *html.values(),
        reproduce(subject, command, settings),
    ]
    titles = {"verdict": "Verdict"} | {name: SECTIONS[name].heading for name in first}
    titles |= {"atlas": "Atlas"} if opening else {}
    titles |= {"analysed": "What was analysed", "headline": "Correlations of the scores"}
    titles |= {name: SECTIONS[name].heading for name in html} | {"reproduce": "How to reproduce"}
    return page(title, parts, titles, [script for content in contents.values() for script in content.scripts])


def _atlas(subject: Subject, measurements: Mapping[SectionName, Measurement]) -> Markup:
    """Render the atlas; empty without a section that has numbers of all heads."""
    tables = {name: one.trained for name, one in measurements.items() if one.refused is None}
    if NEEDS.name not in tables and ADDITIVITY.name not in tables:
        return Markup()
    joined = atlas_table(
        subject.pairs,
        needs=tables.get(NEEDS.name),
        additivity=tables.get(ADDITIVITY.name),
        labels=tables.get(LABELS.name),
        ablation=tables.get(ABLATION.name),
        ladder=tables.get(LADDER.name),
        distance=tables.get(DISTANCE.name),
    )
    panels = measure_panels(subject, listed(joined.heads))
    sentences = describe_heads(
        tables.get(NEEDS.name), measurements.get(ADDITIVITY.name), tables.get(LABELS.name), panels.attention
    )
    return atlas(subject, joined, panels, sentences)
