"""Needles: what the texts of a pair share, where the words are, and which texts are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tl_posdisent import load_demo_model
from tl_posdisent.experiments import Needles, needle_texts
from tl_posdisent.utils.errors import ArgumentError

PAIRS, LENGTH = 12, 192


@pytest.fixture(scope="module")
def needles() -> Needles:
    return needle_texts(load_demo_model(), length=LENGTH, pairs=PAIRS, depths=4)


def test_texts_of_a_pair_differ_only_in_the_names_of_their_needles(needles: Needles) -> None:
    """So they end in the same question, whose answers are the two words."""
    model = load_demo_model()
    for first, second in zip(needles.tokens[::2], needles.tokens[1::2], strict=True):
        texts = [model.to_string(x) for x in (first, second)]
        question = texts[0].rsplit(" The secret word of ", 1)[1]
        name = question.removesuffix(" is")
        assert texts[1].endswith(question)
        parts = [text.split(" The secret word of ")[1:3] for text in texts]
        named = [[part.split(" is")[0] for part in both] for both in parts]
        assert named[0] == named[1][::-1]
        assert name in named[0]
        other = next(x for x in named[0] if x != name)
        exchanged = texts[0].replace(f"of {name} is", "of * is", 1).replace(f"of {other} is", f"of {name} is")
        assert exchanged.replace("of * is", f"of {other} is") == texts[1]


def test_answers_are_the_words_of_the_needle_that_is_asked_for(needles: Needles) -> None:
    model = load_demo_model()
    for tokens, (answer, decoy) in zip(needles.tokens, needles.places.tolist(), strict=True):
        name = model.to_string(tokens).rsplit(" The secret word of ", 1)[1]
        assert model.to_string(tokens[:answer]).endswith(f" The secret word of {name}")
        before = model.to_string(tokens[:decoy])
        assert before.endswith(" is")
        assert not before.endswith(name)


def test_combinations_of_depths_occur_equally_often(needles: Needles) -> None:
    _, counts = needles.depths.unique(return_counts=True)
    assert counts.tolist() == [2 * PAIRS // 4] * 4
    _, counts = needles.depths.view(-1, 2).sort(1).values.unique(dim=0, return_counts=True)
    assert counts.tolist() == [PAIRS // 6] * 6
    place = needles.places[:, 0].double() / (LENGTH - 1)
    assert (place - needles.depths).abs().max() < 0.25  # a needle and the question take places of their own
    assert needles.tokens.shape == (2 * PAIRS, LENGTH)
    assert (needles.tokens[:, 0] == load_demo_model().tokenizer.bos_token_id).all()


def test_metric_is_answer_minus_decoy(needles: Needles) -> None:
    logits = torch.randn(2 * PAIRS, 3, 1024, generator=torch.Generator().manual_seed(0))
    rows = range(2 * PAIRS)
    expected = logits[rows, -1, needles.words[:, 0]] - logits[rows, -1, needles.words[:, 1]]
    assert torch.equal(needles.metric(logits), expected)


@pytest.mark.parametrize(
    ("n_tokens", "sizes"), [(1, [2] * PAIRS), (5 * LENGTH, [4] * (PAIRS // 2)), (10**6, [2 * PAIRS])]
)
def test_parts_keep_pairs_together(n_tokens: int, sizes: list[int], needles: Needles) -> None:
    parts = [*needles.split(n_tokens)]
    assert [len(part.tokens) for part in parts] == sizes
    for name in ("tokens", "places", "depths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(needles, name))


def test_seeds_draw_other_texts() -> None:
    model = load_demo_model()
    one, same, other = (needle_texts(model, length=160, pairs=6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


def test_refusals(needles: Needles) -> None:
    with pytest.raises(ArgumentError, match=r"length must be at least [0-9]+ for two needles and a question, got 8"):
        needle_texts(model := load_demo_model(), length=8)
    for changed, message in (
        ({"tokens": needles.tokens[:-1]}, "tokens must have shape"),
        ({"places": needles.places[:-1]}, "places must be two positions"),
        ({"places": needles.places * 0 + LENGTH - 1}, "places must be two positions"),
        ({"places": needles.places.flip(0)}, "places must be exchanged"),
        ({"places": needles.places[:, :1].expand(-1, 2)}, "places must"),
        ({"depths": needles.depths[:-1]}, "depths must"),
    ):
        with pytest.raises(ArgumentError, match=message):
            dataclasses.replace(needles, **changed)
    for tokens, places in ((needles.tokens[:-1], needles.places), (needles.tokens, needles.places[:, 0])):
        with pytest.raises(ArgumentError, match=r"tokens must have shape|places must be two positions"):
            Needles.from_places(tokens, places)
    shortest = min(n for n in range(20, 160) if not raises(lambda n=n: needle_texts(model, length=n, pairs=1)))
    assert needle_texts(model, length=shortest, pairs=6).tokens.shape == (12, shortest)


def raises(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except ArgumentError:
        return True
    return False
