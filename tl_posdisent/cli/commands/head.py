"""``tl-posdisent head``: whether one head is looking at where or at what."""

from __future__ import annotations

from typing import Annotated

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
from tl_posdisent.cli.output import answering, check_out, save, show

_TEXTS = 6


def head(
    name: Annotated[str, Argument(metavar="HEAD", help="A head such as L8H1.")],
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
    """Say whether one head is looking at where or at what, and what that rests on. The first line is the answer.

    What its contribution to the predictions needs, what its scores look like beside those of random weights, and why it
    looks at one key, at the query where it contributes most.

    Columns:
      part, quantity       needs, looks or why, and what is measured
      value, se            number, and its standard error over texts

    Examples:
      tl-posdisent head L4H2
      tl-posdisent head L8H1 --model smollm2 --text book.txt --length 128
    """
    with answering():
        check_out(out)
        from tl_posdisent.experiments.needs.describe_head import describe_head

        loaded, words = load_and_read(model, text, backend, device, dtype)
        tokens = cut_tokens(loaded, words, length, texts)
        seeds = range(seed, seed + control)
        found = describe_head(loaded, tokens, name, seeds=seeds, seed=seed, progress=progress)
        save(found.to_frame(), out)
        lines = repr(found).splitlines()
    show(lines)
