"""Perplexity of a language model on a text, and on the same text in shuffled order.

Every document is cut into non-overlapping windows and each window is preceded by the beginning-of-text token,
so that every token of the text is predicted exactly once. The scrambled controls keep the multiset of tokens
(or of words) and destroy only their order: a model that uses position and content together must get worse.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

HELD_OUT = "speeches-heldout.txt.gz"
TRAIN = "speeches-train.txt.gz"


def read_documents(path: str | Path) -> list[str]:
    """The non-empty documents of a gzipped UTF-8 text file in which a form feed separates documents.

    Raises:
        ValueError: if the file does not exist or holds no document.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such text file: {path}")
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    documents = [document.strip() for document in text.split("\f") if document.strip()]
    if not documents:
        raise ValueError(f"{path} holds no document")
    return documents


def text_windows(ids: Sequence[int], *, length: int, bos: int) -> list[Int[Tensor, " _pos"]]:
    """Cut one document's token ids into windows of at most ``length`` tokens, each beginning with ``bos``.

    Raises:
        ValueError: if ``length`` is below 2 (there would be nothing to predict).

    >>> [w.tolist() for w in text_windows([5, 6, 7], length=3, bos=0)]
    [[0, 5, 6], [0, 7]]
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, got {length}")
    step = length - 1
    return [torch.tensor([bos, *ids[i : i + step]]) for i in range(0, len(ids), step)]


def shuffle_window(window: Int[Tensor, " pos"], *, generator: torch.Generator | None = None) -> Int[Tensor, " pos"]:
    """Put the tokens of a window in random order; the first one (beginning of text) stays.

    >>> w = shuffle_window(torch.tensor([0, 3, 3, 9]), generator=torch.Generator().manual_seed(1))
    >>> int(w[0]), sorted(w.tolist())
    (0, [0, 3, 3, 9])
    """
    order = torch.randperm(len(window) - 1, generator=generator) + 1
    return torch.cat([window[:1], window[order.to(window.device)]])


def shuffle_words(text: str, *, generator: torch.Generator | None = None) -> str:
    """Put the white-space separated words of a text in random order, one space between them.

    >>> sorted(shuffle_words("we the people", generator=torch.Generator().manual_seed(0)).split())
    ['people', 'the', 'we']
    """
    words = text.split()
    return " ".join(words[i] for i in torch.randperm(len(words), generator=generator).tolist())


def _logits(output: Any) -> Float[Tensor, "batch pos vocab"]:
    """The logits, returned bare (as TransformerLens does) or in an output object (as transformers does)."""
    return output if isinstance(output, Tensor) else output.logits


@torch.no_grad()
def total_nats(
    model: Callable[[Tensor], Any],
    windows: Sequence[Int[Tensor, " _pos"]],
    *,
    device: torch.device | None = None,
) -> tuple[float, int]:
    """Summed negative log-likelihood in nats, and the number of tokens it is summed over.

    ``model`` maps token ids ``(batch, pos)`` to logits ``(batch, pos, vocab)`` or to an object that has
    ``logits``. The first token of every window is given, not predicted.
    """
    nats, count = 0.0, 0
    for window in windows:
        tokens = window[None] if device is None else window[None].to(device)
        log_probs = _logits(model(tokens))[0, :-1].float().log_softmax(-1)
        nats -= float(log_probs.gather(-1, tokens[0, 1:, None]).double().sum())
        count += len(window) - 1
    if count == 0:
        raise ValueError("there is nothing to predict: every window has fewer than two tokens")
    return nats, count


def perplexity(
    model: Callable[[Tensor], Any],
    windows: Sequence[Int[Tensor, " _pos"]],
    *,
    device: torch.device | None = None,
) -> float:
    """Perplexity per token over windows as `text_windows` makes them (1 = every token predicted with certainty).

    Raises:
        ValueError: if no window has two tokens.

    >>> uniform = lambda tokens: torch.zeros(*tokens.shape, 8)
    >>> round(perplexity(uniform, text_windows([1, 2, 3], length=4, bos=0)), 3)
    8.0
    """
    nats, count = total_nats(model, windows, device=device)
    return math.exp(nats / count)


def order_report(
    model: Callable[[Tensor], Any],
    encode: Callable[[str], list[int]],
    documents: Sequence[str],
    *,
    bos: int,
    length: int = 512,
    seed: int = 0,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Perplexity of the documents as they are and with their order destroyed in two ways.

    Args:
        model: see `total_nats`.
        encode: text to token ids, without any special token.
        documents: texts, each cut into windows of ``length`` tokens of its own.
        bos: id of the beginning-of-text token.
        seed: of the two shuffles.

    Returns:
        ``perplexity`` and ``bits_per_byte`` of the text, ``perplexity_tokens_shuffled`` (tokens shuffled
        within each window), ``perplexity_words_shuffled`` (words shuffled within each document before
        tokenising), and the two ratios ``ratio_tokens_shuffled`` and ``ratio_words_shuffled`` to the
        unshuffled perplexity.
    """
    generator = torch.Generator().manual_seed(seed)
    windows = [w for text in documents for w in text_windows(encode(text), length=length, bos=bos)]
    nats, count = total_nats(model, windows, device=device)
    plain = math.exp(nats / count)
    tokens = perplexity(model, [shuffle_window(w, generator=generator) for w in windows], device=device)
    scrambled = [shuffle_words(text, generator=generator) for text in documents]
    words = perplexity(
        model,
        [w for text in scrambled for w in text_windows(encode(text), length=length, bos=bos)],
        device=device,
    )
    return {
        "tokens": float(count),
        "bytes": float(sum(len(text.encode()) for text in documents)),
        "perplexity": plain,
        "bits_per_byte": nats / math.log(2) / sum(len(text.encode()) for text in documents),
        "perplexity_tokens_shuffled": tokens,
        "perplexity_words_shuffled": words,
        "ratio_tokens_shuffled": tokens / plain,
        "ratio_words_shuffled": words / plain,
    }
