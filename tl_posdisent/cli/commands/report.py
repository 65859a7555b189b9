"""``tl-posdisent report``: all measurements on one page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from tl_posdisent.cli.inputs import load_and_read, read_heads, read_layers
from tl_posdisent.cli.options import (
    Backend,
    Control,
    Device,
    Dtype,
    Heads,
    Layers,
    Length,
    Model,
    Progress,
    Seed,
    TextFile,
    Texts,
)
from tl_posdisent.cli.output import answering, check_out, show
from tl_posdisent.page.names import ON_REQUEST, SECTION_NAMES
from tl_posdisent.utils.validation import check_choice


def report(
    model: Model = "demo",
    text: TextFile = None,
    out: Annotated[Path, Option(help="File for the page: .html.")] = Path("report.html"),
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Length = None,
    texts: Texts = None,
    layers: Layers = None,
    heads: Heads = None,
    section: Annotated[
        list[str] | None,
        Option(
            help=f"{', '.join(SECTION_NAMES)}; may be repeated; default all but {ON_REQUEST}.",
            autocompletion=lambda: list(SECTION_NAMES),
        ),
    ] = None,
    title: Annotated[str | None, Option(help="Title of the page.")] = None,
    control: Control = 1,
    seed: Seed = 0,
    progress: Progress = True,
) -> None:
    """Write what the heads of a model need in a text to one HTML page that works offline, and print its path.

    The page is that of report() in Python for the same text; with --length or --texts, for these parts of it.

    Each section explains its figures, and the page contains the command that created it.

    Examples:
      tl-posdisent report
      tl-posdisent report --layers 0,4 --title "Layers 0 and 4" --out layers.html
      tl-posdisent report --model EleutherAI/pythia-70m --text book.txt
    """
    with answering():
        check_out(out, (".html",))
        chosen_layers, chosen_heads = read_layers(layers), read_heads(heads)
        sections: Any = _sections(section)
        loaded, words = load_and_read(model, text, backend, device, dtype, chosen_layers, chosen_heads)
        from tl_posdisent.models.running.cut_text import cut_text
        from tl_posdisent.page.build import check_page, check_sections, read_settings, write_report
        from tl_posdisent.page.subject import read_subject

        whole = length is None and texts is None  # the page then says how much of the text was read
        tokens = words if whole else cut_text(loaded, words, length=length, texts=texts)
        subject = read_subject(loaded, tokens, chosen_layers, chosen_heads)
        command = shlex.join(["tl-posdisent", *sys.argv[1:]])  # as typed, to be run again
        settings = read_settings(subject, seed, control, progress=progress)
        path = write_report(check_page(out), subject, check_sections(sections), settings, title, command)
    show([str(path)])


def _sections(given: list[str] | None) -> list[str] | None:
    """Validate sections before a model is loaded, and drop duplicates."""
    for name in given or ():
        check_choice("section", name, SECTION_NAMES)
    return list(dict.fromkeys(given)) if given else None
