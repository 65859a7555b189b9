"""The texts of the findings: parts of equal length, each behind its BOS, from one of three sources.

``demo`` is the text of the package. ``speeches`` (of 2001 to 2021) and ``wikitext`` (articles of WikiText-2's test set,
without their titles) are read from the folder that ``POSDISENT_DATA`` names, by default ``../shared/data`` beside the
project.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import tl_posdisent as tp

Source = Literal["demo", "speeches", "wikitext"]
SOURCES: tuple[Source, ...] = get_args(Source)


def whole(source: Source) -> str:
    """Read a source."""
    if source == "demo":
        return tp.demo_text()
    name = "speeches-heldout.txt.gz" if source == "speeches" else "wikitext2-test.txt.gz"
    return gzip.decompress(data_file(name).read_bytes()).decode()


def data_file(name: str) -> Path:
    """A file of the data folder."""
    folder = os.environ.get("POSDISENT_DATA") or Path(__file__).parents[4] / "shared" / "data"
    return Path(folder) / name


def documents(source: Source) -> list[str]:
    """Read the documents of a source."""
    text = whole(source)
    if source == "wikitext":
        return [body.strip() for body in re.split(r"\n = [^=]+ = \n", f"\n{text}")[1:]]
    return text.split("\f")


def parts(model: Any, source: Source, n: int, length: int, skip: int = 0) -> Tensor:
    """``[n, length]``: parts ``skip`` to ``skip + n`` of a source, all first parts of its documents before the second.

    Where the source has fewer, as many as it has: the demo text has eight of 256 tokens and two of 1024.
    """
    return parts_of(model, documents(source), n, length, skip)


def training_speeches() -> list[str]:
    """Read other speeches than those of the source."""
    return gzip.decompress(data_file("speeches-train.txt.gz").read_bytes()).decode().split("\f")


def parts_of(model: Any, texts: list[str], n: int, length: int, skip: int = 0) -> Tensor:
    """``[n, length]``: parts ``skip`` to ``skip + n`` of documents, all first parts before the second."""
    found: list[tuple[int, int, Tensor]] = []
    for document, text in enumerate(texts):
        ids = model.to_tokens(text, truncate=False)[0]
        rows = ids[1:].unfold(0, length - 1, length - 1) if len(ids) >= length else ids.new_zeros(0, length - 1)
        found += [(part, document, torch.cat([ids[:1], row])) for part, row in enumerate(rows)]
    found.sort(key=lambda each: each[:2])
    return torch.stack([row for *_, row in found[skip : skip + n]])


def demo_texts(n: int, length: int) -> Tensor:
    """``[n, length]``: parts of the demo text, each behind <|endoftext|>."""
    text = tp.demo_tokens(length=1 + n * (length - 1))[0, 1:]
    return torch.cat([torch.zeros(n, 1, dtype=torch.long), text.view(n, length - 1)], 1)


def how_many(model: Any, source: Source, n: int) -> int:
    """Half of n texts (or draws) of the demo text, for ``make findings``, and for a model of more than 100 000 tokens,
    whose passes take twice as long; otherwise n."""
    return n // 2 if source == "demo" or model.cfg.d_vocab > 100_000 else n


def repeated(tokens: Tensor) -> Tensor:
    """``[n, length]``: the first half of each text, read twice behind its BOS."""
    half = (tokens.shape[1] - 1) // 2
    return torch.cat([tokens[:, :1], tokens[:, 1 : 1 + half], tokens[:, 1 : 1 + half]], 1)


def random_tokens(model: Any, n: int, length: int, seed: int = 0) -> Tensor:
    """``[n, length]``: tokens drawn at random, from id 1000 on, behind the BOS."""
    bos = model.to_tokens("")[:, :1].expand(n, 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([bos, torch.randint(1000, model.cfg.d_vocab, (n, length - 1), generator=generator)], 1)


def digest(tokens: Tensor) -> str:
    """The first 12 digits of the SHA-256 of the ids."""
    return hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()[:12]
