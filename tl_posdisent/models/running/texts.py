"""Texts as input to a model: token ids, special tokens, and batches split into groups that need no padding.

An experiment runs every group of texts of equal length without its padding and combines the results, so that every
result for a text in a padded batch equals that for the text alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_posdisent.models.running.model_parts import check_weights, device_of, n_layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import is_integer, shown
from tl_posdisent.utils.words import plural


@dataclass(frozen=True, eq=False)
class TextGroup:
    """Texts of equal length from a batch, without their padding.

    Attributes:
        rows, starts: for each text, its row in the batch and the column in which it begins.
        tokens: ids ``[text, pos]``.
        counted: True at tokens whose prediction counts, as in ``Texts``.
    """

    rows: Int[Tensor, " text"]
    tokens: Int[Tensor, "text pos"]
    starts: Int[Tensor, " text"]
    counted: Bool[Tensor, "text pos"]

    @property
    def predictions(self) -> Bool[Tensor, "text predicted"]:
        """Which predictions of the next token count; the last token has none."""
        return self.counted[:, :-1]

    def cut(self, x: Tensor) -> Tensor:
        """Select these texts, ``[text, pos, ...]``, from a tensor laid out like the batch, ``[batch, pos, ...]``."""
        rows, starts = self.rows.to(x.device), self.starts.to(x.device)
        return x[rows[:, None], starts[:, None] + torch.arange(self.tokens.shape[1], device=x.device)]


@dataclass(frozen=True, eq=False)
class Texts:
    """A batch of texts and the places of its padding.

    Attributes:
        tokens: ids ``[batch, pos]``, with padding.
        real: True where a token belongs to a text.
        counted: True at tokens whose prediction of the next token counts in losses and divergences.
        groups: the texts by length, in the order of the first text of each length.
    """

    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    counted: Bool[Tensor, "batch pos"]
    groups: list[TextGroup]

    @classmethod
    def of(
        cls, tokens: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"], counted: Bool[Tensor, "batch pos"]
    ) -> Texts:
        """Group the texts of a batch by length, without their padding; raise for a text of which nothing counts."""
        counted = counted & real
        if len(none := (~(counted[:, :-1] & real[:, 1:]).any(1)).nonzero()):
            problem = f"must leave a prediction that counts in each text, got none in text {int(none[0])}"
            raise ArgumentError("ignore", f"{problem}, whose last token predicts nothing")
        lengths, starts = real.sum(1), real.to(torch.uint8).argmax(1)
        groups = []
        for length in dict.fromkeys(lengths.tolist()):
            texts = (lengths == length).nonzero()[:, 0]
            places = (texts[:, None], starts[texts, None] + torch.arange(length, device=tokens.device))
            groups.append(TextGroup(texts, tokens[places], starts[texts], counted[places]))
        return cls(tokens, real, counted, groups)

    def take(self, rows: Sequence[int]) -> Texts:
        """Return some of the texts, in this order."""
        return Texts.of(self.tokens[rows], self.real[rows], self.counted[rows])

    def cut(self, length: int) -> Texts:
        """Return the first tokens of each text, at most so many."""
        return Texts.of(self.tokens, self.real & (self.real.cumsum(1) <= length), self.counted)

    def without_first(self) -> Texts:
        """Return the texts with the prediction of each one's first token not counted."""
        if min(self.lengths) < 3:
            raise ArgumentError(
                "tokens",
                "must be texts of at least three tokens, since the prediction of the first does not count, got two",
            )
        return Texts.of(self.tokens, self.real, self.counted & (self.real.cumsum(1) > 1))

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.real.sum(1)]

    @property
    def longest(self) -> int:
        return max(group.tokens.shape[1] for group in self.groups)

    def unpadded(self) -> list[Int[Tensor, " _pos"]]:
        """Return the tokens of each text, without padding."""
        return [row[real] for row, real in zip(self.tokens, self.real, strict=True)]

    def shuffled(self, seed: int) -> list[Int[Tensor, "text pos"]]:
        """Return the tokens of each group in random order: in each text the first, then the others."""
        return [group.tokens[:, _shuffled_order(group.tokens.shape[1], seed)] for group in self.groups]

    def one_group(self, tool: str) -> Int[Tensor, "batch pos"]:
        """Return the tokens without padding; raise for texts of unequal length, which ``tool`` does not support."""
        if len(self.groups) > 1:
            few = sorted(set(self.lengths))
            listed = ", ".join(map(str, few)) if len(few) <= 8 else f"{few[0]} to {few[-1]}"
            raise ArgumentError(
                "tokens",
                f"must be texts of equal length for {tool}, got texts of {listed} tokens: "
                "cut them to the same length, or call it for each length",
            )
        return self.groups[0].tokens

    def require_two(self, tool: str) -> None:
        """Refuse positions that only one text reaches: the mean over texts would be that text itself."""
        second = sorted(self.lengths)[-2] if len(self.lengths) > 1 else 0
        if second < self.longest:
            raise ArgumentError(
                "tokens",
                f"must be at least two texts at every position for {tool}, got one at positions {second} to "
                f"{self.longest - 1}"
                + (f": cut it to {second} tokens, or give more texts of its length" if second else ""),
            )

    def from_the_start(self, parts: Sequence[Tensor], fill: float | int = 0) -> Tensor:
        """Combine results ``[text, pos, ...]`` of the groups in the order of the batch, without its padding.

        Returns ``[batch, longest, ...]``, with each text starting in column 0 and followed by ``fill``.
        """
        texts = [text for part in parts for text in part]
        order = torch.cat([group.rows for group in self.groups]).argsort().tolist()
        return pad_sequence([texts[at] for at in order], True, fill)

    def lay_out(self, parts: Sequence[Tensor]) -> Tensor:
        """Combine results of the groups in the layout of the batch.

        Results ``[text, pos, ...]`` with three or more axes get NaN at the padding; others, ``[text, ...]``, are
        put into the order of the batch.
        """
        if len(parts) == 1 and (parts[0].ndim < 3 or parts[0].shape[:2] == self.tokens.shape):
            return parts[0]
        whole = None
        for group, part in zip(self.groups, parts, strict=True):
            rows, starts, n = group.rows.to(part.device), group.starts.to(part.device), group.tokens.shape[1]
            by_token = part.ndim > 2 and part.shape[1] == n
            if whole is None:
                shape = [*self.tokens.shape, *part.shape[2:]] if by_token else [len(self.tokens), *part.shape[1:]]
                whole = part.new_full(shape, torch.nan)
            where = (rows[:, None], starts[:, None] + torch.arange(n, device=part.device)) if by_token else rows
            whole[where] = part
        assert whole is not None
        return whole


def _shuffled_order(length: int, seed: int) -> Int[Tensor, " pos"]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(length, generator=generator)
    drawn[0] = -1
    return drawn.argsort()


Tokens = Int[Tensor, "*_batch _pos"] | str | list[str] | list[Tensor] | Mapping[str, Tensor] | Texts
"""Token ids ``[batch, pos]`` or ``[pos]``, a string, a list of either, ids and mask as a tokenizer returns them, or
what was read from these before."""
TokenIds = int | Iterable[int]
"""Ids of the vocabulary, one or several."""


def read_texts(model: Any, tokens: Any, attention_mask: Any = None, ignore: Any = None) -> Texts:
    """Split a batch into groups of texts of equal length, without padding.

    Args:
        tokens: ids ``[batch, pos]`` or ``[pos]``, a string, or a list of either, of any lengths, which is padded on the
            side that the model's tokenizer uses; or what a tokenizer returns, a mapping with ``"input_ids"`` and
            ``"attention_mask"``. ``Texts`` that were already read are returned unchanged.
        attention_mask: for ids, of the same shape: True or 1 at tokens, False or 0 at padding, which must be at the
            beginning or at the end of a text. None for ids without padding, for strings and for lists.
        ignore: token ids, an integer or several, whose predictions do not count.

    Raises:
        ValueError: what ``check_tokens`` refuses; a mask of another shape or with other values, with a gap, with
            padding on both sides of a text, or with fewer than two tokens in a text; a mask beside strings or a list;
            what is not an id; a text without a prediction that counts.
    """
    if isinstance(tokens, Texts):
        texts = tokens
    else:
        texts = _read_texts(model, tokens, attention_mask)
        _warn_of_other_texts(model, texts)
    if ignore is None:
        return texts
    ignored = torch.tensor(_token_ids(model, ignore), dtype=torch.int64, device=texts.tokens.device)
    return Texts.of(texts.tokens, texts.real, texts.counted & ~torch.isin(texts.tokens, ignored))


def _read_texts(model: Any, tokens: Any, attention_mask: Any) -> Texts:
    if isinstance(tokens, Mapping):
        tokens, attention_mask = _ids_and_mask(tokens, attention_mask)
    if isinstance(tokens, (str, list)):
        if attention_mask is not None:
            raise ArgumentError("attention_mask", "must be None for strings and lists of texts, which need no padding")
        rows = _listed_texts(model, [tokens] if isinstance(tokens, str) else tokens)
        side = getattr(getattr(model, "tokenizer", None), "padding_side", "right")
        ids = pad_sequence(rows, True, special_id(model, "pad") or 0, side)
        real = pad_sequence([torch.ones_like(row) for row in rows], True, 0, side).bool()
        return Texts.of(ids, real, real)
    ids = check_tokens(model, tokens, padded=attention_mask is not None)
    if attention_mask is None:
        real = torch.ones_like(ids, dtype=torch.bool)
        return Texts.of(ids, real, real)
    real = _real(attention_mask, ids)
    if where := padding_in(model, ids.masked_fill(~real, -1)):
        warnings.warn(
            f"attention_mask is 1 at {where}, which is measured as a part of the text. If it is padding, give the "
            "texts as a list of strings, or the mask of model.tokenizer(texts, padding=True): TransformerLens's "
            "get_attention_mask looks on the tokenizer's side unless padding_side= names another",
            stacklevel=4,
        )
    return Texts.of(ids, real, real)


def _warn_of_other_texts(model: Any, texts: Texts) -> None:
    """Warn of texts that are not like those of the training: without BOS, or beyond the context."""
    bos = special_id(model, "bos")
    without = sum(int(text[0]) != bos for text in texts.unpadded())
    if without and getattr(model, "tokenizer", None) is not None and int(text_ids(model, "a")[0, 0]) == bos:
        warnings.warn(
            f"{without} of {plural(len(texts.lengths), 'text')} do not begin with the BOS token, as the model's texts "
            "do: heads that attend to it by default attend elsewhere, and numbers differ. cut_text(model, text) "
            "begins each text with it",
            stacklevel=4,
        )
    context = getattr(model.cfg, "n_ctx", None) or texts.longest
    if texts.longest > context:
        warnings.warn(
            f"the longest text has {texts.longest} tokens, and the model a context of {context}: what it does beyond "
            "is measured, too. cut_text(model, text) makes parts; for a longer context load the model with n_ctx=",
            stacklevel=4,
        )


def _token_ids(model: Any, ignore: Any) -> list[int]:
    """Validate ids of the vocabulary, one or several."""
    ids = ignore.tolist() if hasattr(ignore, "tolist") else ignore
    ids = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (str, bytes)) else [ids]
    size = model.cfg.d_vocab
    if not all(is_integer(x) and 0 <= x < size for x in ids):
        raise ArgumentError(
            "ignore",
            f"must be token ids from 0 to {size - 1}, an integer or several, got {shown(ignore)}; for words, use "
            "model.to_single_token",
        )
    return [int(x) for x in ids]


def _listed_texts(model: Any, texts: Sequence[Any]) -> list[Int[Tensor, " _pos"]]:
    """Return the ids of each text of a list of strings and tensors of ids."""
    if not texts:
        raise ArgumentError("tokens", "must hold at least one text, got an empty list")
    rows: list[Tensor] = []
    for n, text in enumerate(texts):
        ids = text_ids(model, text) if isinstance(text, str) else text
        if isinstance(text, str) and ids.shape[1] < 2:
            raise ArgumentError("tokens", f"must be texts of at least two tokens, got {shown(text)} as text {n}")
        rows += check_tokens(model, ids, padded=isinstance(text, str))
    return rows


def _ids_and_mask(tokens: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Return the ids and the mask of a tokenizer's result."""
    if "input_ids" not in tokens:
        named = ", ".join(map(str, tokens)) or "nothing"
        raise ArgumentError(
            "tokens", f"must be a mapping with input_ids, as a tokenizer returns it, got one with {named}"
        )
    if attention_mask is not None:
        raise ArgumentError("attention_mask", "must be None for tokens with a mask of their own, got both")
    return tokens["input_ids"], tokens.get("attention_mask")


def _real(attention_mask: Any, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """Validate an attention mask and return it as booleans on the device of the tokens (see ``read_texts``)."""
    if not isinstance(attention_mask, Tensor):
        raise ArgumentError("attention_mask", f"must be a tensor like tokens, got {type(attention_mask).__name__}")
    mask = attention_mask[None] if attention_mask.ndim == 1 else attention_mask
    if mask.shape != tokens.shape or bool(((mask != 0) & (mask != 1)).any()):
        raise ArgumentError(
            "attention_mask",
            f"must have the shape of tokens, {tuple(tokens.shape)}, True or 1 at tokens, False "
            f"or 0 at padding; got {mask.dtype} of shape {tuple(attention_mask.shape)}",
        )
    real = mask.to(tokens.device).bool()
    few = (real.sum(1) < 2).nonzero()
    if len(few):
        raise ArgumentError(
            "attention_mask", f"must leave at least two tokens of each text, got fewer in text {int(few[0])}"
        )
    begins = real[:, 0].long() + (real[:, 1:] & ~real[:, :-1]).sum(1)
    bad = ((begins > 1) | ~(real[:, 0] | real[:, -1])).nonzero()
    if len(bad):
        raise ArgumentError(
            "attention_mask",
            "must hide a run at the beginning or at the end of a text, got a gap or padding on both "
            f"sides in text {int(bad[0])}",
        )
    return real


# --- token ids, and texts as strings


def are_strings(tokens: Any) -> bool:
    """Say whether tokens are given as a string or a list of strings, not as ids."""
    return isinstance(tokens, str) or (isinstance(tokens, list) and all(isinstance(text, str) for text in tokens))


def check_tokens(model: Any, tokens: Any, *, padded: bool = False) -> Int[Tensor, "batch pos"]:
    """Validate token ids and return them on the model's device; raise ValueError for anything else.

    Unless ``padded`` says that an attention mask marks padding, texts must not begin or end with padding. A padding id
    that is also the id of the beginning (or end) of a text counts as padding if it occurs two or more times in a row.
    """
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        needed, got = "must be text or an integer tensor of shape (batch, pos)", getattr(tokens, "dtype", None)
        if isinstance(tokens, (list, tuple)):
            got = f"{type(tokens).__name__}: torch.tensor makes one of ids"
        elif not isinstance(tokens, Tensor):
            needed, got = f"{needed}, a list of either, or what a tokenizer returns", shown(tokens)
        raise ArgumentError("tokens", f"{needed}, got {got}")
    check_weights(model)
    if tokens.dtype == torch.bool or tokens.ndim not in (1, 2) or tokens.numel() == 0 or tokens.shape[-1] < 2:
        raise ArgumentError(
            "tokens",
            "must have shape (pos,) or (batch, pos) with at least two positions, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    vocabulary = getattr(model.cfg, "d_vocab", None)
    if isinstance(vocabulary, int) and vocabulary > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ArgumentError(
            "tokens", f"must be ids from 0 to {vocabulary - 1}, got {int(tokens.min())} … {int(tokens.max())}"
        )
    ids = (tokens if tokens.ndim == 2 else tokens[None]).to(device_of(model), torch.int64)
    if not padded:
        refuse_padding(model, ids)
    return ids


def text_ids(model: Any, text: str) -> Int[Tensor, "1 _pos"]:
    """Encode a text with the model's tokenizer, without truncation.

    It begins with the BOS token if the model's texts do, once, also if that is written, as in chat templates.
    """
    if getattr(model, "tokenizer", None) is None:
        n_layers(model)  # what is no model is told first
        raise ArgumentError("tokens", "were given as text, but the model has no tokenizer: pass token ids")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair, as a broken JSON file may hold
        raise ArgumentError("tokens", f"were given as text that is not valid UTF-8: {error}") from error
    begin = getattr(model.tokenizer, "bos_token", None)
    once = {"prepend_bos": False} if begin and text.startswith(begin) else {}
    ids: Tensor = model.to_tokens(text, truncate=False, **once)
    return ids


def special_id(model: Any, which: Literal["pad", "bos", "eos"]) -> int | None:
    """Return the id with which the model's tokenizer, or else its Hugging Face config, pads, begins or ends texts."""
    source = getattr(model, "tokenizer", None) or getattr(getattr(model, "original_model", None), "config", None)
    found = getattr(source, f"{which}_token_id", None)
    return found if isinstance(found, int) else None


def refuse_padding(model: Any, ids: Int[Tensor, "batch pos"]) -> None:
    """Refuse texts that begin or end with padding."""
    if where := padding_in(model, ids):
        raise ArgumentError(
            "tokens",
            f"must be without padding, got {where}: give the mask with the ids, "
            '{"input_ids": ids, "attention_mask": mask} (1 at tokens, 0 at padding; all ones if these are tokens of '
            "the text), or the texts as a list of strings",
        )


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


def token_words(model: Any, ids: Int[Tensor, " pos"]) -> list[str]:
    """Return the tokens of a text as strings, or their ids if the model has no tokenizer."""
    if getattr(model, "tokenizer", None) is None:
        return [str(i) for i in ids.tolist()]
    return [str(word) for word in model.to_str_tokens(ids)]


def probe_tokens(model: Any) -> Int[Tensor, "2 pos"]:
    """Draw two random texts of about ten tokens, without special tokens; always the same ones for a model."""
    cfg = model.cfg
    heads = {cfg.n_heads, getattr(cfg, "n_key_value_heads", None)}
    length = next(n for n in (11, 10, 13, 12) if n not in heads)  # so that no two axes can be confused
    length = min(length, getattr(cfg, "n_ctx", None) or length)
    ids = ordinary_ids(model)
    drawn = torch.randint(0, len(ids), (2, length), generator=torch.Generator().manual_seed(0))
    return ids[drawn].to(device_of(model))


def ordinary_ids(model: Any) -> Int[Tensor, " id"]:
    """Return the first 4096 ids of the vocabulary without special tokens: padding would change positions and mask."""
    tokenizer = getattr(model, "tokenizer", None)
    special = {
        *(getattr(tokenizer, "all_special_ids", None) or ()),
        getattr(model.cfg, "pad_id", None),
        special_id(model, "pad"),
    }
    return torch.tensor([t for t in range(min(model.cfg.d_vocab, 4096)) if t not in special])
