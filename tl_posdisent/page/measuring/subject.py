"""The model, the layers and heads, and the texts that a report reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Tokens, read_texts, text_ids, token_words
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import listed
from tl_posdisent.utils.words import plural

POSITIONS = 1024
"""The longest text that is measured: the size of scores grows with its square."""
STRETCH, SHORTEST = 256, 64
"""Strings are cut into stretches of at most so many tokens, and of at least so many, unless they are shorter."""
STRETCHES = 8
"""Maximum number of stretches of a string that are read."""
TOKENS = 4096
"""Maximum number of tokens of all texts together."""
ENOUGH = 6
"""Texts for an interval of a mean: of its standard error, 2.6 times as wide on each side; over two texts 12.7 times."""
_NAMELESS = ("", "custom", "external")  # TransformerLens's names for models that were not loaded by a name


@dataclass(frozen=True)
class Subject:
    """A model, and the layers, heads and texts that are measured.

    Attributes:
        tokens: ids of the measured texts, padded on the right (where ``real`` is False).
        n_passed: number of tokens passed by the caller.
        words: the first text, one string per position.
        asked_layers, asked_heads: the requested layers and heads, None for all, as arguments of experiments.
        specs, heads: specs and heads of these layers.
        n_parameters: number of parameters that the model holds, copies included.
    """

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    n_passed: int
    words: list[str]
    asked_layers: list[int] | None
    asked_heads: Any
    specs: list[AttentionSpec]
    heads: dict[int, list[int]]
    n_parameters: int

    @property
    def model(self) -> Any:
        return self.reading.model

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.real.sum(1)]

    @property
    def first(self) -> Int[Tensor, "1 pos"]:
        return self.tokens[:1, : self.lengths[0]]

    @property
    def mask(self) -> Bool[Tensor, "batch pos"] | None:
        """The argument ``attention_mask`` of an experiment on all texts: None for texts of one length."""
        return None if bool(self.real.all()) else self.real

    @property
    def layers(self) -> list[int]:
        return [spec.layer for spec in self.specs]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Layer and head of each head that is shown."""
        return [(layer, head) for layer, heads in self.heads.items() for head in heads]

    @property
    def n_run(self) -> float:
        """Number of tokens that a pass of all texts up to the last of the layers runs, in tokens of a whole pass."""
        return sum(self.lengths) * self.depth

    @property
    def depth(self) -> float:
        """Share of the model's layers up to the last of those that are measured."""
        return (self.layers[-1] + 1) / len(self.model.blocks)

    @property
    def attention(self) -> dict[int, str]:
        """``global``, or ``local`` and its window, of each layer; empty for a model without sliding windows."""
        if all(spec.window is None for spec in self.specs):
            return {}
        return {spec.layer: spec.kind if spec.window is None else f"{spec.kind}, {spec.window}" for spec in self.specs}

    def cut(self, positions: int, tokens: int) -> Subject:
        """Keep the beginnings of the first texts: at most ``positions`` of each, and ``tokens`` altogether."""
        rows = max(1, tokens // min(positions, self.tokens.shape[1]))
        return replace(self, tokens=self.tokens[:rows, :positions], real=self.real[:rows, :positions])

    def sizes(self) -> str:
        """Number and lengths of the texts, in words."""
        n, low, high = len(self.tokens), min(self.lengths), max(self.lengths)
        length = plural(high, "token") if low == high else f"{low} to {high} tokens"
        return f"{plural(n, 'text')} of {length}"

    def name(self) -> str:
        """Return the model's name, or its architecture if it has no name."""
        tokenizer = getattr(self.model, "tokenizer", None)
        for name in (getattr(self.model.cfg, "model_name", None), getattr(tokenizer, "name_or_path", None)):
            if isinstance(name, str) and name not in _NAMELESS:
                return (Path(name).resolve().name or name) if Path(name).is_dir() else name
        return self.specs[0].architecture


def read_subject(model: Any, text: Tokens, layers: Any = None, heads: Any = None) -> Subject:
    """Check the arguments of a report and read the model."""
    reading, heads = read_model(model), listed("heads", heads)
    chosen = reading.heads(layers, heads)
    specs = reading.specs(list(chosen))
    model = reading.model
    try:
        texts = read_texts(model, text)
    except ValueError as error:
        raise ArgumentError("text", f"cannot be used: {error}") from error
    context = getattr(model.cfg, "n_ctx", None) or POSITIONS
    order = texts.real.long().argsort(dim=1, descending=True, stable=True)[:, : texts.longest]
    tokens, real = texts.tokens.gather(1, order), texts.real.gather(1, order)  # padding moved to the right
    if isinstance(text, str) and tokens.shape[1] > min(2 * SHORTEST, context):
        tokens = _stretches(model, text, tokens[0], min(STRETCH, context))
        real = torch.ones_like(tokens, dtype=torch.bool)
    asked_layers = list(chosen) if layers is not None or len(chosen) < len(reading.specs()) else None
    n_parameters = sum(weights.numel() for weights in model.parameters())
    n_passed = sum(texts.lengths)
    whole = Subject(reading, tokens, real, n_passed, [], asked_layers, heads, specs, chosen, n_parameters)
    subject = whole.cut(min(POSITIONS, context), TOKENS)
    return replace(subject, words=token_words(model, subject.first[0]))


def _stretches(model: Any, text: str, ids: Int[Tensor, " whole"], longest: int) -> Int[Tensor, "batch pos"]:
    """Split a text into texts of equal length, ``ENOUGH`` to ``STRETCHES`` of them if it is long enough.

    Each begins with the model's BOS token, if any. The rest of a long text is not read.
    """
    bare = text_ids(model, text, prepend_bos=False)[0].to(ids.device)
    begin = len(ids) - len(bare)
    if begin < 0 or not torch.equal(ids[begin:], bare):
        begin = 0
    rest = ids[begin:]
    texts = max(-(-len(rest) // (longest - begin)), min(ENOUGH, len(rest) // SHORTEST))
    return torch.stack(_parts(ids[:begin], rest, len(rest) // texts)[: min(texts, STRETCHES)])


def _parts(begin: Int[Tensor, " some"], rest: Int[Tensor, " whole"], length: int) -> list[Int[Tensor, " part"]]:
    """Cut a text into parts of ``length`` tokens, each after ``begin``; a shorter text stays whole."""
    parts = [rest[first : first + length] for first in range(0, len(rest), length)]
    return [torch.cat([begin, part]) for part in parts if len(part) == length or len(parts) == 1]
