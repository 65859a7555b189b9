"""One text in parts: each token is read once, in its order, behind the BOS token of the model's texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tl_posdisent import cut_text, demo_text, load_demo_model
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.demo.demo_model import demo_hf_model
from tl_posdisent.models.loading.load import bridge_from_hf
from tl_posdisent.models.running.texts import text_ids

MODELS = {"bridge": load_demo_model(backend="bridge"), "without BOS": load_demo_model(backend="bridge")}
MODELS["without BOS"].cfg.default_prepend_bos = False
WORDS = demo_text()[:9000]
BEGINS = {"begin": True, "both": True, "end": False, "nothing": False}


@pytest.mark.parametrize("kind", MODELS)
@settings(deadline=None, max_examples=40)
@given(n=st.integers(30, 9000), length=st.none() | st.integers(2, 60), texts=st.none() | st.integers(1, 4))
def test_parts_follow_each_other(kind: str, n: int, length: int | None, texts: int | None) -> None:
    model, text = MODELS[kind], WORDS[:n]
    ids, begin = text_ids(model, text)[0], text_ids(model, "").flatten().long()
    body = ids[len(begin) :]
    if length is not None and (texts or 1) * (length - len(begin)) > len(body):
        with pytest.raises(ValueError, match="pass a longer text, or fewer or shorter parts"):
            cut_text(model, text, length=length, texts=texts)
        return
    parts = cut_text(model, text, length=length, texts=texts)
    inside = parts[:, len(begin) :]
    assert (parts[:, : len(begin)] == begin).all()
    assert torch.equal(inside.flatten(), body[: inside.numel()])
    left, whole = len(body) - inside.numel(), inside.shape[1]
    assert texts in (None, len(parts))
    assert length in (None, parts.shape[1])
    if texts is None:  # no part more fits, unless there are twelve
        assert len(parts) == 12 or left < whole
    if length is None and texts is None:
        assert parts.shape[1] == 128 or len(body) < 6 * 128
        assert parts.shape[1] >= 64 or len(parts) == 1
        assert len(parts) >= 6 or parts.shape[1] <= max(64, len(ids))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (["One"], {}, r"text must be a string, got \['One'\]"),
        ("", {}, "text must have tokens, got an empty text"),
        ("One two", {"length": 1}, "length must exceed the 1 tokens with which each text begins, got 1"),
        ("One two", {"length": 9, "texts": 2}, "text has . tokens, too few for 2 × 9, which need 16"),
        ("One two", {"texts": 0}, "texts must be"),
    ],
)
def test_what_cannot_be_cut(text: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_text(MODELS["bridge"], text, **options)


@pytest.mark.parametrize(("name", "advice"), [("demo", r": load it, load_model\('demo'\)$"), (None, "NoneType$")])
def test_what_is_no_model_is_told_before_its_tokenizer(name: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=f"model must be .*, got .*{advice}"):
        cut_text(name, "text")


@pytest.mark.parametrize("adds", BEGINS)
@pytest.mark.parametrize("written", [False, True])
def test_tokens_that_a_tokenizer_adds(adds: str, written: bool) -> None:
    """Its BOS begins each part; its EOS is in none, and no token of the text is taken for either."""
    tokenizer = demo_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"} | {"pad_token": "<s>"})
    begin, end = tokenizer.convert_tokens_to_ids(["<s>", tokenizer.eos_token])
    single = {"begin": "<s> $A", "both": f"<s> $A {tokenizer.eos_token}", "end": f"$A {tokenizer.eos_token}"}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single.get(adds, "$A"), special_tokens=[("<s>", begin), (tokenizer.eos_token, end)]
    )
    words = tokenizer(WORDS[:2000], add_special_tokens=False).input_ids
    model = bridge_from_hf(with_room_for(len(tokenizer)), tokenizer=tokenizer)
    for prepend in (BEGINS[adds], True):
        model.cfg.default_prepend_bos = prepend
        parts = cut_text(model, "<s>" * (written and prepend) + WORDS[:2000], length=30)
        first = int(prepend)
        assert (parts[:, :first] == begin).all()
        assert parts[:, first:].flatten().tolist() == words[: len(parts) * (30 - first)]
        short = cut_text(model, "<s>" * (written and prepend) + WORDS[:9])
        assert short[0, first:].tolist() == tokenizer(WORDS[:9], add_special_tokens=False).input_ids


def with_room_for(n: int) -> Any:
    model = demo_hf_model()
    model.resize_token_embeddings(max(n, model.config.vocab_size), mean_resizing=False)
    return model
