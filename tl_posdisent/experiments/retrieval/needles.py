"""Needles in filler text, in pairs of texts that differ only in which needle is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.metrics import LogitDifference, logit_difference
from tl_posdisent.experiments.measuring.runs import run_under
from tl_posdisent.experiments.measuring.text_parts import TOKENS, Part, parts_of
from tl_posdisent.hooks.hook_list import Chosen
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.patterns import Pattern, for_each_pattern
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.models.running.texts import read_texts, special_id, text_ids
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_integer, check_seed, shown

_TOKENS = 1024  # of short texts that share a pass without gradients
_QUESTION = " The secret word of {name} is"
_NAMES = "Rome Paris London Berlin Madrid Vienna Oslo Dublin Lisbon Athens Boston Chicago Toronto Sydney Moscow Cairo"
_WORDS = "apple river table horse music stone bread window garden silver mountain paper flower winter doctor bridge"
_SUBJECTS = "farmer teacher soldier sailor child baker judge painter neighbor clerk driver hunter"
_VERBS = "watched cleaned carried found sold painted repaired described moved remembered dropped counted"
_OBJECTS = "boxes letters chairs tools shoes clocks baskets lamps coats bottles wagons maps"
_PLACES = "barn market church station kitchen cellar office school harbor forest square library"


@dataclass(frozen=True, eq=False, repr=False)
class Needles(HasTable):
    """Texts with two needles each and a question about one of them, in pairs that ask for one needle and the other.

    Texts 2n and 2n + 1 have the same two words at the same places, and end in the same question. Only the names in the
    two needles are exchanged, and with them the word that answers the question. So what depends only on place, word or
    distance is equal in both, and cancels in the mean of answer minus decoy over the pair.

    Attributes:
        tokens: ``[text, pos]``, ids of the texts, without padding; the answer follows the last token.
        places: ``[text, 2]``, positions of the word that is the answer and of the other needle's word, the decoy (of
            the first token of each).
        depths: ``[text]``, the place of the answer's needle in the text, from 0 (beginning) to 1; by default its
            position over that of the last token.

    Raises:
        ValueError: tensors of other shapes; places out of range; texts of a pair whose places are not exchanged or
            whose words differ; equal words.
    """

    tokens: Int[Tensor, "text pos"]
    places: Int[Tensor, "text 2"]
    depths: Float64[Tensor, " text"] = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        tokens, places = self.tokens, self.places
        if tokens.ndim != 2 or len(tokens) % 2 or not len(tokens):
            raise ArgumentError("tokens", f"must have shape (2 * pairs, pos), got {tuple(tokens.shape)}")
        if places.shape != (len(tokens), 2) or places.min() < 0 or places.max() >= tokens.shape[1] - 1:
            raise ArgumentError(
                "places",
                f"must be two positions before the last token for each of {len(tokens)} texts, "
                f"got shape {tuple(places.shape)}",
            )
        if self.depths is None:
            object.__setattr__(self, "depths", places[:, 0].double() / (tokens.shape[1] - 1))
        elif self.depths.shape != tokens.shape[:1]:
            raise ArgumentError(
                "depths", f"must be one for each of {len(tokens)} texts, got {tuple(self.depths.shape)}"
            )
        words = self.words
        if not torch.equal(places[::2], places[1::2].flip(1)) or not torch.equal(words[::2], words[1::2].flip(1)):
            raise ArgumentError(
                "places", "must be exchanged between the two texts of a pair, which have the same words"
            )
        if (words[:, 0] == words[:, 1]).any():
            raise ArgumentError("places", "must have two different words in each text")

    @property
    def words(self) -> Int[Tensor, "text 2"]:
        """The ids of the answer and the decoy."""
        return self.tokens.gather(1, self.places.to(self.tokens.device))

    @property
    def metric(self) -> LogitDifference:
        """The metric *answer minus decoy*: positive where the model prefers the right word."""
        return logit_difference(*self.words.T)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per text: ``pair``, ``depth``, ``distance`` of the answer from the end, ``answer``, ``decoy``
        (ids)."""
        n, length = self.tokens.shape
        rows = {
            "pair": torch.arange(n) // 2,
            "depth": self.depths,
            "distance": length - 1 - self.places[:, 0],
            "answer": self.words[:, 0],
            "decoy": self.words[:, 1],
        }
        return pd.DataFrame({name: x.cpu().numpy() for name, x in rows.items()})

    def __repr__(self) -> str:
        n, length = self.tokens.shape
        depths = sorted({round(x, 2) for x in self.depths.tolist()})
        shown = ", ".join(f"{x:g}" for x in depths) if len(depths) <= 8 else f"{depths[0]:g} to {depths[-1]:g}"
        return f"Needles: {n // 2} pairs of texts of {length} tokens, asked for at depths {shown}"


def needle_texts(model: Any, *, length: int = 256, pairs: int = 12, depths: int = 4, seed: int = 0) -> Needles:
    """Make texts with two needles among filler sentences, and a question about one of them (``Needles``).

    A needle is the sentence "The secret word of Rome is apple."; the text ends in "The secret word of Rome is". Names,
    words, and the filler between (sentences of a fixed form) are drawn from lists.

    Args:
        model: a model with a tokenizer, or its ``read_model``.
        length: tokens of each text, with the beginning-of-text token if the model has one.
        pairs: number of pairs of texts.
        depths: number of places of needles, evenly from the beginning of the filler (0) to its end (1). The two needles
            of a text are at two of these; all combinations occur equally often if ``pairs`` is a multiple of
            ``depths * (depths - 1) / 2``.
        seed: seed of names, words, filler and places.

    Raises:
        ValueError: a model without tokenizer, or one that splits the names or words into unequal numbers of tokens; a
            length that does not fit the model's context or both needles.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import needle_texts
        >>> model = load_demo_model()
        >>> needles = needle_texts(model, length=160, pairs=6)
        >>> needles
        Needles: 6 pairs of texts of 160 tokens, asked for at depths 0, 0.33, 0.67, 1
        >>> (needles.words == needles.tokens.gather(1, needles.places)).all().item()
        True
    """
    model = read_model(model).model
    check_integer("length", length, 1, getattr(model.cfg, "n_ctx", None))
    check_integer("pairs", pairs, 1)
    check_integer("depths", depths, 2)
    generator = np.random.default_rng(check_seed(seed))
    if getattr(model, "tokenizer", None) is None:
        raise ArgumentError("model", "must have a tokenizer, got one without: make Needles of token ids")
    maker = _Maker(model, length)
    places = [*combinations(range(depths), 2)]
    orders = [x for _ in range(ceil(pairs / len(places))) for x in generator.permutation(len(places))]
    texts, found, asked = list[list[int]](), list[list[int]](), list[float]()
    for n in orders[:pairs]:
        at = [place / (depths - 1) for place in places[n]]
        names, words = maker.draw(generator)
        filler = maker.filler(generator)
        for of_first, of_second in ((0, 1), (1, 0)):
            text, own = maker.text(filler, at, [(names[of_first], words[0]), (names[of_second], words[1])], names[0])
            texts.append(text)
            found.append([own[of_first], own[of_second]])
            asked.append(at[of_first])
    device = device_of(model)
    return Needles(
        torch.tensor(texts, device=device),
        torch.tensor(found, device=device),
        torch.tensor(asked, dtype=torch.float64, device="cpu"),
    )


def check_needles(model: Any, name: str, needles: Any) -> Needles:
    """Raise unless an argument is needles that fit the model, and move them to its device."""
    if not isinstance(needles, Needles):
        raise ArgumentError(name, f"must be Needles (needle_texts), got {shown(needles)}")
    with naming(tokens=name):
        tokens = read_texts(model, needles.tokens, torch.ones_like(needles.tokens)).tokens
    return Needles(tokens, needles.places, needles.depths)


def parts_of_needles(model: Any, needles: Needles, tokens: int) -> list[Part]:
    """Separate the texts into parts of at most so many tokens, or one text, each with its own metric."""
    with torch.inference_mode(False):  # tensors made in inference mode cannot take part in a gradient
        ids = needles.tokens.clone()
        return parts_of(read_texts(model, ids, torch.ones_like(ids)), needles.metric, tokens=tokens)


def needle_attention(model: Any, needles: Needles, chosen: Chosen) -> Float64[Tensor, "pair head"]:
    """Compute the attention of the last token to the answer minus that to the decoy, mean over each pair.

    One forward pass for each text; ``head`` runs through the chosen heads of all layers.
    """
    texts, heads = list[Tensor](), {spec.layer: some for spec, some in chosen}
    for part in parts_of_needles(model, needles, TOKENS):
        places, found = needles.places[part.places].cpu(), dict[int, Tensor]()

        def note(spec: AttentionSpec, pattern: Pattern, places: Tensor = places, found: Any = found) -> None:
            last = of_heads(pattern[:, :, -1], heads[spec.layer]).double().cpu()
            at = last.gather(2, places[:, None].expand(-1, last.shape[1], -1))
            found[spec.layer] = at[..., 0] - at[..., 1]

        for_each_pattern(model, part.texts.groups[0].tokens, [spec for spec, _ in chosen], note)
        texts.append(torch.cat([found[layer] for layer in heads], 1))
    both = torch.cat(texts)
    return (both[::2] + both[1::2]) / 2


def needle_differences(model: Any, needles: Needles, hooks: Sequence[Hook] = ()) -> Float64[Tensor, " text"]:
    """Compute logit(answer) - logit(decoy) of each text under hooks; one forward pass for each text."""
    found = torch.empty(len(needles.tokens), dtype=torch.float64, device="cpu")
    for part in parts_of_needles(model, needles, _TOKENS):
        logits = run_under(model, part.texts.groups[0].tokens, hooks)
        found[part.places] = part.metric(logits).double().cpu()
    return found


class _Maker:
    """Texts of one length, of parts that a model's tokenizer encodes one by one."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        start = special_id(model, "bos")
        self.start = [] if start is None else [start]
        self.names = self._alike("names", _NAMES, lambda name: self.encode(_QUESTION.format(name=name)))
        self.words = self._alike("words", _WORDS, lambda word: self.encode(f" {word}"))
        self.room = length - len(self.text([], [0, 0], [(self.names[0], self.words[0])] * 2, self.names[0])[0])
        if self.room < 0:
            raise ArgumentError(
                "length", f"must be at least {length - self.room} for two needles and a question, got {length}"
            )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = text_ids(self.model, text, prepend_bos=False)[0].tolist()
        return ids

    def _alike(self, kind: str, options: str, encode: Callable[[str], list[int]]) -> list[str]:
        """Choose those of some words that have the commonest number of tokens; texts of a pair then align."""
        by_length = dict[int, dict[tuple[int, ...], str]]()
        for option in options.split():
            ids = encode(option)
            by_length.setdefault(len(ids), {}).setdefault(tuple(ids) if kind == "names" else (ids[0],), option)
        found = [*max(by_length.values(), key=len).values()]
        if len(found) < 2:
            raise ArgumentError(
                "model", f"must encode at least two {kind} in equally many tokens, got one of each number"
            )
        return found

    def draw(self, generator: np.random.Generator) -> tuple[list[str], list[str]]:
        """Draw two names and two words."""
        names, words = (generator.choice(x, 2, replace=False).tolist() for x in (self.names, self.words))
        return names, words

    def filler(self, generator: np.random.Generator) -> list[list[int]]:
        """Draw sentences that fill the room, the first of them cut at its beginning."""
        sentences, n = list[list[int]](), 0
        while n < self.room:
            subject, verb, thing, place = (
                str(generator.choice(x.split())) for x in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)
            )
            sentences.insert(0, self.encode(f" The {subject} {verb} the {thing} near the {place}."))
            n += len(sentences[0])
        return [sentences[0][n - self.room :], *sentences[1:]] if sentences else []

    def text(
        self, filler: list[list[int]], at: Sequence[float], needles: Sequence[tuple[str, str]], asked: str
    ) -> tuple[list[int], list[int]]:
        """Put two needles between sentences, nearest to these parts of the filler: ids, and places of the two words."""
        ends = np.cumsum([0, *map(len, filler)])
        before = [int(abs(ends - depth * ends[-1]).argmin()) for depth in at]
        ids, places = [*self.start], list[int]()
        for n in range(len(filler) + 1):
            for which, (name, word) in enumerate(needles):
                if before[which] == n:
                    ids += self.encode(_QUESTION.format(name=name))
                    places.append(len(ids))
                    ids += self.encode(f" {word}") + self.encode(".")
            ids += filler[n] if n < len(filler) else []
        return ids + self.encode(_QUESTION.format(name=asked)), places
