"""A text cut into parts of equal length: how many, and how long, wherever one text is given."""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.running.texts import text_ids
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, shown

LENGTH: Final = 128
"""Tokens of a part, unless the text is too short."""
MOST: Final = 12
"""Parts of a long text. The interval of a mean over twelve texts is 2.2 errors wide on each side, over two 12.7."""
_FEWEST: Final = 6  # parts of a text that is too short for as many of LENGTH
_SHORTEST: Final = 64  # tokens, below which fewer parts are better: few keys can be wrong


def cut_text(model: Any, text: str, *, length: int | None = None, texts: int | None = None) -> Int[Tensor, "text pos"]:
    """Cut a text into consecutive parts of equal length, such as ``where_or_what`` and other functions need.

    Each part begins with the model's BOS token, if its texts do; none ends with an EOS token that the tokenizer adds.
    The rest of the text is not read. The command line and ``report`` cut a text in the same way.

    Args:
        model: a model with a tokenizer.
        text: what is cut.
        length: number of tokens of a part, BOS included. Default: 128, or less if the text is too short for six parts,
            but at least 64, or the whole text.
        texts: number of parts. Default: as many as the text has, at most 12.

    Returns:
        Ids on the model's device.

    Raises:
        ValueError: a model without a tokenizer; a text that is empty or has too few tokens; a length that has no room
            for a token behind BOS.

    Example:
        >>> from tl_posdisent import cut_text, demo_text, load_demo_model
        >>> model = load_demo_model()
        >>> cut_text(model, demo_text()).shape, cut_text(model, demo_text(), texts=2).shape
        (torch.Size([12, 128]), torch.Size([2, 128]))
        >>> cut_text(model, demo_text()[:1500]).shape  # about 520 tokens
        torch.Size([6, 88])
    """
    if not isinstance(text, str):
        raise ArgumentError("text", f"must be a string, got {shown(text)}")
    for name, number in {"length": length, "texts": texts}.items():
        if number is not None:
            check_integer(name, number, 1)
    return cut_ids(model, text_ids(model, text)[0], length=length, texts=texts)


def cut_ids(
    model: Any, ids: Int[Tensor, " pos"], *, length: int | None = None, texts: int | None = None
) -> Int[Tensor, "text part"]:
    """Cut the ids of a text as ``cut_text`` does."""
    begin, body = _begin_and_body(model, ids)
    if not len(body):
        raise ArgumentError("text", "must have tokens, got an empty text")
    if length is None:
        of_fewest = len(body) // (texts or _FEWEST) + len(begin)
        length = min(LENGTH, max(of_fewest, _SHORTEST if texts is None else 2), len(begin) + len(body))
        length = min(length, getattr(model.cfg, "n_ctx", None) or length)
    step = length - len(begin)
    if step < 1:
        raise ArgumentError("length", f"must exceed the {len(begin)} tokens with which each text begins, got {length}")
    count = max(1, min(MOST, len(body) // step)) if texts is None else texts
    if count * step > len(body):
        raise ArgumentError(
            "text",
            f"has {len(body)} tokens, too few for {count} × {length}, which need {count * step}: "
            "pass a longer text, or fewer or shorter parts",
        )
    parts = body[: count * step].view(count, step)
    return torch.cat([begin.expand(count, -1), parts], dim=1)


def _begin_and_body(model: Any, ids: Tensor) -> tuple[Int[Tensor, " _begin"], Int[Tensor, " _pos"]]:
    """Return the ids with which each text begins, and those of a text without them and without those at its end."""
    added = text_ids(model, "").flatten().to(ids)  # at both ends
    for n in range(len(added), -1, -1):
        stop = len(ids) - len(added) + n
        if ids[:n].equal(added[:n]) and ids[stop:].equal(added[n:]):
            return added[:n], ids[n:stop]
    return added[:0], ids
