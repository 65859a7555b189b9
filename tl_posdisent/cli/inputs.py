"""From ``--model`` and ``--text`` to a model and its text."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any


def read_text(text: Path | None, model: str) -> str:
    """The text of a file, of stdin (``-``), or the demo model's own, with line ends ``\\n``."""
    if text is None:
        if model != "demo":
            raise ValueError("--text is needed: only the demo model brings its own")
        from tl_posdisent.demo.demo_model import demo_text

        return demo_text()
    name = "stdin" if str(text) == "-" else str(text)
    try:
        content = sys.stdin.buffer.read() if name == "stdin" else text.read_bytes()
    except OSError as error:
        raise ValueError(f"--text cannot be read: {error}") from error
    try:
        words = io.StringIO(content.decode("utf-8-sig"), newline=None).read()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at position {error.start}"
        raise ValueError(f"--text must be UTF-8, but {name} is not ({byte}); convert it, e.g. by iconv") from error
    if not words.strip():
        raise ValueError(f"--text must have words, but {name} is empty")
    return words


def name_of(model: str) -> str:
    """The name of a model in titles: its own, or that of its folder or file."""
    folder = Path(model)
    return (folder.resolve().name or model) if folder.exists() else model


def load(model: str, *, backend: str, device: str | None, dtype: str) -> Any:
    """Load a model that has a tokenizer."""
    folder = Path(model)
    if (folder.is_absolute() or model.startswith(".")) and not folder.exists():
        raise ValueError(f"--model {model}: no such directory or file")
    import torch

    from tl_posdisent.demo.demo_model import load_demo_model
    from tl_posdisent.models.loading.load import check_device, load_model

    kind: torch.dtype = getattr(torch, dtype)
    make = load_demo_model if model == "demo" else partial(load_model, model, dtype=kind)
    place = check_device(device)
    try:
        loaded: Any = make(backend=backend, device=place)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        raise ValueError(f"--model {model}: {error} (tl-posdisent models lists the names that are known)") from error
    if model == "demo" and kind != torch.float32:
        loaded = loaded.to(kind)  # its weights are kept in float16, and loaded as float32
    if getattr(loaded, "tokenizer", None) is None:
        raise ValueError(f"--model {model} has no tokenizer, so it cannot read text")
    return loaded
