"""The subject of a report: a model, read once, and the part of the texts and heads that each section measures."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posdisent.models.reading.forward import token_words
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts

POSITIONS = 1024
"""The longest text that is measured: scores grow with its square."""
STRETCH = 512
"""Longer strings are cut into stretches of at most so many tokens."""
TOKENS = 4096
"""All texts together."""
_NAMELESS = ("", "custom", "external")  # what TransformerLens calls models that were not loaded by a name


@dataclass(frozen=True)
class Subject:
    """A model, and what of it and of a text is measured.

    Attributes:
        tokens: ids of the texts that are measured, padded on the right, where ``real`` is False.
        given: number of tokens that were given.
        words: of the first text, one string per position.
        asked: the layers asked for; None for all.
        specs, heads: of these layers.
        sample: if the heads are a sample of those asked for, which one; ``sampled`` is how many those were, or 0.
    """

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    given: int
    words: list[str]
    asked: list[int] | None
    specs: list[AttentionSpec]
    heads: dict[int, list[int]]
    sample: str = ""
    sampled: int = 0

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
    def texts(self) -> dict[str, Any]:
        """Arguments ``tokens`` and ``attention_mask`` of an experiment on all texts."""
        return {"tokens": self.tokens} | ({} if bool(self.real.all()) else {"attention_mask": self.real})

    @property
    def layers(self) -> list[int]:
        return [spec.layer for spec in self.specs]

    @property
    def rotary(self) -> list[int]:
        """Numbers of the layers with rotary embeddings."""
        return [spec.layer for spec in self.specs if spec.rotary is not None]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Layer and head of each head that is shown."""
        return [(layer, head) for layer, some in self.heads.items() for head in some]

    def some(self, positions: int, tokens: int) -> Subject:
        """The same with the beginnings of the first texts: at most so many positions, and tokens altogether."""
        rows = max(1, tokens // min(positions, self.tokens.shape[1]))
        return replace(self, tokens=self.tokens[:rows, :positions], real=self.real[:rows, :positions])

    def only(self, pairs: list[tuple[int, int]], sample: str) -> Subject:
        """The same with a sample of its heads."""
        heads = {layer: [head for head in some if (layer, head) in pairs] for layer, some in self.heads.items()}
        heads = {layer: some for layer, some in heads.items() if some}
        specs = [spec for spec in self.specs if spec.layer in heads]
        return replace(self, asked=list(heads), specs=specs, heads=heads, sample=sample, sampled=len(self.pairs))

    def fingerprint(self) -> str:
        """A hash of the ids that are measured; padding counts as -1."""
        ids = torch.where(self.real, self.tokens, -1)
        return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]

    def sizes(self) -> str:
        """Number and lengths of the texts, in words."""
        n, low, high = len(self.tokens), min(self.lengths), max(self.lengths)
        return f"{n} text{'s' if n > 1 else ''} of {low if low == high else f'{low} to {high}'} tokens"

    def excerpt(self) -> str:
        """How the first text begins."""
        nameless = self.words == [str(i) for i in self.first[0].tolist()]  # a model without a tokenizer
        return (" " if nameless else "").join(self.words[:60]) + (" …" if len(self.words) > 60 else "")

    def name(self) -> str:
        """What the model is called, as far as it knows."""
        tokenizer = getattr(self.model, "tokenizer", None)
        for name in (getattr(self.model.cfg, "model_name", None), getattr(tokenizer, "name_or_path", None)):
            if isinstance(name, str) and name not in _NAMELESS:
                return (Path(name).resolve().name or name) if Path(name).is_dir() else name
        return self.specs[0].architecture

    def parameters(self) -> int:
        """How many numbers the model has learned."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def read_subject(model: Any, text: Tokens, attention_mask: Tensor | None, layers: Any, heads: Any) -> Subject:
    """Check the arguments of a report and read the model."""
    reading = read_model(model)
    chosen = reading.heads(layers, heads)
    specs = reading.specs(list(chosen))
    model = reading.model
    try:
        texts = read_texts(model, text, attention_mask)
    except ValueError as error:
        if str(error).startswith("attention_mask"):
            raise
        raise ValueError(f"text cannot be used: {error}") from error
    context = getattr(model.cfg, "n_ctx", None) or POSITIONS
    order = texts.real.long().argsort(dim=1, descending=True, stable=True)[:, : texts.longest]
    tokens, real = texts.tokens.gather(1, order), texts.real.gather(1, order)  # padding behind the texts
    if isinstance(text, str) and tokens.shape[1] > min(STRETCH, context):
        tokens = _stretches(model, text, tokens[0], min(STRETCH, context))
        real = torch.ones_like(tokens, dtype=torch.bool)
    asked = list(chosen) if layers is not None or len(chosen) < len(reading.specs()) else None
    whole = Subject(reading, tokens, real, sum(texts.lengths), [], asked, specs, chosen)
    subject = whole.some(min(POSITIONS, context), TOKENS)
    return replace(subject, words=token_words(model, subject.first[0]))


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


READ = {"perturbation": (512, 1024), "ablation": (128, 512), "ladder": (128, 1024)}
"""Positions of each text, and tokens altogether, of sections that read less than the report."""
PASSES = {"ablation": 0.53, "ladder": 5.0}
"""Forward passes for each head, as measured on 30 layers of 9 heads."""
BUDGET = 3e12
"""Multiplications in all forward passes of such a section: parameters × tokens × passes × heads. A minute or two on a
processor; for models of a few million parameters that is more than all heads need."""
LEAST = 12
"""Heads that are always measured."""


def narrowed(name: str, subject: Subject, seed: int) -> Subject:
    """The texts that a section reads, and the heads that it measures: all, or a random sample within its budget."""
    positions, tokens = READ.get(name, (POSITIONS, TOKENS))
    part = subject.some(min(subject.lengths) if name == "distance" else positions, tokens)
    each = PASSES.get(name, 0) * subject.parameters() * sum(part.lengths)
    n = max(LEAST, int(BUDGET / each)) if each else len(subject.pairs)
    if n >= len(subject.pairs):
        return part
    random = np.random.default_rng(seed)
    layers: dict[int, list[tuple[int, int]]] = {}
    for index in random.permutation(len(subject.pairs)):
        layers.setdefault(subject.pairs[index][0], []).append(subject.pairs[index])
    # One after another from each layer, layers in random order.
    drawn = [pair for some in zip_longest(*layers.values()) for pair in some if pair is not None][:n]
    how = f"Measured on {n} of the {len(subject.pairs)} heads, drawn from all layers with seed {seed}."
    return part.only(drawn, how)
