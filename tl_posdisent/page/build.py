"""``report``: measure a model on a text, and write the results as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor

from tl_posdisent.models.loading.random_init import USUAL_STD, Scale, initial_scale
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.running.texts import Tokens
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
from tl_posdisent.page.sections.names import SectionName
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
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    control: int = 1,
    std: Scale = "config",
    heads: int | str | Iterable[int | str | tuple[int, int]] | None = None,
    sections: Iterable[SectionName] | None = None,
    title: str | None = None,
    seed: int = 0,
    command: str | None = None,
    progress: bool = True,
) -> Path:
    """Measure which positions and tokens the heads of a model attend to in a text, and write one HTML file.

    The file has plotly figures and circuitsvis widgets and loads nothing from a network. The same call writes the same
    file, byte for byte. Its numbers are those of the experiments called alone, and random initialisations read the same
    text.

    Texts of at most 1024 tokens (or the model's context) are read, at most 4096 tokens altogether. It takes about six
    texts to decide something, so a string is cut into six to eight equal stretches, of 64 to 256 tokens. Each section
    states what it read. Ablation and the ladder run the model for each head: for all chosen heads, or for 40 of them at
    equal steps if there are more, which takes about as long as 35 forward passes of 384 tokens and 120 of 512.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; hooks on it act on
            all of its measurements, but not on random initialisations. It is read once.
        text: ids ``[batch, pos]``, or text if the model has a tokenizer: a string, or a list of strings of any lengths.
        path: the HTML file; its folder is created if necessary.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        layers: default all.
        control: number of random initialisations (seeds ``seed``, ``seed + 1`` …) for the baseline; 0 for none.
        std: standard deviation of their weights, a single one, as in ``random_control``.
        heads: integers (in each layer), pairs ``(layer, head)`` or labels ``"L3H4"``; default all.
        sections: which of ``"additivity"``, ``"distance"``, ``"shares"``, ``"subspaces"``, ``"labels"``,
            ``"heads"``, ``"perturbation"``, ``"ablation"``, ``"ladder"``; default all. A section that cannot be
            measured states the reason.
        title: title of the page; the default names the model.
        seed: seed of random initialisations and perturbations.
        command: the command line to print under "How to reproduce"; default this call.
        progress: show a bar of the sections, and one within those that run heads.

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
        ...     path.name, "Headline numbers" in path.read_text(encoding="utf-8")
        ('report.html', True)
    """
    target = _check_page(path)
    subject = read_subject(model, text, attention_mask, layers, heads)
    chosen = _check_sections(sections)
    check_seed(seed)
    copies = check_integer("control", control, 0)
    for name, value in (("title", title), ("command", command)):
        if value is not None and not isinstance(value, str):
            raise ArgumentError(name, f"must be text, got {shown(value)}")
    settings = Settings(seed, copies, initial_scale(subject.model, std) if copies else USUAL_STD, progress)
    measurements = measure_sections(chosen, subject, settings)
    if command is None:
        names = None if sections is None else [section.name for section in chosen]
        command = _call(text, target.name, subject, settings, std, names, every_head=heads is None)
    if title is None:
        title = f"Position and content in {subject.name()}"
    html = _document(title, subject, measurements, settings, command)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(html.encode("utf-8"))
    return target


def _check_page(path: str | PathLike[str]) -> Path:
    """Check that a page can be written there."""
    target = check_writable("path", path)
    if target.suffix.lower() != ".html":
        raise ArgumentError("path", f"must be a file such as report.html, ending in .html, got {brief(target)}")
    return target


def _check_sections(names: Iterable[SectionName] | None) -> list[Section]:
    """Return the requested sections in the order of the page."""
    chosen = check_subset("sections", tuple(SECTIONS) if names is None else names, tuple(SECTIONS))
    if not chosen:
        raise ArgumentError("sections", f"must be some of {', '.join(SECTIONS)}, got none")
    return [section for section in SECTIONS.values() if section.name in chosen]


def _call(
    text: Tokens,
    file_name: str,
    subject: Subject,
    settings: Settings,
    std: Scale,
    sections: list[SectionName] | None,
    *,
    every_head: bool,
) -> str:
    """Write the call in Python that makes this report."""
    options = {
        "layers": subject.asked_layers,
        "control": settings.copies if settings.copies != 1 else None,
        "std": std if std != "config" else None,
        "heads": None if every_head else [head_label(*pair) for pair in subject.pairs],
        "sections": sections,
        "seed": settings.seed or None,
    }
    arguments = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    if not isinstance(text, list) and subject.mask is not None:
        arguments += ", attention_mask=attention_mask"
    source = "text" if isinstance(text, (str, list)) else "tokens"
    return f"from tl_posdisent import report\n\nreport(model, {source}, {file_name!r}{arguments})"


def _document(
    title: str,
    subject: Subject,
    measurements: Mapping[SectionName, Measurement],
    settings: Settings,
    command: str,
) -> str:
    """Render all parts of the page and their table of contents."""
    measured = {name: measurement for name, measurement in measurements.items() if not measurement.refused}
    contents = [show_section(SECTIONS[name], subject, measurement) for name, measurement in measurements.items()]
    opening = _atlas(subject, measured)
    parts = [
        verdict(verdict_sentences(measurements)),
        opening,
        analysed(subject, [name for name, measurement in measured.items() if measurement.sample]),
        headline(subject, measurements.get(SHARES.name), measurements.get(ADDITIVITY.name)),
        *(content.html for content in contents),
        reproduce(subject, command, settings),
    ]
    titles = {"verdict": "Verdict"} | ({"atlas": "Atlas"} if opening else {})
    titles |= {"analysed": "What was analysed", "headline": "Headline numbers"}
    titles |= {name: SECTIONS[name].heading for name in measurements} | {"reproduce": "How to reproduce"}
    scripts = [script for content in contents for script in content.scripts]
    return page(title, parts, titles, scripts)


def _atlas(subject: Subject, measured: Mapping[SectionName, Measurement]) -> Markup:
    """Render the atlas; empty without the section whose shares colour its map."""
    if ADDITIVITY.name not in measured:
        return Markup()
    tables = {name: measurement.trained for name, measurement in measured.items()}
    additivity = measured[ADDITIVITY.name]
    joined = atlas_table(
        additivity,
        labels=tables.get(LABELS.name),
        ablation=tables.get(ABLATION.name),
        ladder=tables.get(LADDER.name),
        distance=tables.get(DISTANCE.name),
    )
    panels = measure_panels(subject, listed(joined.heads))
    return atlas(subject, joined, baseline=additivity.random is not None, panels=panels)
