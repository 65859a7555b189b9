"""Input that looks wrong and is right: the documented result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.public_calls import GOOD, SAMPLES, TOKENS, numbers, synthetic

import tl_posdisent as tp
from tl_posdisent import additivity, fit_additive
from tl_posdisent.rope import decompose

pytestmark = pytest.mark.usefixtures("unchecked")

X = numbers(3, 6, 6)


@pytest.fixture
def model(shared_model: Any) -> Any:
    return shared_model("bridge", "llama-gqa")


# --- scores -----------------------------------------------------------------------------------------------------


def test_scores_whose_squares_overflow_float32() -> None:
    torch.testing.assert_close(fit_additive(X * 1e28).r2, fit_additive(X).r2, rtol=1e-5, atol=0)


def test_one_distance_explains_nothing_by_distance() -> None:
    shares = decompose(GOOD["moments"], [3], scale=1.0).variances
    assert (shares[0].abs() < 1e-12).all()
    assert torch.isfinite(shares).all()


# --- texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["one\0two three", "שלום עולם, مرحبا", "a 🐈‍⬛ and 👩‍👩‍👧 é e\u0301"], ids=range(3))
def test_text_of_any_letters(text: str) -> None:
    """The tokenizer gives the text back, and the table is that of those tokens."""
    model = tp.load_demo_model()
    tokens = model.to_tokens(text)
    assert tp.demo.demo_tokenizer().decode(tokens[0, 1:]) == text
    table, same = (additivity(model, x, layers=[1], progress=False) for x in (text, tokens))
    assert table.equals(same)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("half a pair: \ud83d!", "tokens.*UTF-8"),
        ("", "at least two tokens, got .. as text 0"),
        (b"some text", "tokens must be text or .* got b'some text'"),
        ([], "tokens must hold at least one text, got an empty list"),
    ],
    ids=range(4),
)
def test_no_text(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        additivity(tp.load_demo_model(), text, progress=False)


def test_one_text_without_a_batch_axis_and_ids_of_32_bits(model: Any) -> None:
    expected = additivity(model, TOKENS[:1], layers=[0], progress=False)
    for tokens in (TOKENS[0], TOKENS[:1].int()):
        assert additivity(model, tokens, layers=[0], progress=False).equals(expected)
    small = synthetic()
    assert torch.equal(small(SAMPLES[0]), small(SAMPLES[:1]))


def test_two_positions(model: Any) -> None:
    """Three cells and as many free parameters: r is undefined."""
    table = additivity(model, TOKENS[:, :2], layers=[0], progress=False)
    assert table[["r", "r2", "r2_adjusted"]].isna().all(axis=None)


# --- choices, names and pages -----------------------------------------------------------------------------------


def test_a_name_that_climbs_is_only_a_name(tmp_path: Any) -> None:
    """A job is not called by the path of a file."""
    for name in ("../../count", str(tmp_path / "x")):
        with pytest.raises(ValueError, match="jobs must be named as files are"):
            tp.sweeps.sweep({name: tp.demo_text}, tmp_path / "out")
