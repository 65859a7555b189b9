"""The model, the heads and the texts that a report reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.cut_text import cut_ids
from tl_posdisent.models.running.texts import Tokens, read_texts, text_ids, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import listed
from tl_posdisent.utils.words import plural

POSITIONS = 1024
"""The longest text that is measured: the size of scores grows with its square."""
TOKENS = 4096
"""Maximum number of tokens of all texts together."""
_NAMELESS = ("", "custom", "external")  # TransformerLens's names for models that were not loaded by a name


@dataclass(frozen=True)
class Subject:
    """A model, and the heads and texts that are measured.

    Attributes:
        tokens: ids of the texts, which are of one length.
        n_given: number of tokens passed by the caller.
        words: the first text, one string per position.
        heads: the heads of each layer that is measured.
    """

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]
    n_given: int
    words: list[str]
    heads: dict[int, list[int]]

    @property
    def model(self) -> Any:
        return self.reading.model

    @property
    def specs(self) -> list[AttentionSpec]:
        return self.reading.specs(list(self.heads))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Layer and head of each head that is measured."""
        return [(layer, head) for layer, heads in self.heads.items() for head in heads]

    @property
    def attention(self) -> dict[int, str]:
        """``global``, or ``local`` and its window, of each layer; empty for a model without sliding windows."""
        if all(spec.window is None for spec in self.specs):
            return {}
        return {spec.layer: spec.kind if spec.window is None else f"{spec.kind}, {spec.window}" for spec in self.specs}

    def cut(self, positions: int, tokens: int) -> Subject:
        """Keep the beginnings of the first texts: at most ``positions`` of each, and ``tokens`` altogether."""
        rows = max(1, tokens // min(positions, self.tokens.shape[1]))
        return replace(self, tokens=self.tokens[:rows, :positions])

    def sizes(self) -> str:
        """Number and length of the texts, in words."""
        return f"{plural(len(self.tokens), 'text')} of {plural(self.tokens.shape[1], 'token')}"

    def name(self) -> str:
        """Return the model's name, or its architecture if it has no name."""
        tokenizer = getattr(self.model, "tokenizer", None)
        for name in (getattr(self.model.cfg, "model_name", None), getattr(tokenizer, "name_or_path", None)):
            if isinstance(name, str) and name not in _NAMELESS:
                return (Path(name).resolve().name or name) if Path(name).is_dir() else name
        return self.specs[0].architecture


def read_subject(model: Any, text: Tokens, layers: Any = None, heads: Any = None) -> Subject:
    """Check the arguments of a report and read the model."""
    reading = read_model(model)
    chosen = reading.heads(layers, listed("heads", heads))
    try:
        whole = text_ids(reading.model, text)[0] if isinstance(text, str) else None
        texts = read_texts(reading.model, text if whole is None else cut_ids(reading.model, whole))
    except ValueError as error:
        raise ArgumentError("text", f"cannot be used: {error}") from error
    if len(texts.groups) > 1:
        raise ArgumentError(
            "text",
            f"must be texts of one length, got {min(texts.lengths)} to {texts.longest} tokens: cut them, or pass one "
            "string, which is cut into equal parts",
        )
    (group,) = texts.groups
    longest = min(POSITIONS, getattr(reading.model.cfg, "n_ctx", None) or POSITIONS)
    n_tokens = sum(texts.lengths) if whole is None else len(whole)
    subject = Subject(reading, group.tokens, n_tokens, [], chosen).cut(longest, TOKENS)
    return replace(subject, words=token_words(reading.model, subject.tokens[0]))
