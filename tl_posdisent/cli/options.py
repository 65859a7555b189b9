"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from .errors import QUIET

_NUMBERS = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")

BackendName: TypeAlias = Literal["auto", "hooked", "bridge"]
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]


def _models(incomplete: str) -> list[str]:
    """For the shell's completion; directories are the shell's business."""
    return [name for name in ("demo",) if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="demo|NAME|PATH",
        help="The demo model, a name that TransformerLens knows (see 'models'), or a directory.",
        autocompletion=_models,
    ),
]
Backend = Annotated[
    BackendName, typer.Option("--backend", help="HookedTransformer, TransformerBridge, or the first that is supported.")
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text", metavar="FILE|-", allow_dash=True, help="UTF-8 text, - for stdin; the demo model has its own."
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, mps …; default the CPU, for a NAME what TransformerLens takes."),
]
Dtype = Annotated[DtypeName, typer.Option("--dtype", help="Of the model's weights.")]
Layers = Annotated[str | None, typer.Option("--layers", help="Such as 0,3,5 or 0-3,7; default all.")]
Heads = Annotated[str | None, typer.Option("--heads", help="Heads of these layers, such as 0,2-4; default all.")]
Length = Annotated[
    int | None, typer.Option("--length", min=2, help="Tokens per text; default the context, 512 at most.")
]
Texts = Annotated[int, typer.Option("--texts", min=1, help="Number of consecutive parts of the text.")]
Control = Annotated[
    int, typer.Option("--control", min=0, help="Number of random initialisations for the baseline, from --seed on.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Where the whole table goes: .csv, .parquet, .json or .html."),
]


def _quiet(context: typer.Context, progress: bool) -> bool:
    """Turn off notes, and bars of other libraries, which read the environment when they are imported: later."""
    if not progress:
        token = QUIET.set(True)
        context.call_on_close(lambda: QUIET.reset(token))
        before = {name: os.environ.get(name) for name in _BARS}
        os.environ.update(dict.fromkeys(_BARS, "1"))
        context.call_on_close(lambda: _restore(before))
    return progress


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")  # transformers' loading, downloads
Progress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress", callback=_quiet, help="Progress bars and notes on stderr, or errors alone."
    ),
]


def whole_numbers(option: str, text: str | None) -> list[int] | None:
    """``"0,3-5"`` as ``[0, 3, 4, 5]``; None stays None.

    Raises:
        ValueError: anything else, and ranges that run backwards or go beyond 10000.

    >>> whole_numbers("layers", "0,3-5")
    [0, 3, 4, 5]
    >>> whole_numbers("layers", "5-3")
    Traceback (most recent call last):
        ...
    ValueError: --layers must be numbers with commas between, or ranges such as 0-3, got '5-3'
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.replace(" ", "").split(",") if _NUMBERS.fullmatch(text.replace(" ", "")) else []:
        first, _, last = part.partition("-")
        if int(last or first) - int(first) not in range(10_001):
            found.clear()
            break
        found.extend(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError(f"--{option} must be numbers with commas between, or ranges such as 0-3, got {text!r}")
    return found


def numbers(option: str, text: str) -> list[float]:
    """``"0,0.1,1"`` as numbers.

    Raises:
        ValueError: anything else.

    >>> numbers("fractions", "0,0.1,1")
    [0.0, 0.1, 1.0]
    """
    try:
        return [float(x) for x in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{option} must be numbers with commas between, got {text!r}") from error


def one_of(option: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Validate the values of an option that may be repeated, and drop duplicates.

    Raises:
        ValueError: a word that is not known.

    >>> one_of("way", ["plain", "plain"], ["plain", "fancy"])
    ['plain']
    """
    for word in given:
        if word not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, got {word!r}")
    return list(dict.fromkeys(given))
