"""``tl-posdisent run``: any experiment that a sweep can run by name."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from typer import Argument, Option

from tl_posdisent.cli.inputs import check_name, cut_tokens, load_and_read, title_of
from tl_posdisent.cli.options import (
    Backend,
    Device,
    Dtype,
    Length,
    Model,
    Out,
    Progress,
    Settings,
    TextFile,
    Texts,
)
from tl_posdisent.cli.output import answering, check_out, frame, save, show
from tl_posdisent.cli.values import settings as parsed

_ROWS_SHOWN = 50


def run(
    context: typer.Context,
    name: Annotated[
        str | None, Argument(metavar="EXPERIMENT", show_default=False, help="Its name; without it, all are listed.")
    ] = None,
    settings: Settings = None,
    model: Model = "demo",
    text: TextFile = None,
    out: Out = None,
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Length = None,
    texts: Texts = 1,
    progress: Progress = True,
    explain: Annotated[
        bool, Option("--help", help="Show this message, or the arguments and columns of EXPERIMENT, and exit.")
    ] = False,
) -> None:
    """Run an experiment on a model and a text: any public function of a model and tokens that returns a table.

    run alone lists the experiments, and run EXPERIMENT --help explains one. --set takes numbers, names, true, false,
    None, lists such as 0-3,7 or L4H2,L0H5, and JSON; a list of one is [5].

    Examples:
      tl-posdisent run
      tl-posdisent run head_ablation --help
      tl-posdisent run head_ablation --set layers=0,4 --set mode=mean --out heads.csv
      tl-posdisent run head_effects --set 'interventions={"d = 5": ["dummy_distance", {"distance": 5}]}'
    """
    if explain and name is None:
        typer.echo(context.get_help())
        return
    named = {pair.partition("=")[0] for pair in settings or ()}  # errors about these are not about options
    with answering([option for option in locals() if option not in named]):
        if name is None:
            if settings or out:
                raise ValueError("EXPERIMENT must be given with --set or --out: run alone lists the experiments")
            lines = _listed()
        elif explain:
            lines = _explained(name)
        else:
            check_name(model)
            check_out(out)
            given = parsed(settings)
            from tl_posdisent.sweeps.jobs import check_call, run_experiment

            check_call(name, given)
            loaded, words = load_and_read(model, text, backend, device, dtype)
            tokens = cut_tokens(loaded, words, length, texts)
            table = run_experiment(name, loaded, tokens, given, None, progress=progress)
            save(table, out)
            lines = frame(table, f"{name}: {title_of(model, tokens)}", _ROWS_SHOWN)
    show(lines)


def _listed() -> list[str]:
    """List the experiments, each with the first line of its docstring."""
    from tl_posdisent.sweeps.jobs import experiments_by_name

    found = experiments_by_name()
    width = max(map(len, found))
    lines = [f" {name:{width}}  {_docstring(found[name])[0]}" for name in sorted(found)]
    return ["experiments", "", *lines, "", "run EXPERIMENT --help explains one"]


def _explained(name: str) -> list[str]:
    """Return the settable arguments of an experiment, and its docstring."""
    from tl_posdisent.sweeps.jobs import experiment_named, settable

    function, arguments = experiment_named(name), settable(name)
    width = max(map(len, arguments))
    lines = [f" {x:{width}}  {_default(p.default)}" for x, p in arguments.items()]
    return [f"{name}: arguments for --set NAME=VALUE", "", *lines, "", *_docstring(function)]


def _default(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "needed"
    return f"default {getattr(default, '__name__', repr(default))}"


def _docstring(function: object) -> list[str]:
    return (inspect.getdoc(function) or "").splitlines()
