"""Laws of the demo model: it is the trained one in every backend, and it uses the order of a text."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from support import zoo
from support.tolerance import of_float32
from train_demo_model import HELD_OUT, order_report, perplexity, read_documents, text_windows

from tl_posdisent.demo import demo_hf_model, demo_text, demo_tokenizer, demo_tokens, load_demo_model
from tl_posdisent.models.loading.convert import hf_logits

DATA = Path(os.environ.get("POSDISENT_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / HELD_OUT).is_file(), reason=f"POSDISENT_DATA has no {HELD_OUT}")


@pytest.mark.parametrize("backend", zoo.KINDS)
@pytest.mark.parametrize("trained", [True, False])
def test_backends_compute_what_hugging_face_computes(backend: Any, trained: bool) -> None:
    tokens = demo_tokens(length=512)
    model = demo_hf_model(trained=trained, seed=3)
    with torch.no_grad():
        expected = hf_logits(model, tokens)
        atol = of_float32(expected, hf_logits(model.double(), tokens))
        got = load_demo_model(backend=backend, trained=trained, seed=3)(tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_text_goes_in_through_the_model(backend: Any) -> None:
    """Both backends tokenise offline and put the beginning-of-text token first, once."""
    model = load_demo_model(backend=backend)
    text = demo_text()[:300]
    tokens = model.to_tokens(text)
    assert tokens[0].tolist() == demo_tokenizer().encode(text)
    assert tokens[0].tolist().count(0) == 1
    assert int(tokens[0, 0]) == 0
    assert torch.equal(model.to_tokens(text, prepend_bos=False), tokens[:, 1:])
    pieces = [model.to_str_tokens(one)[0] for one in tokens[0].split(1)]
    assert pieces[0] == "<|endoftext|>"
    assert "".join(pieces[1:]) == text
    assert model.to_string(tokens[0, 1:]) == text


@pytest.mark.parametrize("backend", ["auto", *zoo.KINDS])
@pytest.mark.parametrize("trained", [True, False])
def test_global_randomness_is_untouched(backend: Any, trained: bool) -> None:
    before = torch.get_rng_state()
    load_demo_model(backend=backend, trained=trained, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_is_read_from_its_path(kind: Any, tmp_path: Path) -> None:
    """With the configuration and the tokenizer of its folder, if they are there."""
    for name in ("config.json", "tokenizer.json", "weights.safetensors"):
        content = (resources.files("tl_posdisent.demo") / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(b'"rope_theta": 10000', b'"rope_theta": 20000'))
    model = load_demo_model(backend="bridge", checkpoint=kind(tmp_path / "weights.safetensors"))
    assert model.original_model.config.rope_parameters["rope_theta"] == 20000
    assert demo_tokenizer(folder=kind(tmp_path)).get_vocab() == demo_tokenizer().get_vocab()
    with pytest.raises(FileNotFoundError):
        demo_hf_model(checkpoint=kind(tmp_path / "none"))
    with pytest.raises(
        ValueError, match=r"folder must be the folder of a training run, got '.*none', which is no fold"
    ):
        demo_tokenizer(folder=kind(tmp_path / "none"))


def test_the_random_control_is_another_model_and_reproducible() -> None:
    tokens = demo_tokens(length=64)
    same, again, other = (hf_logits(demo_hf_model(trained=False, seed=s), tokens) for s in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.allclose(same, other, atol=1e-3)
    trained, untrained = demo_hf_model(), demo_hf_model(trained=False)
    assert {n: p.shape for n, p in trained.named_parameters()} == {n: p.shape for n, p in untrained.named_parameters()}
    windows = text_windows(demo_tokens(length=512)[0, 1:].tolist())
    assert perplexity(untrained, windows) > 900  # knows nothing: near the vocabulary of 1024
    assert perplexity(trained, windows) < 60


@pytest.mark.parametrize("text", ["its own", pytest.param("held out", marks=[pytest.mark.slow, needs_data])])
def test_order_matters_to_the_model(text: str) -> None:
    """On its own text, and on two of the documents that training never saw; MODEL_CARD.md has the figures of all."""
    documents = [demo_text()] if text == "its own" else read_documents(DATA / HELD_OUT)[:2]
    report = order_report(
        demo_hf_model(), lambda text: demo_tokenizer().encode(text, add_special_tokens=False), documents
    )
    assert report["perplexity"] < 32
    assert report["ratio_tokens_shuffled"] > 3
    assert report["ratio_words_shuffled"] > 3


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = demo_tokenizer()
    for text in (demo_text(), "", " ", "naïve — 東京 🙂\u200d\n\t  x\r\n", "\x00\x7f<|endoftex|>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [0, *ids]
    assert len(tokenizer) == 1024


def test_text_and_files() -> None:
    assert 2500 <= demo_tokens(length=2500).shape[1] <= len(demo_tokenizer().encode(demo_text())) <= 3500
    weights = resources.files("tl_posdisent.demo") / "weights.safetensors"
    assert len(weights.read_bytes()) <= 3_000_000
    long = demo_tokens(length=1000)
    assert torch.equal(long[:, :10], demo_tokens(length=10))
    assert int(long[0, 0]) == 0
    for length in (0, 100_000):
        with pytest.raises(ValueError, match=f"length must be an integer from 1 to .* got {length}"):
            demo_tokens(length=length)
    with pytest.raises((ValueError, TypeCheckError), match="keras"):
        load_demo_model(backend="keras")  # type: ignore[arg-type]
