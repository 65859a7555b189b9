"""The model and the text that options name."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tl_posdisent.cli.output import note
from tl_posdisent.cli.process import settle
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import decode_text, found_at

_MOST_BYTES = 100_000_000  # of a text, which is tokenized whole
_LONGEST = 512  # default of --length


def check_name(model: str) -> None:
    """Raise for an unknown model, before anything else is done and without asking a hub."""
    if not model:
        raise ValueError("--model must be demo, a name or a path, got ''")
    if (Path(model).is_absolute() or model.startswith(".")) and not found_at(model):
        raise ValueError(f"--model {model}: no such directory or file")
    if model != "demo":
        from tl_posdisent.models.loading.names import check_model_name

        check_model_name(model)


def name_of(model: str) -> str:
    """Return the name of a model for titles: its own, or that of its folder or file."""
    return (Path(model).resolve().name or model) if found_at(model) else model


def load(model: str, backend: str, device: str | None, dtype: str) -> Any:
    """Load a model that has a tokenizer."""
    import torch

    from tl_posdisent.demo.demo_model import load_demo_model
    from tl_posdisent.models.loading.load import check_device, load_model

    kind: torch.dtype = getattr(torch, dtype)
    make = load_demo_model if model == "demo" else partial(load_model, model, dtype=kind)
    place = check_device(device)
    try:
        loaded: Any = make(backend=backend, device=place)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        if isinstance(error, ArgumentError) and error.argument == "name_or_dir":
            raise  # which names the option and what was given
        names = "" if found_at(model) else " (tl-posdisent models lists known names)"
        raise ValueError(f"--model {model}: {error}{names}") from error
    if model == "demo" and kind != torch.float32:
        loaded = loaded.to(kind)  # its weights are stored in float16, and loaded as float32
    if getattr(loaded, "tokenizer", None) is None:
        raise ValueError(f"--model {model} has no tokenizer, so it cannot read text")
    settle(loaded)
    return loaded


def load_and_read(model: str, text: Path | None, backend: str, device: str | None, dtype: str) -> tuple[Any, str]:
    """Load a model and read a text, in which errors about the text come first, as they need no loading.

    The packaged text is the default; a note says so for models other than the demo model.
    """
    words = read_text(text)
    loaded = load(model, backend, device, dtype)
    if text is None and model != "demo":
        note("text: the demo text; --text names another")
    return loaded, words


def read_text(text: Path | None) -> str:
    """Read a text from a file, stdin (``-``) or, for ``demo`` and None, the package, with line ends ``\\n``."""
    if text is None or str(text) == "demo":
        from tl_posdisent.demo.demo_model import demo_text

        return demo_text()
    name = "stdin" if str(text) == "-" else str(text)
    try:
        if name == "stdin" and sys.stdin is None:
            raise OSError("stdin is closed")
        with contextlib.nullcontext(sys.stdin.buffer) if name == "stdin" else text.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"--text cannot be read: {error}") from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"--text must have at most {_MOST_BYTES // 10**6} MB, but {name} has more")
    try:
        words = decode_text(content)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"--text must be UTF-8, but {name} is not ({byte}); convert it, e.g. by iconv") from error
    if not words.strip():
        raise ValueError(f"--text must have words, but {name} is empty")
    return words


def cut_tokens(model: Any, words: str, length: int | None, texts: int | None, default: int = 2) -> Any:
    """Return token ids ``[texts, length]`` of consecutive parts of a text.

    Without ``length``, parts are as long as the text, the context and 512 allow; without ``texts``, they are
    ``default``, or as many as a shorter text has.
    """
    from tl_posdisent.sweeps.sources import cut

    if length is None:
        whole = cut(model, words, None).shape[1]
        length = min(int(model.cfg.n_ctx), _LONGEST, max(2, whole // (texts or 1)))
    if texts is not None:
        return cut(model, words, length, texts)
    for n in range(default, 1, -1):
        with contextlib.suppress(ValueError):
            return cut(model, words, length, n)
    return cut(model, words, length)


def title_of(model: str, tokens: Any) -> str:
    """Describe a model and token ids for titles."""
    return f"{name_of(model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens"
