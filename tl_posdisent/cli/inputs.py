"""From ``--model`` and ``--text`` to a model and token ids."""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load_and_read(
    model: str,
    text: Path | None,
    *,
    backend: str,
    device: str | None,
    dtype: str,
    length: int | None,
    texts: int,
) -> tuple[Any, Any]:
    """The model, and token ids ``[texts, length]``.

    Raises:
        ValueError: unusable text, device or model, in words that name the option; what is cheap to refuse first.
    """
    loaded, words = load_with_text(model, text, backend=backend, device=device, dtype=dtype)
    return loaded, cut(loaded, words, length or min(int(loaded.cfg.n_ctx), 512), texts)


def load_with_text(model: str, text: Path | None, *, backend: str, device: str | None, dtype: str) -> tuple[Any, str]:
    """The model, and the text as words."""
    words = read_text(text, model)
    folder = Path(model)
    if (folder.is_absolute() or model.startswith(".")) and not folder.is_dir():
        raise ValueError(f"--model {model}: no such directory")
    return load(model, backend=backend, device=device_of(device), dtype=dtype), words


def read_text(text: Path | None, model: str) -> str:
    """The text of a file, of stdin (``-``), or the demo model's own. Line ends become ``\\n``, a byte order mark goes.

    Raises:
        ValueError: no text, or bytes that are no UTF-8.
    """
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
        raise ValueError(f"--text must be UTF-8, but {name} is not ({byte}); convert it, with iconv say") from error
    if not words.strip():
        raise ValueError(f"--text must have words, but {name} is empty")
    return words


def device_of(name: str | None) -> torch.device | None:
    """A device that tensors can be put on here and now.

    Raises:
        ValueError: a name that torch does not know, or a device that this machine lacks.
    """
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--device must be one that torch can use here, got {name!r}: {reason}") from error
    return device


def name_of(model: str) -> str:
    """What a model is called in titles: its name, or that of its folder, wherever it is seen from.

    >>> name_of("EleutherAI/pythia-70m"), name_of("/")
    ('EleutherAI/pythia-70m', '/')
    """
    folder = Path(model)
    return (folder.resolve().name or model) if folder.is_dir() else model


def load(model: str, *, backend: str, device: torch.device | None, dtype: str) -> Any:
    """A model with a tokenizer.

    Raises:
        ValueError: no such model, one that cannot be converted truly, or one that cannot read text.
    """
    import torch

    from tl_posdisent.demo.demo_model import load_demo_model
    from tl_posdisent.models.loading.load import load_model

    kind: torch.dtype = getattr(torch, dtype)
    make = load_demo_model if model == "demo" else partial(load_model, model, dtype=kind)
    try:
        loaded: Any = make(backend=backend, device=device)  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        raise ValueError(f"--model {model}: {error} (tl-posdisent models lists the names that are known)") from error
    if model == "demo" and kind != torch.float32:
        loaded = loaded.to(kind)  # its weights are kept in float16, and loaded as float32
    if getattr(loaded, "tokenizer", None) is None:
        raise ValueError(f"--model {model} has no tokenizer, so it cannot read text")
    return loaded


def cut(model: Any, words: str, length: int, texts: int) -> Any:
    """Consecutive stretches of a text, ``[texts, length]``, each after the token that begins texts, if there is one.

    Raises:
        ValueError: a text that is too short.
    """
    import torch

    begin = model.to_tokens("")[0] if model.to_tokens("").numel() else None
    ids = model.to_tokens(words, truncate=False)[0]
    start = 0 if begin is None else len(begin)
    body = length - start
    if (len(ids) - start) < texts * body:
        raise ValueError(
            f"--text has {len(ids)} tokens, too few for {texts} stretches of {length}: "
            "give a longer one, or a smaller --length or --texts"
        )
    rows = ids[start : start + texts * body].reshape(texts, body)
    return rows if begin is None else torch.cat([begin.expand(texts, -1).to(rows), rows], 1)
