"""Laws of the demo model: it is the trained one in every backend, and it uses the order of a text."""

from __future__ import annotations

import itertools
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from jaxtyping import TypeCheckError
from safetensors.torch import load_file, save_file
from support import zoo
from transformers import AttentionInterface

from tl_posdisent.demo import demo_hf_model, demo_text, demo_tokenizer, demo_tokens, load_demo_model
from tl_posdisent.demo.evaluate_demo import (
    HELD_OUT,
    order_report,
    perplexity,
    read_documents,
    shuffle_window,
    shuffle_words,
    text_windows,
)
from tl_posdisent.demo.train_demo import (
    float32_attention,
    learning_rate,
    main,
    random_windows,
    train_model,
    train_tokenizer,
)
from tl_posdisent.models.loading.convert import hf_logits
from tl_posdisent.models.loading.load import has_hooked

needs_hooked = pytest.mark.skipif(not has_hooked(), reason="the installed TransformerLens has no HookedTransformer")
BACKENDS = [pytest.param("hooked", marks=needs_hooked), pytest.param("bridge", marks=zoo.needs_bridge)]
DATA = Path(os.environ.get("POSDISENT_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not (DATA / HELD_OUT).is_file(), reason=f"POSDISENT_DATA has no {HELD_OUT}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trained", [True, False])
def test_backends_compute_what_hugging_face_computes(backend: Any, trained: bool) -> None:
    tokens = demo_tokens(length=512)
    expected = hf_logits(demo_hf_model(trained=trained, seed=3), tokens)
    with torch.no_grad():
        got = load_demo_model(backend=backend, trained=trained, seed=3)(tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("trained", [True, False])
def test_global_randomness_is_untouched(backend: Any, trained: bool) -> None:
    before = torch.get_rng_state()
    load_demo_model(backend=backend, trained=trained, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_random_control_is_another_model_and_reproducible() -> None:
    tokens = demo_tokens(length=64)
    same, again, other = (hf_logits(demo_hf_model(trained=False, seed=s), tokens) for s in (1, 1, 2))
    assert torch.equal(same, again)
    assert not torch.allclose(same, other, atol=1e-3)
    trained, untrained = demo_hf_model(), demo_hf_model(trained=False)
    assert {n: p.shape for n, p in trained.named_parameters()} == {n: p.shape for n, p in untrained.named_parameters()}
    windows = text_windows(demo_tokens(length=512)[0, 1:].tolist(), length=512, bos=0)
    assert perplexity(untrained, windows) > 900  # knows nothing: near the vocabulary of 1024
    assert perplexity(trained, windows) < 60


def test_order_matters_to_the_model_on_its_own_text() -> None:
    tokenizer = demo_tokenizer()
    report = order_report(
        demo_hf_model(),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        [demo_text()],
        bos=0,
    )
    assert report["perplexity"] < 32
    assert report["ratio_tokens_shuffled"] > 3
    assert report["ratio_words_shuffled"] > 3


@pytest.mark.slow
@needs_data
def test_held_out_speeches() -> None:
    """Two of the documents that training never saw; MODEL_CARD.md has the figures of all."""
    tokenizer = demo_tokenizer()
    report = order_report(
        demo_hf_model(),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        read_documents(DATA / HELD_OUT)[:2],
        bos=0,
    )
    assert report["perplexity"] < 32
    assert report["ratio_tokens_shuffled"] >= 3
    assert report["ratio_words_shuffled"] >= 3


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
        with pytest.raises(ValueError, match=f"length must be between 1 and .* got {length}"):
            demo_tokens(length=length)
    with pytest.raises((ValueError, TypeCheckError), match="keras"):
        load_demo_model(backend="keras")  # type: ignore[arg-type]


def test_windows_predict_every_token_once() -> None:
    ids = list(range(1, 100))
    windows = text_windows(ids, length=10, bos=0)
    assert all(len(w) <= 10 and int(w[0]) == 0 for w in windows)
    assert [int(i) for w in windows for i in w[1:]] == ids
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        text_windows(ids, length=1, bos=0)


def test_shuffles_change_order_and_nothing_else() -> None:
    window = torch.arange(50)
    shuffled = shuffle_window(window, generator=torch.Generator().manual_seed(0))
    assert int(shuffled[0]) == 0
    assert not torch.equal(shuffled, window)
    assert torch.equal(shuffled.sort().values, window)
    words = shuffle_words(demo_text(), generator=torch.Generator().manual_seed(0)).split()
    assert words != demo_text().split()
    assert sorted(words) == sorted(demo_text().split())


def test_perplexity_of_known_models() -> None:
    """A model that knows the rule has perplexity 1, a uniform one the size of the vocabulary."""

    def successor(tokens: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 8, 8).float()

    windows = text_windows([1, 2, 3, 4, 5], length=6, bos=0)
    assert math.isclose(perplexity(successor, windows), 1.0, rel_tol=1e-6)
    assert math.isclose(perplexity(lambda t: torch.zeros(*t.shape, 8), windows), 8.0, rel_tol=1e-6)
    with pytest.raises(ValueError, match="nothing to predict"):
        perplexity(successor, [torch.tensor([0])])


def test_learning_rate_rises_stays_and_falls() -> None:
    rates = [learning_rate(s, steps=200, peak=1.0, warmup=20) for s in range(200)]
    assert rates.index(1.0) == 19
    assert rates[19:161] == [1.0] * 142
    assert all(a < b for a, b in itertools.pairwise(rates[:20]))
    assert all(a > b for a, b in itertools.pairwise(rates[160:]))
    longer = [learning_rate(s, steps=400, peak=1.0, warmup=20) for s in range(161)]
    assert longer == rates[:161]  # so a training can be prolonged before its rate falls


@pytest.mark.slow
def test_training_is_reproducible_and_learns() -> None:
    """A text with one rule: after a few steps the loss is far below that of guessing."""
    stream = torch.arange(4000) % 16
    before = torch.get_rng_state()
    first, second = (train_model(stream, steps=8, batch=1, peak=3e-3, seed=7, progress=False) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    window = [torch.cat([torch.zeros(1, dtype=torch.long), stream[:100]])]
    assert perplexity(first, window) < 300 < perplexity(demo_hf_model(trained=False), window)
    draw = [
        random_windows(stream, batch=3, length=9, bos=0, generator=torch.Generator().manual_seed(s)) for s in (1, 1)
    ]
    assert torch.equal(*draw)


@pytest.mark.slow
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """With dropout, whose random numbers go on too."""
    stream, state = torch.arange(4000) % 16, tmp_path / "state.safetensors"

    def stop(done: int, model: Any, loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    whole = train_model(stream, steps=4, batch=1, dropout=0.3, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train_model(stream, steps=4, batch=1, dropout=0.3, state=state, state_every=2, progress=False, on_step=stop)
    steps: list[int] = []
    again = train_model(
        stream, steps=4, batch=1, dropout=0.3, state=state, progress=False, on_step=lambda done, *_: steps.append(done)
    )
    assert steps == [3, 4]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    other = train_model(stream, steps=4, batch=1, dropout=0.0, progress=False)
    assert not torch.equal(other.lm_head.weight, whole.lm_head.weight)


@pytest.mark.slow
def test_a_training_goes_on_with_what_it_was_begun_with(tmp_path: Path) -> None:
    stream, state = torch.arange(4000) % 16, tmp_path / "state.safetensors"
    begun: dict[str, Any] = {"steps": 2, "batch": 1, "dropout": 0.1, "seed": 1, "peak": 1e-3}
    train_model(stream, **begun, state=state, state_every=1, progress=False)
    content = state.read_bytes()
    changes = ({"seed": 2}, {"batch": 2}, {"dropout": 0.2}, {"peak": 2e-3}, {"steps": 1})
    for change in changes:
        (name,) = change
        with pytest.raises(ValueError, match={"peak": "learning rates", "steps": "learning rates"}.get(name, name)):
            train_model(stream, **(begun | change), state=state, progress=False)
    with pytest.raises(ValueError, match="text"):
        train_model(stream + 1, **begun, state=state, progress=False)
    assert state.read_bytes() == content
    longer = [
        train_model(stream, **(begun | {"steps": 8}), state=file, progress=False) for file in (state, None)
    ]  # the rates of the first two steps are those of eight steps too
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in longer), strict=True))
    save_file(load_file(state), state)  # what an earlier version wrote: no settings
    with pytest.raises(ValueError, match=r"seed None \(not 1\)"):
        train_model(stream, **begun, state=state, progress=False)


@pytest.mark.slow
def test_float32_attention_is_causal_attention() -> None:
    """Training's own attention, against Hugging Face's, on a model with dropout switched off."""
    tokens = demo_tokens(length=40)
    model = demo_hf_model()
    expected = hf_logits(model, tokens)
    AttentionInterface.register("float32_attention", float32_attention)
    model.config._attn_implementation = "float32_attention"
    torch.testing.assert_close(hf_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_command_line_writes_a_model_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gzip
    import json

    for name in ("speeches-train.txt.gz", HELD_OUT):
        (tmp_path / name).write_bytes(gzip.compress("\f".join([demo_text()] * 11).encode()))
    options = ["--steps", "1", "--batch", "1", "--checkpoint-every", "1", "--device", "cpu"]
    main(["--data", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    after_one_step = (tmp_path / "out" / "state.safetensors").read_bytes()
    options[1] = "2"
    metrics = main(["--data", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert math.isclose(metrics["bytes"], 11 * len(demo_text().strip().encode()))
    assert math.isclose(metrics["perplexity_aside"], metrics["perplexity"], rel_tol=1e-6)  # the same text here
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    assert set(weights) | {"lm_head.weight"} == set(demo_hf_model().state_dict())
    steps = sorted(p.name for p in (tmp_path / "out").glob("step-*"))
    assert steps == [f"step-{n:06d}.safetensors" for n in range(3)]
    last = load_file(tmp_path / "out" / steps[-1])
    assert all(torch.equal(last[name], weights[name]) for name in weights)
    curve = pd.read_csv(tmp_path / "out" / "curve.csv")
    assert curve["step"].tolist() == [0, 1, 2]
    assert math.isclose(math.exp(curve["heldout"].iloc[-1]), metrics["perplexity"], rel_tol=0.01)
    # Killed after a row of the curve, before the state was written: the row is written again, and is there once.
    before = [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    (tmp_path / "out" / "state.safetensors").write_bytes(after_one_step)
    main(["--data", str(tmp_path), "--out", str(tmp_path / "out"), *options])
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out" / "curve.csv"), curve)
    assert [path.read_bytes() for path in sorted((tmp_path / "out").glob("*.safetensors"))] == before
    with pytest.raises(ValueError, match="no such text file"):
        main(["--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert "perplexity" in capsys.readouterr().out


def test_tokenizer_training_is_reproducible() -> None:
    documents = [demo_text()]
    first, second = (train_tokenizer(documents, vocabulary=400).to_str() for _ in range(2))
    assert first == second
