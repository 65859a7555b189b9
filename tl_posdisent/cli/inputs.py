"""The model, the text and the numbers that options name."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from tl_posdisent.cli.output import note
from tl_posdisent.cli.threads import limit_threads
from tl_posdisent.models.loading.names import check_name
from tl_posdisent.models.loading.packaged import PACKAGED
from tl_posdisent.utils.errors import ArgumentError, brief, naming
from tl_posdisent.utils.files import decode_text, found_at
from tl_posdisent.utils.labels import from_label
from tl_posdisent.utils.validation import check_heads

_MOST_BYTES = 100_000_000  # of a text, which is tokenized whole
NAMES = ("demo", *PACKAGED)
_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")


def numbers_or_words(text: str | None) -> Any:
    """Split ``"0,3-5"`` into numbers; what is no number stays a word, for the function that takes it.

    >>> numbers_or_words("0,3-5"), numbers_or_words("L4H2,L0H5"), numbers_or_words("global")
    ([0, 3, 4, 5], ['L4H2', 'L0H5'], 'global')
    """
    if text is None:
        return None
    values: list[int | str] = []
    for part in text.split(","):
        ends = _RANGE.fullmatch(part)
        if ends and int(ends[1]) <= int(ends[2]):
            values += range(int(ends[1]), int(ends[2]) + 1)
        else:
            values.append(int(part) if re.fullmatch(r"-?\d{1,18}", part) else part)
    return text if values == [text] else values


def read_layers(text: str | None) -> Any:
    """Split ``--layers`` into numbers, or leave ``global`` or ``local``; other words are refused before loading.

    >>> read_layers("0,2-3"), read_layers("global"), read_layers(None)
    ([0, 2, 3], 'global', None)
    """
    layers = numbers_or_words(text)
    words = [x for x in layers if isinstance(x, str)] if isinstance(layers, list) else [layers]
    if wrong := [x for x in words if x not in (None, "global", "local")]:
        raise ArgumentError("layers", f"must be integers, such as 0,3-5, or global or local, got {brief(wrong[0])}")
    return layers


def read_heads(text: str | None) -> Any:
    """Split ``--heads`` into numbers and labels; what is neither is refused before a model is loaded.

    >>> read_heads("L4H2,L0H5"), read_heads("0,2-3"), read_heads(None)
    (['L4H2', 'L0H5'], [0, 2, 3], None)
    """
    heads = numbers_or_words(text)
    for head in heads if isinstance(heads, list) else [heads]:
        from_label(head)
    return heads


def read_std(text: str) -> Any:
    """Convert ``--std`` to a number above 0, or leave ``config``.

    >>> read_std("0.02"), read_std("config")
    (0.02, 'config')
    """
    if text == "config":
        return text
    number: Any = text
    with contextlib.suppress(ValueError):
        number = float(text)
    if isinstance(number, str) or not 0 < number < math.inf:
        raise ArgumentError("std", f"must be a finite number above 0, or config, got {number!r}")
    return number


def load_and_read(
    model: str, text: Path | None, backend: str, device: str | None, dtype: str, layers: Any = None, heads: Any = None
) -> tuple[Any, str]:
    """Read a text and load a model, after layers and heads were checked: errors about these need no loading.

    The packaged text is the default; a note says so for models other than the demo model.
    """
    check_name("model", model, shell=True)
    check_in_range(model, layers, heads)
    words = read_text(text)
    loaded = load(model, backend, device, dtype)
    if text is None and model != "demo":
        note("text: the demo text; --text names another")
    return loaded, words


def check_in_range(model: str, layers: Any, heads: Any) -> None:
    """Refuse layers and heads that a model does not have, where its size is known without loading it."""
    size = _size(model)
    if size is not None and not (layers is None and heads is None):
        check_heads(None if isinstance(layers, str) else layers, heads, *size)


def _size(model: str) -> tuple[int, int] | None:
    """Return the numbers of layers and heads of a packaged model, or those that the ``config.json`` of a folder has.

    >>> _size("smollm2"), _size("demo"), _size("EleutherAI/pythia-70m")
    ((30, 9), (5, 8), None)
    """
    if model in PACKAGED:
        return PACKAGED[model].size
    folder: Any = resources.files("tl_posdisent.demo") if model == "demo" else Path(model)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        size = config["num_hidden_layers"], config["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError):  # loading says what is wrong with it, if anything is
        return None
    return size if all(type(x) is int for x in size) else None


def load(model: str, backend: str, device: str | None, dtype: str) -> Any:
    """Load a model that has a tokenizer."""
    import torch

    from tl_posdisent.demo.demo_model import load_demo_model
    from tl_posdisent.models.loading.load import load_model

    kind: torch.dtype = getattr(torch, dtype)
    make = load_demo_model if model == "demo" else partial(load_model, model, dtype=kind)
    with naming(name_or_dir="model"):
        loaded: Any = make(backend=backend, device=device)  # type: ignore[arg-type]
    if model == "demo" and kind != torch.float32:
        loaded = loaded.to(kind)  # its weights are stored in float16, and loaded as float32
    if getattr(loaded, "tokenizer", None) is None:
        raise ArgumentError("model", f"must have a tokenizer, so that it can read a text, got {model}, which has none")
    limit_threads(loaded)
    return loaded


def read_text(text: Path | None) -> str:
    """Read a text from a file, stdin (``-``) or, for ``demo`` and None, the package, with line ends ``\\n``."""
    if text is None or str(text) == "demo":
        from tl_posdisent.demo.demo_model import demo_text

        return demo_text()
    name = "stdin" if str(text) == "-" else str(text)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "stdin" else text.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ArgumentError("text", f"cannot be read: {error}") from error
    if len(content) > _MOST_BYTES:
        raise ArgumentError("text", f"must have at most {_MOST_BYTES // 10**6} MB, but {name} has more")
    try:
        words = decode_text(content)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ArgumentError("text", f"must be UTF-8, but {name} is not ({byte}); convert it, e.g. by iconv") from error
    if not words.strip():
        raise ArgumentError("text", f"must have words, but {name} is empty")
    return words


def title_of(model: str, tokens: Any) -> str:
    """Describe a model, by its name or that of its folder, and token ids for titles."""
    name = (Path(model).resolve().name or model) if found_at(model) else model
    return f"{name}, {tokens.shape[0]} × {tokens.shape[1]} tokens"
