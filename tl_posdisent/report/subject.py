"""What a report is about: a model and as much of a text as can be afforded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.forward import check_tokens, token_words
from tl_posdisent.models.reading import read_layers
from tl_posdisent.models.spec import AttentionSpec, select

POSITIONS = 1024
"""The longest text that is measured: scores grow with its square."""
STRETCH = 512
"""Longer strings are cut into stretches of at most so many tokens."""
TOKENS = 4096
"""All texts together."""
_EXCERPT = 60
_NAMELESS = ("", "custom", "external")  # what TransformerLens calls models that were not loaded by a name


@dataclass(frozen=True)
class Subject:
    """A model, and what of it and of a text is measured.

    Attributes:
        model: as given.
        tokens: ``[batch, pos]``, ids of the texts that are measured.
        given: tokens that there were.
        words: of the first text, one string per position.
        asked: the layers asked for; None for all.
        specs: what these layers do.
        heads: those shown.
    """

    model: Any
    tokens: Int[Tensor, "batch pos"]
    given: int
    words: list[str]
    asked: list[int] | None
    specs: list[AttentionSpec]
    heads: list[int]

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers."""
        return [spec.layer for spec in self.specs]

    @property
    def rotary(self) -> list[int]:
        """Those that rotate."""
        return [spec.layer for spec in self.specs if spec.rotary is not None]

    def some(self, positions: int, tokens: int) -> Int[Tensor, "fewer shorter"]:
        """The beginnings of the first texts: at most so many positions, and tokens altogether."""
        return _fewer(self.tokens, positions, tokens)

    def fingerprint(self) -> str:
        """Of the ids that are measured, to know them again."""
        return hashlib.sha256(self.tokens.cpu().numpy().tobytes()).hexdigest()[:16]

    def excerpt(self) -> str:
        """How the first text begins."""
        shown = "".join(self.words[:_EXCERPT]) if self.has_words else " ".join(self.words[:_EXCERPT])
        return shown + (" …" if len(self.words) > _EXCERPT else "")

    @property
    def has_words(self) -> bool:
        """Whether tokens have names besides their numbers."""
        return self.words != [str(i) for i in self.tokens[0].tolist()]

    def name(self) -> str:
        """What the model is called, as far as it knows."""
        tokenizer = getattr(self.model, "tokenizer", None)
        for name in (getattr(self.model.cfg, "model_name", None), getattr(tokenizer, "name_or_path", None)):
            if isinstance(name, str) and name not in _NAMELESS:
                return name
        return self.specs[0].architecture

    def parameters(self) -> int:
        """How many numbers the model has learned."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def read_subject(model: Any, text: Any, layers: Iterable[int] | None, heads: Iterable[int] | None) -> Subject:
    """Check the arguments of a report and read the model.

    Raises:
        ValueError: of each of them that is unusable.
    """
    specs = read_layers(model, layers)
    chosen = select("heads", heads, min(spec.n_heads for spec in specs))
    try:
        whole = check_tokens(model, text)
    except ValueError as error:
        raise ValueError(f"text cannot be used: {error}") from error
    context = getattr(model.cfg, "n_ctx", None) or POSITIONS
    if isinstance(text, str) and whole.shape[1] > min(STRETCH, context):
        tokens = _stretches(model, text, whole[0], min(STRETCH, context))
    else:
        tokens = whole
    tokens = _fewer(tokens, min(POSITIONS, context), TOKENS)
    asked = None if layers is None else [spec.layer for spec in specs]
    return Subject(model, tokens, whole.numel(), token_words(model, tokens[0]), asked, specs, chosen)


def _stretches(model: Any, text: str, ids: Int[Tensor, " whole"], longest: int) -> Int[Tensor, "batch pos"]:
    """A long text as texts of equal length, each behind the token that begins texts, if the model has one."""
    bare = model.to_tokens(text, truncate=False, prepend_bos=False)[0].to(ids.device)
    begin = len(ids) - len(bare)
    if begin < 0 or not torch.equal(ids[begin:], bare):
        begin = 0
    first, rest = ids[:begin], ids[begin:]
    texts = -(-len(rest) // (longest - begin))
    rows = rest[: len(rest) // texts * texts].view(texts, -1)
    return torch.cat([first.expand(texts, -1), rows], 1)


def _fewer(tokens: Int[Tensor, "batch pos"], positions: int, total: int) -> Int[Tensor, "fewer shorter"]:
    tokens = tokens[:, :positions]
    return tokens[: max(1, total // tokens.shape[1])]
