"""``tl-posdisent head``: whether one head, or each, is looking at where or at what, and what changed between models."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from tl_posdisent.cli.inputs import load, load_and_read
from tl_posdisent.cli.options import (
    MOST,
    Backend,
    Control,
    Device,
    Dtype,
    Length,
    Model,
    Out,
    Progress,
    Seed,
    TextFile,
)
from tl_posdisent.cli.output import answering, check_out, grid, number, save, show
from tl_posdisent.models.loading.names import check_name
from tl_posdisent.utils.errors import naming
from tl_posdisent.utils.labels import from_label

_SHOWN = 12


def head(
    name: Annotated[str | None, Argument(metavar="[HEAD]", help="A head such as L8H1; all heads without it.")] = None,
    model: Model = "demo",
    after: Annotated[
        str | None,
        Option(metavar="NAME|PATH", help="A model of the same architecture: say what changed from --model to it."),
    ] = None,
    text: TextFile = None,
    out: Out = None,
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Length = None,
    texts: Annotated[
        int | None,
        Option(min=2, max=MOST, help="Number of consecutive parts of the text; default all, at most 12."),
    ] = None,
    control: Control = 1,
    seed: Seed = 0,
    progress: Progress = True,
) -> None:
    """Say whether a head is looking at where or at what, and what that rests on. The first line is the answer.

    What its contribution to the predictions depends on, what its scores look like beside those of random weights, and
    why it looks at one key, at the query where it contributes most.

    Without HEAD: what each head depends on; a table of the largest. With --after: what changed in it, or in all heads.

    Columns:
      part, quantity       needs, looks or why, and what is measured
      value, se            number, and its standard error over texts
      Without HEAD, those of where_or_what:
      contribution         nats per predicted token, and its error
      where_part …         the parts of it that depend on where, on what, on neither
      verdict              where, what, mixed, neither, not used, undecided
      With --after, those of compare_heads:
      …_before, …_after    the same of both models
      …_change, …_q        their difference, and its false discovery rate
      changed              what surely changed

    Examples:
      tl-posdisent head
      tl-posdisent head L4H2
      tl-posdisent head L8H1 --model smollm2 --text book.txt --length 128
      tl-posdisent head --model smollm2 --after checkpoints/tuned --text book.txt
    """
    with answering():
        check_out(out)
        if after is not None:
            check_name("after", after, shell=True)
        with naming(heads="head"):
            from_label(name)
            loaded, words = load_and_read(model, text, backend, device, dtype, heads=name)
        from tl_posdisent.models.running.cut_text import cut_text

        tokens = cut_text(loaded, words, length=length, texts=texts)
        if after is not None:
            with naming(model="after"):
                other = load(after, backend, device, dtype)
            table, lines = _changes(loaded, other, tokens, name, seed, progress=progress)
        elif name is None:
            table, lines = _all_heads(loaded, tokens, seed, progress=progress)
        else:
            table, lines = _one_head(loaded, tokens, name, range(seed, seed + control), progress=progress)
        save(table, out)
    show(lines)


def _one_head(model: Any, tokens: Any, name: str, seeds: range, *, progress: bool) -> tuple[Any, list[str]]:
    from tl_posdisent.experiments.where_what.describe_head import describe_head

    found = describe_head(model, tokens, name, seeds=seeds, seed=seeds.start, progress=progress)
    return found.to_frame(), repr(found).splitlines()


def _all_heads(model: Any, tokens: Any, seed: int, *, progress: bool) -> tuple[Any, list[str]]:
    from tl_posdisent.experiments.where_what.head_table import row_names
    from tl_posdisent.experiments.where_what.parts import PARTS
    from tl_posdisent.experiments.where_what.where_or_what import where_or_what

    table = where_or_what(model, tokens, seed=seed, progress=progress)
    largest = table.nlargest(_SHOWN, "contribution")
    rows = [
        [
            label,
            *(_with_error(row, part) for part in PARTS),
            _with_error(row, "contribution", 4),
            row["verdict"],
        ]
        for label, row in zip(row_names(largest), largest.to_dict("records"), strict=True)
    ]
    columns = {"head": False, "where": True, "what": True, "neither": True, "contribution": True, "verdict": False}
    return table, [table.attrs["statement"], *grid("Heads of the largest contribution", columns, rows)]


def _changes(
    before: Any, after: Any, tokens: Any, name: str | None, seed: int, *, progress: bool
) -> tuple[Any, list[str]]:
    """Say what changed in one head, by runs, or in all."""
    from tl_posdisent.experiments.where_what.compare_heads import compare_heads
    from tl_posdisent.experiments.where_what.head_table import row_names
    from tl_posdisent.experiments.where_what.parts import PARTS

    with naming(heads="head"):
        options: Any = {} if name is None else {"heads": [name], "exact": "all"}
        table = compare_heads(before, after, tokens, seed=seed, progress=progress, **options)
    changed = table if name else table[table["changed"] != ""]
    largest = changed.sort_values("contribution_change", key=abs, ascending=False, kind="stable")[:_SHOWN]
    rows = [
        [
            label,
            *(_with_error(row, f"{part}_change", signed=True) for part in PARTS),
            number(row["contribution_before"], 4),
            _with_error(row, "contribution_change", 4, signed=True),
            row["changed"] or "nothing surely",
        ]
        for label, row in zip(row_names(largest), largest.to_dict("records"), strict=True)
    ]
    names = ("head", "where", "what", "neither", "contribution", "its change", "changed")
    columns = {name: name not in ("head", "changed") for name in names}
    title = "Changes of the parts and of the contribution"
    return table, [table.attrs["statement"], *(grid(title, columns, rows) if rows else [])]


def _with_error(row: Any, column: str, digits: int = 2, *, signed: bool = False) -> str:
    value, error = row[column], row[f"{column}_se"]
    sign = "+" if signed and round(value, digits) > 0 else ""
    return f"{sign}{number(value, digits)} ± {number(error, digits)}"
