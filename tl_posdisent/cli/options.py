"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from tl_posdisent.cli.inputs import NAMES
from tl_posdisent.cli.output import QUIET

MOST = 1_000_000  # of any number of things: a larger one is a mistake, and would fill the memory


def _quiet(progress: bool) -> bool:
    """Turn off notes, and progress bars of other libraries, which read the environment when they are imported later."""
    if not progress:
        os.environ.update({QUIET: "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    return progress


Model = Annotated[
    str,
    Option(
        metavar="demo|NAME|PATH",
        help="A name such as smollm2 or EleutherAI/pythia-70m, or a directory.",
        autocompletion=lambda: list(NAMES),  # shells complete paths themselves
    ),
]
TextFile = Annotated[
    Path | None,
    Option(metavar="demo|FILE|-", allow_dash=True, help="UTF-8 text, - for stdin; default the demo text."),
]
Out = Annotated[Path | None, Option(help="File for the whole table: .csv or .parquet.")]
Backend = Annotated[
    Literal["auto", "hooked", "bridge"],
    Option(help="HookedTransformer, TransformerBridge, or the first that is supported."),
]
Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1 …; default the CPU, or for a NAME TransformerLens's default.")
]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "float64"], Option(help="Dtype of the weights.")]
Length = Annotated[int | None, Option(min=2, max=MOST, help="Tokens per text; default 128, or fewer of a short text.")]
Texts = Annotated[
    int | None, Option(min=1, max=MOST, help="Number of consecutive parts of the text; default all, at most 12.")
]
Layers = Annotated[str | None, Option(help="Such as 0,3,5 or 0-3,7, or global or local; default all.")]
Heads = Annotated[str | None, Option(help="Heads of these layers, such as 0,2-4, or L4H2,L0H5; default all.")]
Control = Annotated[
    int, Option(min=0, max=MOST, help="Number of random initialisations for the baseline, from --seed on.")
]
Std = Annotated[
    str,
    Option(metavar="config|NUMBER", help="Standard deviation of their weights; config: the model's own value."),
]
Seed = Annotated[int, Option(min=0, max=10**18, help="Random seed.")]
Progress = Annotated[bool, Option(callback=_quiet, help="Progress bars and notes on stderr, or only errors.")]
