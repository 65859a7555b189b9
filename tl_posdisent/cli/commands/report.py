"""``tl-posdisent report``: all measurements on one page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from typer import Option

from tl_posdisent.cli.options import ON_TEXT, Given, command, one_of, repeated
from tl_posdisent.cli.output import check_out

SECTIONS = ("additivity", "distance", "shares", "subspaces", "heads", "perturbation", "ablation", "ladder")


@command(f"{ON_TEXT} layers heads control seed progress")
def report(
    given: Given,
    out: Path = Option(Path("report.html"), "--out", help="The page: .html."),
    section: list[str] | None = repeated(SECTIONS),
    title: str | None = Option(None, help="Of the page."),
) -> list[str]:
    """Write all measurements of a model and a text to one HTML page that needs no network, and print its path.

    Each section explains its figures, and the page contains the command that made it.

    Examples:
      tl-posdisent report
      tl-posdisent report --layers 0,4 --title "Layers 0 and 4" --out layers.html
      tl-posdisent report --model EleutherAI/pythia-70m --text book.txt
    """
    check_out(out, (".html",))
    sections: Any = one_of("section", section, SECTIONS) if section else None
    model, tokens, _ = given.read()
    from tl_posdisent.report.build import report as write_report

    path = write_report(
        model,
        tokens,
        out,
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        control=given.control,
        sections=sections,
        title=title,
        seed=given.seed,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),  # as typed, for a shell to take again
        progress=given.progress,
    )
    return [str(path)]
