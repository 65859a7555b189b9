"""Rows about texts: what a tokenizer and a model are given to read."""

from __future__ import annotations

import torch

from tl_posdisent import additivity, capture, demo_tokens, fit_additive, length_generalization
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.experiments import (
    MultipleChoice,
    choice_scores,
    dummy_distance_check,
    perturb,
    positional_subspace,
    questions_from_text,
)
from tl_posdisent.sweeps import Text

from .given import TOKENS, demo, model
from .row import Row, gives, refused

NUL, RTL, EMOJI = "one\0two three", "שלום עולם, مرحبا", "a 🐈‍⬛ and 👩‍👩‍👧 é e\u0301"
LONE = "half a pair: \ud83d!"


def _reads(text: str) -> bool:
    """The tokenizer gives the text back, and the table is that of those tokens."""
    tokens = demo().to_tokens(text)
    table = additivity(demo(), text, layers=[1], progress=False)
    same = additivity(demo(), tokens, layers=[1], progress=False)
    return demo_tokenizer().decode(tokens[0, 1:]) == text and table.equals(same)


def _one_text_is_a_batch() -> bool:
    a, b = (additivity(model(), x, layers=[0], progress=False) for x in (TOKENS[0], TOKENS[:1]))
    return a.equals(b)


def _int32() -> bool:
    a, b = (additivity(model(), x, layers=[0], progress=False) for x in (TOKENS.int(), TOKENS))
    return a.equals(b)


def _repeated_token() -> bool:
    """Keys all alike: finite where there is something to explain, and NaN elsewhere, never an error."""
    tokens = torch.full((1, 10), 7)
    (seen,) = capture(model(), tokens, layers=[0])
    return bool((fit_additive(seen.scores).r2.isnan() | (fit_additive(seen.scores).r2 <= 1)).all())


def _two_positions() -> bool:
    """The shortest text: three cells and as many free parameters, so r says nothing."""
    table = additivity(model(), TOKENS[:, :2], layers=[0], progress=False)
    return bool(table[["r", "r2", "r2_adjusted"]].isna().all(axis=None))


ROWS: list[Row] = [
    gives("additivity", "text with NUL", lambda at: _reads(NUL)),
    gives("additivity", "text from right to left", lambda at: _reads(RTL)),
    gives("additivity", "text of emoji and combining marks", lambda at: _reads(EMOJI)),
    gives("additivity", "a text without a batch axis", lambda at: _one_text_is_a_batch()),
    gives("additivity", "ids of 32 bits", lambda at: _int32()),
    gives("additivity", "two positions", lambda at: _two_positions()),
    gives("capture", "one token again and again", lambda at: _repeated_token()),
    refused(
        "additivity", "half a surrogate pair", lambda at: additivity(demo(), LONE, progress=False), "tokens", "UTF-8"
    ),
    refused("additivity", "an empty text", lambda at: additivity(demo(), "", progress=False), "at least two positions"),
    refused("additivity", "bytes", lambda at: additivity(demo(), b"some text", progress=False), "tokens must", "bytes"),
    refused("additivity", "no text in the list", lambda at: additivity(demo(), [], progress=False), "tokens"),
    refused(
        "positional_subspace",
        "texts of unequal length",
        lambda at: positional_subspace(demo(), ["one", "one two three"], 0),
        "two texts at every position",
        "cut it to 2 tokens",
    ),
    refused(
        "additivity",
        "tokens on no device",
        lambda at: additivity(model(), TOKENS.to("meta"), progress=False),
        "tokens must",
        "meta",
    ),
    refused("demo_tokens", "length 0", lambda at: demo_tokens(length=0), "length must be between 1"),
    refused("demo_tokens", "longer than the text", lambda at: demo_tokens(length=10**6), "length must be between 1"),
    refused("demo_tokens", "half a length", lambda at: demo_tokens(length=2.5), "length must be"),
    refused("demo_tokens", "length True", lambda at: demo_tokens(length=True), "length must be"),
    refused("Text", "a file that does not exist", lambda at: Text.of(at / "none.txt"), "text must be", "none.txt"),
    refused("Text", "a folder", lambda at: Text.of(at), "text must be"),
    refused("Text", "a file that is no text", lambda at: Text.of(_bytes(at)), "text must be", "UTF-8"),
    refused("Text", "stretches before the first", lambda at: Text.of("demo", length=8, first=-1), "first must be"),
    refused("Text", "stride 0", lambda at: Text.of("demo", length=8, count=2, stride=0), "stride must be"),
    refused("Text", "ids of unequal length", lambda at: Text.of([[1, 2], [3]]), "text must be"),
    gives("Text", "a name that climbs is only a name", lambda at: "/" not in Text.of("../../x").name),
    refused(
        "dummy_distance_check",
        "distance NaN",
        lambda at: dummy_distance_check(model(), TOKENS, distances=[float("nan")], progress=False),
        "distances must",
    ),
    refused(
        "length_generalization",
        "buckets that fall",
        lambda at: length_generalization(model(), TOKENS, [0, 12, 4], progress=False),
        "lengths must",
    ),
    refused(
        "length_generalization",
        "buckets beyond the text",
        lambda at: length_generalization(model(), TOKENS, [0, 400], progress=False),
        "lengths must",
    ),
    refused("perturb", "fraction NaN", lambda at: perturb(model(), TOKENS, "order", float("nan")), "fraction must be"),
    refused("perturb", "more than all", lambda at: perturb(model(), TOKENS, "order", 1.5), "fraction must be"),
    refused("perturb", "an unknown kind", lambda at: perturb(model(), TOKENS, "words", 0.5), "kind must be", "'words'"),
    refused("MultipleChoice", "no choice", lambda at: MultipleChoice(TOKENS[0], [], 0), "choices must"),
    refused("MultipleChoice", "an answer that is not there", lambda at: MultipleChoice("a", ["b", "c"], 2), "answer"),
    refused("MultipleChoice", "a negative answer", lambda at: MultipleChoice("a", ["b", "c"], -1), "answer"),
    refused("choice_scores", "no question", lambda at: choice_scores(demo(), "a or b?"), "question must be"),
    refused(
        "choice_scores",
        "an empty choice",
        lambda at: choice_scores(demo(), MultipleChoice("a", ["", " b"], 0)),
        "choice",
    ),
    refused("questions_from_text", "one sentence", lambda at: questions_from_text("It rained."), "text must be long"),
]


def _bytes(at):
    path = at / "not.txt"
    path.write_bytes(b"\xff\xfe\x00\xd8")
    return path
