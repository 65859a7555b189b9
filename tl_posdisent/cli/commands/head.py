"""``tl-posdisent head``: whether one head, or each, is looking at where or at what."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Option

from tl_posdisent.cli.inputs import cut_tokens, load_and_read
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

_TEXTS = 6
_SHOWN = 12


def head(
    name: Annotated[str | None, Argument(metavar="[HEAD]", help="A head such as L8H1; all heads without it.")] = None,
    model: Model = "demo",
    text: TextFile = None,
    out: Out = None,
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Length = None,
    texts: Annotated[
        int, Option(min=2, max=MOST, help="Number of consecutive parts of the text, over which errors are computed.")
    ] = _TEXTS,
    control: Control = 1,
    seed: Seed = 0,
    progress: Progress = True,
) -> None:
    """Say whether a head is looking at where or at what, and what that rests on. The first line is the answer.

    What its contribution to the predictions needs, what its scores look like beside those of random weights, and why it
    looks at one key, at the query where it contributes most.

    Without HEAD: what each head needs; a table of the largest.

    Columns:
      part, quantity       needs, looks or why, and what is measured
      value, se            number, and its standard error over texts
      Without HEAD, those of where_or_what:
      where, what, uniform share of the contribution that survives, and its error
      contribution         nats per predicted token
      verdict              where, what, both, either, neither, not used, undecided

    Examples:
      tl-posdisent head
      tl-posdisent head L4H2
      tl-posdisent head L8H1 --model smollm2 --text book.txt --length 128
    """
    with answering():
        check_out(out)
        loaded, words = load_and_read(model, text, backend, device, dtype)
        tokens = cut_tokens(loaded, words, length, texts)
        if name is None:
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
    from tl_posdisent.experiments.where_what.where_or_what import where_or_what
    from tl_posdisent.utils.validation import head_label

    table = where_or_what(model, tokens, seed=seed, progress=progress)
    rows = [
        [
            head_label(row["layer"], row["head"]),
            *(f"{number(row[f'{x}_unclipped'])} ± {number(row[f'{x}_se'])}" for x in ("where", "what", "uniform")),
            number(row["contribution"], 4),
            row["verdict"],
        ]
        for row in table.nlargest(_SHOWN, "contribution").to_dict("records")
    ]
    columns = {"head": False, "where": True, "what": True, "uniform": True, "contribution": True, "verdict": False}
    return table, [table.attrs["statement"], *grid("Heads of the largest contribution", columns, rows)]
