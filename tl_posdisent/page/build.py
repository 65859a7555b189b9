"""``report``: measure a model on a text, and write the results as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tl_posdisent.models.loading.random_init import USUAL_STD, initial_scale
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.page.atlas import atlas, atlas_table, colours_of, places_of
from tl_posdisent.page.document import Part, page
from tl_posdisent.page.markup import ROWS
from tl_posdisent.page.names import ON_REQUEST, SECTION_NAMES, SectionName
from tl_posdisent.page.panels import make_panels
from tl_posdisent.page.provenance import reproduce
from tl_posdisent.page.section import Measured, Section, Settings, measure_sections, render_section
from tl_posdisent.page.sections import SECTIONS
from tl_posdisent.page.subject import Subject, read_subject
from tl_posdisent.page.two_models import TWO_MODELS, two_models
from tl_posdisent.utils.errors import ArgumentError, brief, naming
from tl_posdisent.utils.files import check_writable, whole_file
from tl_posdisent.utils.validation import check_integer, check_seed, check_subset, head_label, shown


def report(
    model: Any,
    text: Tokens,
    path: str | PathLike[str],
    *,
    after: Any = None,
    layers: Layers = None,
    heads: int | str | Iterable[int | str | tuple[int, int]] | None = None,
    sections: Iterable[SectionName] | None = None,
    control: int = 1,
    title: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Measure what the heads of a model need, *where* keys are or *what* they are, and write one HTML file.

    The file has plotly figures and loads nothing from a network. The same call writes the same file, byte for byte. Its
    numbers are those of the experiments called alone, and random initialisations read the same text.

    Texts of at most 1024 tokens (or the model's context) are read, at most 4096 tokens altogether. A string is cut into
    twelve parts of 128 tokens (``cut_text``). Each section states what it read.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; hooks on it act on
            all of its measurements, but not on random initialisations. It is read once.
        text: ids ``[batch, pos]``; or, if the model has a tokenizer, a string, or a list of strings of one length in
            tokens.
        path: file to write, ending in .html. Missing folders are created.
        after: another model of the same architecture, such as the model after fine-tuning. One more section says
            which heads changed (``compare_heads``), whatever ``sections`` are.
        layers: default all.
        heads: integers (in each layer), pairs ``(layer, head)`` or labels ``"L3H4"``; default all.
        sections: which of ``"where_or_what"``, ``"additivity"``, ``"distance"``, ``"shares"``, ``"labels"``,
            ``"perturbation"``, ``"ablation"``; default all but the last, which runs the model once for each head. A
            section that cannot be measured states the reason.
        control: number of random initialisations (seeds ``seed``, ``seed + 1`` …) for the baseline; 0 for none.
        title: title of the page; the default names the model.
        seed: seed of random initialisations, estimates and perturbations.
        progress: show a bar of the sections, and others within those that run single heads.

    Raises:
        ValueError: invalid arguments; texts of several lengths; a path that does not end in .html, or where no file can
            be written; a model for which none of these sections can be measured.

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
    if after is not None:
        with naming(model="after"):
            compared = {TWO_MODELS: two_models(read_model(after))}
        first = {name: section for name, section in chosen.items() if name == SECTION_NAMES[0]}
        chosen = first | compared | chosen
    settings = read_settings(subject, seed, control, progress=progress)
    options = {
        "layers": None if layers is None else list(subject.heads),
        "heads": None if heads is None else [head_label(*place) for place in subject.pairs],
        "sections": None if sections is None else [name for name in chosen if name != TWO_MODELS],
        "control": None if settings.copies == 1 else settings.copies,
        "title": title,
        "seed": settings.seed or None,
    }
    arguments = "" if after is None else ", after=after"
    arguments += "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    source = "text" if isinstance(text, (str, list)) else "tokens"
    call = f"from tl_posdisent import report\n\nreport(model, {source}, {target.name!r}{arguments})"
    return write_report(target, subject, chosen, settings, title, call)


def write_report(
    target: Path,
    subject: Subject,
    sections: Mapping[str, Section],
    settings: Settings,
    title: str | None,
    command: str,
) -> Path:
    """Measure the sections and write the page, with the command that makes it under "How to reproduce"."""
    if title is not None and not isinstance(title, str):
        raise ArgumentError("title", f"must be text, got {shown(title)}")
    measured = measure_sections(sections, subject, settings)
    html = page(title or f"Where and what in {subject.name()}", _parts(sections, measured, subject, settings, command))
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(html.encode("utf-8"))
    return target


def _parts(
    sections: Mapping[str, Section],
    measured: Mapping[str, Measured],
    subject: Subject,
    settings: Settings,
    command: str,
) -> list[Part]:
    """Render all parts of the page in their order: the answer, the atlas, the other sections, how to reproduce them."""
    heads = atlas_table(subject.pairs, measured)
    places = places_of(heads.head(ROWS)) if colours_of(heads) else []
    linked = {head_label(*place) for place in places}
    parts = [
        Part(name, section.heading, render_section(name, section, measured[name], subject, linked))
        for name, section in sections.items()
    ]
    if places:
        panels = make_panels(subject, places, measured)
        of_heads = Part("atlas", "Atlas of the heads", atlas(subject, heads, panels))
        parts.insert(sum(name in sections for name in (SECTION_NAMES[0], TWO_MODELS)), of_heads)
    return [*parts, Part("reproduce", "How to reproduce", reproduce(subject, command, settings))]


def check_page(path: str | PathLike[str]) -> Path:
    """Check that a page can be written there."""
    target = check_writable("path", path)
    if target.suffix.lower() != ".html":
        raise ArgumentError("path", f"must be a file such as report.html, ending in .html, got {brief(target)}")
    return target


def check_sections(names: Iterable[SectionName] | None) -> dict[str, Section]:
    """Return the requested sections in the order of the page; without a request, all but that on request."""
    default = [name for name in SECTION_NAMES if name != ON_REQUEST]
    chosen = check_subset("sections", default if names is None else names, SECTION_NAMES)
    if not chosen:
        raise ArgumentError("sections", f"must be some of {', '.join(SECTION_NAMES)}, got none")
    return {name: section for name, section in SECTIONS.items() if name in chosen}


def read_settings(subject: Subject, seed: int, control: int, *, progress: bool) -> Settings:
    """Check the seed and the number of random copies, whose weights have the configuration's standard deviation."""
    copies = check_integer("control", control, 0)
    return Settings(check_seed(seed), copies, initial_scale(subject.model, "config") if copies else USUAL_STD, progress)
