"""``tl-posdisent report``: all measurements on one page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import load_and_read
from tl_posdisent.cli.output import check_out

SECTIONS = ("additivity", "distance", "shares", "subspaces", "heads", "perturbation", "ablation", "ladder")


def report(
    model: o.Model = "demo",
    text: o.Text = None,
    out: Annotated[Path, typer.Option("--out", help="The page: .html.")] = Path("report.html"),
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    length: o.Length = None,
    texts: o.Texts = 1,
    layers: o.Layers = None,
    heads: o.Heads = None,
    section: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(SECTIONS)}; may be repeated; default all.", autocompletion=lambda: [*SECTIONS]),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
    control: o.Control = 1,
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
    """Write all measurements of a model and a text to one HTML page that needs no network, and print its path.

    Each section explains its figures, and the page contains the command that made it.

    Examples:
      tl-posdisent report
      tl-posdisent report --layers 0,4 --title "Layers 0 and 4" --out layers.html
      tl-posdisent report --model EleutherAI/pythia-70m --text book.txt
    """
    with answering():
        check_out(out, (".html",))
        chosen, some = o.whole_numbers("layers", layers), o.whole_numbers("heads", heads)
        sections = o.one_of("section", section, SECTIONS) if section else None
        loaded, tokens = load_and_read(
            model, text, backend=backend, device=device, dtype=dtype, length=length, texts=texts
        )
        from tl_posdisent.report.build import report as write_report

        path = write_report(
            loaded,
            tokens,
            out,
            layers=chosen,
            control=control,
            heads=some,
            sections=sections,  # type: ignore[arg-type]
            title=title,
            seed=seed,
            command=command_line(),
            progress=progress,
        )
    typer.echo(str(path))


def command_line() -> str:
    """What was typed, such that a shell takes it again."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
