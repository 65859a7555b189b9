"""Needles in filler text, in pairs of texts that differ only in which needle is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.experiments.measuring.metrics import LogitDifference, logit_difference
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.model_parts import device_of
from tl_posdisent.models.running.texts import special_id, text_ids
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_integer, check_seed

_QUESTION = " The secret word of {name} is"
_NAMES = "Rome Paris London Berlin Madrid Vienna Oslo Dublin Lisbon Athens Boston Chicago Toronto Sydney Moscow Cairo"
_WORDS = "apple river table horse music stone bread window garden silver mountain paper flower winter doctor bridge"
_SUBJECTS = "farmer teacher soldier sailor child baker judge painter neighbor clerk driver hunter"
_VERBS = "watched cleaned carried found sold painted repaired described moved remembered dropped counted"
_OBJECTS = "boxes letters chairs tools shoes clocks baskets lamps coats bottles wagons maps"
_PLACES = "barn market church station kitchen cellar office school harbor forest square library"


@dataclass(frozen=True, eq=False, repr=False)
class Needles:
    """Texts with two needles each and a question about one of them, in pairs that ask for one needle and the other.

    Texts 2n and 2n + 1 have the same two words at the same places, and end in the same question. Only the names in the
    two needles are exchanged, and with them the word that answers the question. So what depends only on place, word or
    distance is equal in both, and cancels in the mean of answer minus decoy over the pair.

    Attributes:
        tokens: ``[text, pos]``, ids of the texts, without padding; the answer follows the last token.
        places: ``[text, 2]``, positions of the word that is the answer and of the other needle's word, the decoy (of
            the first token of each).
        depths: ``[text]``, the place of the answer's needle in the text, from 0 (beginning) to 1.

    Raises:
        ValueError: tensors of other shapes; places out of range; texts of a pair whose places are not exchanged or
            whose words differ; equal words.
    """

    tokens: Int[Tensor, "text pos"]
    places: Int[Tensor, "text 2"]
    depths: Float64[Tensor, " text"]

    def __post_init__(self) -> None:
        _check_shapes(self.tokens, self.places)
        if self.depths.shape != self.tokens.shape[:1]:
            raise ArgumentError(
                "depths", f"must be one for each of {len(self.tokens)} texts, got {tuple(self.depths.shape)}"
            )
        words, places = self.words, self.places
        if not torch.equal(places[::2], places[1::2].flip(1)) or not torch.equal(words[::2], words[1::2].flip(1)):
            raise ArgumentError(
                "places", "must be exchanged between the two texts of a pair, which have the same words"
            )
        if (words[:, 0] == words[:, 1]).any():
            raise ArgumentError("places", "must have two different words in each text")

    @classmethod
    def from_places(cls, tokens: Int[Tensor, "text pos"], places: Int[Tensor, "text 2"]) -> Needles:
        """Make needles whose depth is the position of the answer's needle over that of the last token.

        Raises:
            ValueError: as ``Needles``.

        Example:
            >>> import torch
            >>> tokens = torch.tensor([[1, 5, 2, 6, 1], [2, 5, 1, 6, 1]])  # names 1 and 2, words 5 and 6
            >>> Needles.from_places(tokens, torch.tensor([[1, 3], [3, 1]])).depths.tolist()
            [0.25, 0.75]
        """
        _check_shapes(tokens, places)
        return cls(tokens, places, places[:, 0].double() / (tokens.shape[1] - 1))

    @property
    def words(self) -> Int[Tensor, "text 2"]:
        """The ids of the answer and the decoy."""
        return self.tokens.gather(1, self.places.to(self.tokens.device))

    @property
    def metric(self) -> LogitDifference:
        """The metric *answer minus decoy*: positive where the model prefers the right word."""
        return logit_difference(*self.words.T)

    def split(self, n_tokens: int) -> Iterator[Needles]:
        """Yield pairs of at most so many tokens together, or one by one."""
        n_texts = 2 * max(1, n_tokens // (2 * self.tokens.shape[1]))
        for parts in zip(*(x.split(n_texts) for x in (self.tokens, self.places, self.depths)), strict=True):
            yield Needles(*parts)

    def __repr__(self) -> str:
        n, length = self.tokens.shape
        return f"Needles: {n // 2} pairs of texts of {length} tokens"


def _check_shapes(tokens: Tensor, places: Tensor) -> None:
    if tokens.ndim != 2 or len(tokens) % 2 or not len(tokens):
        raise ArgumentError("tokens", f"must have shape (2 * pairs, pos), got {tuple(tokens.shape)}")
    if places.shape != (len(tokens), 2) or places.min() < 0 or places.max() >= tokens.shape[1] - 1:
        raise ArgumentError(
            "places",
            f"must be two positions before the last token for each of {len(tokens)} texts, "
            f"got shape {tuple(places.shape)}",
        )


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
        >>> needles = needle_texts(load_demo_model(), length=160, pairs=6)
        >>> needles
        Needles: 6 pairs of texts of 160 tokens
        >>> (needles.words == needles.tokens.gather(1, needles.places)).all().item()
        True
    """
    model = read_model(model).model
    check_integer("length", length, 1, getattr(model.cfg, "n_ctx", None))
    check_integer("pairs", pairs, 1)
    check_integer("depths", depths, 2)
    generator = np.random.default_rng(check_seed(seed))
    if getattr(model, "tokenizer", None) is None:
        raise ArgumentError(
            "model", "must have a tokenizer, got one without: make Needles of token ids (Needles.from_places)"
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = text_ids(model, text, prepend_bos=False)[0].tolist()
        return ids

    names = _equally_long_options("names", _NAMES, lambda name: tuple(encode(_QUESTION.format(name=name))))
    words = _equally_long_options("words", _WORDS, lambda word: tuple(encode(f" {word}")), by_first=True)
    bos = special_id(model, "bos")
    start = [] if bos is None else [bos]
    bare, _ = _text(encode, start, [], [0, 0], [(names[0], words[0])] * 2, names[0])
    if len(bare) > length:
        raise ArgumentError("length", f"must be at least {len(bare)} for two needles and a question, got {length}")
    places = [*combinations(range(depths), 2)]
    orders = [x for _ in range(ceil(pairs / len(places))) for x in generator.permutation(len(places))]
    tokens, answers, asked = list[list[int]](), list[list[int]](), list[float]()
    for order in orders[:pairs]:
        needle_depths = [place / (depths - 1) for place in places[order]]
        two_names, two_words = (generator.choice(x, 2, replace=False).tolist() for x in (names, words))
        filler = _filler(encode, generator, length - len(bare))
        for first, second in ((0, 1), (1, 0)):  # which of the names is in the first needle, and which in the second
            needles = [(two_names[first], two_words[0]), (two_names[second], two_words[1])]
            text, word_places = _text(encode, start, filler, needle_depths, needles, two_names[0])
            tokens.append(text)
            answers.append([word_places[first], word_places[second]])
            asked.append(needle_depths[first])
    device = device_of(model)
    asked_depths = torch.tensor(asked, dtype=torch.float64, device="cpu")
    return Needles(torch.tensor(tokens, device=device), torch.tensor(answers, device=device), asked_depths)


def _equally_long_options(
    kind: str, options: str, encode: Callable[[str], tuple[int, ...]], *, by_first: bool = False
) -> list[str]:
    """Choose the options that have the commonest number of tokens, so that the texts of a pair align.

    No two of them have the same tokens, or the same first token.
    """
    by_length = dict[int, dict[tuple[int, ...], str]]()
    for option in options.split():
        ids = encode(option)
        by_length.setdefault(len(ids), {}).setdefault(ids[:1] if by_first else ids, option)
    commonest = [*max(by_length.values(), key=len).values()]
    if len(commonest) < 2:
        raise ArgumentError("model", f"must encode at least two {kind} in equally many tokens, got one of each number")
    return commonest


def _filler(encode: Callable[[str], list[int]], generator: np.random.Generator, room: int) -> list[list[int]]:
    """Draw sentences of so many tokens altogether, the first of them cut at its beginning."""
    sentences, n = list[list[int]](), 0
    while n < room:
        subject, verb, thing, place = (str(generator.choice(x.split())) for x in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES))
        sentences.insert(0, encode(f" The {subject} {verb} the {thing} near the {place}."))
        n += len(sentences[0])
    return [sentences[0][n - room :], *sentences[1:]] if sentences else []


def _text(
    encode: Callable[[str], list[int]],
    start: list[int],
    filler: list[list[int]],
    depths: Sequence[float],
    needles: Sequence[tuple[str, str]],
    asked: str,
) -> tuple[list[int], list[int]]:
    """Put two needles between sentences, nearest to these depths of the filler: ids, and places of the two words."""
    ends = np.cumsum([0, *map(len, filler)])
    sentences_before = [int(abs(ends - depth * ends[-1]).argmin()) for depth in depths]
    ids, places = [*start], list[int]()
    for n in range(len(filler) + 1):
        for (name, word), n_before in zip(needles, sentences_before, strict=True):
            if n_before == n:
                ids += encode(_QUESTION.format(name=name))
                places.append(len(ids))
                ids += encode(f" {word}") + encode(".")
        ids += filler[n] if n < len(filler) else []
    return ids + encode(_QUESTION.format(name=asked)), places
