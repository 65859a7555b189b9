"""Token ids and texts as input to a model: checks, padding, special tokens, token strings."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading.model_parts import device_of
from tl_posdisent.utils.errors import ArgumentError


def check_tokens(model: Any, tokens: Any, *, padded: bool = False) -> Int[Tensor, "batch pos"]:
    """Validate token ids or text and return ids on the model's device; raise ValueError for anything else.

    Unless ``padded`` says that an attention mask marks padding, texts must not begin or end with padding. A padding id
    that is also the id of the beginning (or end) of a text counts as padding if it occurs two or more times in a row.
    """
    if isinstance(tokens, list) and not tokens:
        raise ArgumentError("tokens", "must hold at least one text, got an empty list")
    if isinstance(tokens, str) or (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        rows, padded = encode(model, [tokens] if isinstance(tokens, str) else tokens), True
        if len({row.shape[1] for row in rows}) != 1:  # padding is not text
            lengths = [row.shape[1] for row in rows]
            raise ArgumentError(
                "tokens", f"were given as texts of unequal length ({lengths} tokens): pass them one by one"
            )
        tokens = torch.cat(rows)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError("tokens", f"must be text or an integer tensor of shape (batch, pos), got {kind}")
    if tokens.is_nested or tokens.layout != torch.strided:
        kind = "a nested tensor" if tokens.is_nested else f"a tensor of layout {tokens.layout}"
        raise ArgumentError("tokens", f"must be a dense tensor (pad texts, and pass attention_mask=), got {kind}")
    if tokens.dtype == torch.bool or tokens.ndim not in (1, 2) or tokens.numel() == 0 or tokens.shape[-1] < 2:
        raise ArgumentError(
            "tokens",
            "must have shape (pos,) or (batch, pos) with at least two positions, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    device = device_of(model)
    if device.type == "meta":
        raise ArgumentError("model", "must have weights, but its parameters are meta tensors: load them first")
    if tokens.is_meta:
        raise ArgumentError("tokens", "must have values, got a meta tensor")
    vocabulary = getattr(model.cfg, "d_vocab", None)
    if isinstance(vocabulary, int) and vocabulary > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ArgumentError(
            "tokens", f"must be ids from 0 to {vocabulary - 1}, got {int(tokens.min())} … {int(tokens.max())}"
        )
    ids = (tokens if tokens.ndim == 2 else tokens[None]).to(device, torch.int64)
    if not padded:
        refuse_padding(model, ids)
    return ids


def special_id(model: Any, which: Literal["pad", "bos", "eos"]) -> int | None:
    """Return the id with which the model's tokenizer, or else its Hugging Face config, pads, begins or ends texts."""
    source = getattr(model, "tokenizer", None) or getattr(getattr(model, "original_model", None), "config", None)
    found = getattr(source, f"{which}_token_id", None)
    return found if isinstance(found, int) else None


_MASK = "pass attention_mask= (1 at tokens, 0 at padding; all ones if these are tokens of the text)"


def refuse_padding(model: Any, ids: Int[Tensor, "batch pos"], name: str = "tokens", advice: str = _MASK) -> None:
    """Refuse texts that begin or end with padding; ``name`` and ``advice`` go into the message."""
    if where := padding_in(model, ids):
        raise ArgumentError(name, f"must be without padding, got {where}: {advice}")


def padding_in(model: Any, ids: Int[Tensor, "batch pos"]) -> str | None:
    """Describe which texts begin or end with padding, for messages, or return None if none does."""
    pad = special_id(model, "pad")
    if pad is None:
        return None
    bos, eos = special_id(model, "bos"), special_id(model, "eos")
    may_begin = pad == (eos if bos is None else bos)
    for side, edge, alone in (("beginning", ids, may_begin), ("end", ids.flip(1), pad == eos)):
        run = (edge == pad).long().cumprod(1).sum(1)  # padding before the first other token
        bad = (run > int(alone)).nonzero()[:, 0].tolist()
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return f"the padding id {pad} at the {side} of text {bad[0]}{more}"
    return None


def token_words(model: Any, ids: Int[Tensor, "pos"]) -> list[str]:
    """Return the tokens of a text as strings, or their ids if the model has no tokenizer."""
    if getattr(model, "tokenizer", None) is None:
        return [str(i) for i in ids.tolist()]
    # One by one: TransformerLens 2 with transformers 5 joins several tokens into one string.
    return [str(model.to_str_tokens(one)[0]) for one in ids.split(1)]


def encode(model: Any, texts: list[str]) -> list[Int[Tensor, "1 _pos"]]:
    """Encode each text with the model's tokenizer, without truncation."""
    if getattr(model, "tokenizer", None) is None:
        raise ArgumentError("tokens", "were given as text, but the model has no tokenizer: pass token ids")
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half a surrogate pair, as a broken JSON file may hold
            raise ArgumentError("tokens", f"were given as text that is not valid UTF-8: {error}") from error
    return [model.to_tokens(text, truncate=False) for text in texts]
