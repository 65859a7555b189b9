"""``report``: measure a model on a text, and write the results as one HTML file that loads nothing."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs
from torch import Tensor

from tl_posdisent.models.loading.random_init import USUAL_STD, Scale, initial_scale
from tl_posdisent.models.reading.model_reading import Layers
from tl_posdisent.models.running.texts import Tokens
from tl_posdisent.page.atlas import atlas, atlas_table, listed
from tl_posdisent.page.markup import read, render
from tl_posdisent.page.measurements import SECTIONS, Copies, SectionName, measure
from tl_posdisent.page.panels import measure_panels
from tl_posdisent.page.provenance import analysed, reproduce
from tl_posdisent.page.sections import TITLES, section
from tl_posdisent.page.subject import read_subject
from tl_posdisent.page.verdict import headline, verdict
from tl_posdisent.utils.errors import ArgumentError, brief
from tl_posdisent.utils.files import check_writable, whole_file
from tl_posdisent.utils.validation import check_integer, check_seed, check_subset, head_label, shown
from tl_posdisent.viz.widgets.offline import library, policy


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
    texts to decide something, so a string is cut into six to eight equal stretches, of 64 to 256 tokens. Sections that
    need a forward pass for each head read less, and run only some heads of a large model: the numbers of the others are
    estimated, and marked. Each section states what it read.

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
        seed: seed of random initialisations, perturbations, estimates, and the heads that are run at random.
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
    target = check_writable("path", path)
    if target.suffix.lower() != ".html":
        raise ArgumentError("path", f"must be a file such as report.html, ending in .html, got {brief(target)}")
    subject = read_subject(model, text, attention_mask, layers, heads)
    chosen = check_subset("sections", SECTIONS if sections is None else sections, SECTIONS)
    wanted = [name for name in SECTIONS if name in chosen]
    if not wanted:
        raise ArgumentError("sections", f"must be some of {', '.join(SECTIONS)}, got none")
    check_seed(seed)
    control = check_integer("control", control, 0)
    scale = initial_scale(subject.model, std) if control else USUAL_STD
    for name, value in (("title", title), ("command", command)):
        if value is not None and not isinstance(value, str):
            raise ArgumentError(name, f"must be text, got {shown(value)}")
    found = measure(subject, wanted, copies=Copies(control, scale), seed=seed, progress=progress)
    found = {name: found[name] for name in wanted}
    options = {
        "layers": subject.asked["layers"],
        "control": control if control != 1 else None,
        "std": std if std != "config" else None,
        "heads": None if heads is None else [head_label(*pair) for pair in subject.pairs],
        "sections": None if sections is None else wanted,
        "seed": seed or None,
    }
    given = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    given += "" if isinstance(text, list) or bool(subject.real.all()) else ", attention_mask=attention_mask"
    what = "text" if isinstance(text, (str, list)) else "tokens"
    call = command or f"from tl_posdisent import report\n\nreport(model, {what}, {target.name!r}{given})"
    measured = {name: section(name, subject, one) for name, one in found.items()}
    table = atlas_table(found)
    panels = None if table is None else measure_panels(subject, listed(table.heads))
    opening = Markup() if table is None else atlas(subject, found, table, panels)
    parts = [
        verdict(found),
        opening,
        analysed(subject),
        headline(subject, found),
        *(content for content, _ in measured.values()),
        reproduce(subject, call, seed, Copies(control, scale)),
    ]
    contents = {"verdict": "Verdict"} | ({"atlas": "Atlas"} if opening else {})
    contents |= {"analysed": "What was analysed", "headline": "Headline numbers"}
    contents |= {name: TITLES[name] for name in wanted} | {"reproduce": "How to reproduce"}
    scripts = [script for _, some in measured.values() for script in some]
    name = f"Position and content in {subject.name()}" if title is None else title
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(page(name, parts, contents, scripts).encode("utf-8"))
    return target


def page(title: str, sections: Sequence[Markup], contents: Mapping[str, str], widgets: Sequence[str]) -> str:
    """Assemble the HTML document from the sections, their titles by id (``contents``) and the widgets' scripts.

    Libraries are compressed, and a script unpacks them and runs all others in their order.
    """
    scripts = [get_plotlyjs(), read("page.js")] if any('<div class="plot"' in one for one in sections) else []
    scripts += [read("atlas.js")] if "atlas" in contents else []
    scripts += [library(), *widgets] if widgets else []
    stored = [(len(script) > _LARGE, _packed(script) if len(script) > _LARGE else script) for script in scripts]
    loader = read("load.js") if scripts else ""
    values = {"title": title, "sections": sections, "contents": contents, "scripts": stored, "loader": loader}
    return render("page", style=read("page.css"), policy=policy([*scripts, loader] if scripts else []), **values) + "\n"


_LARGE = 100_000  # characters of a script that is compressed


@cache
def _packed(script: str) -> str:
    """Compress a script, and write it in base64; the same script always gives the same text."""
    return b64encode(gzip.compress(script.encode("utf-8"), 9, mtime=0)).decode("ascii")
