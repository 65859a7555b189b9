"""The script that trains the demo model: its measures, and its files."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import one_hot
from train_demo_model import (
    HELD_OUT,
    TRAIN,
    Options,
    learning_rate,
    main,
    new_model,
    order_report,
    perplexity,
    text_windows,
    train_model,
    train_tokenizer,
)

from tl_posdisent.demo import demo_hf_model, demo_text, demo_tokens
from tl_posdisent.models.loading.convert import hf_logits

STREAM = torch.arange(4000) % 16


@pytest.mark.slow
def test_it_learns_a_rule() -> None:
    model = train_model(STREAM, Options(steps=8, batch=1, peak=3e-3, seed=7), progress=False)
    windows = text_windows(STREAM[:100].tolist())
    assert perplexity(model, windows) < 300 < perplexity(demo_hf_model(trained=False), windows)


@pytest.mark.slow
def test_attention_of_training_is_causal_attention() -> None:
    """Against Hugging Face's own, without dropout."""
    model, tokens = new_model(0.5).eval(), demo_tokens(length=40)
    model.load_state_dict(demo_hf_model().state_dict())
    torch.testing.assert_close(hf_logits(model, tokens), hf_logits(demo_hf_model(), tokens), atol=1e-4, rtol=1e-4)


def test_learning_rate_rises_stays_and_falls() -> None:
    short = [learning_rate(Options(steps=400, peak=1.0), step) for step in range(400)]
    assert short.index(1.0) == 19
    assert short[19:321] == [1.0] * 302
    assert all(a < b for a, b in itertools.pairwise(short[:20]))
    assert all(a > b for a, b in itertools.pairwise(short[320:]))
    assert 0 < short[-1] < 0.02


def test_perplexity_of_known_models() -> None:
    """A model that knows the rule has perplexity 1, a uniform one the size of the vocabulary; each id is predicted
    once, and shuffles change nothing for a uniform model but everything for one that knows the order."""

    def successor(tokens: torch.Tensor) -> Any:
        return SimpleNamespace(logits=50.0 * one_hot((tokens + 1) % 8, 8).float())

    def uniform(tokens: torch.Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, 8))

    ids = [n % 8 for n in range(1, 99)]
    windows = text_windows(ids, length=9)
    assert [int(i) for w in windows for i in w[1:]] == ids
    assert all(len(w) <= 9 and w[0] == 0 for w in windows)
    assert perplexity(successor, text_windows(ids)) == pytest.approx(1.0, rel=1e-6)
    assert perplexity(uniform, windows) == pytest.approx(8.0, rel=1e-6)
    documents = [" ".join(map(str, ids))]
    reports = [order_report(m, lambda text: [int(x) for x in text.split()], documents) for m in (successor, uniform)]
    assert reports[0]["perplexity"] == pytest.approx(1.0, rel=1e-6)
    assert min(reports[0]["ratio_tokens_shuffled"], reports[0]["ratio_words_shuffled"]) > 1000
    assert reports[1]["ratio_tokens_shuffled"] == reports[1]["ratio_words_shuffled"] == pytest.approx(1.0)
    assert reports[1]["bits_per_byte"] == pytest.approx(3 * 98 / len(documents[0]))


@pytest.mark.slow
def test_the_command_writes_a_model_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, documents in ((TRAIN, 11), (HELD_OUT, 2)):  # the eleventh is the first that is not trained on
        (tmp_path / name).write_bytes(gzip.compress("\f".join([demo_text()] * documents).encode()))
    out = tmp_path / "out"
    line = [f"--data={tmp_path}", f"--out={out}", "--batch=1", "--checkpoint-every=1", "--device=cpu", "--steps=2"]
    metrics = main(line)
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["bytes"] == 2 * len(demo_text().strip().encode())
    assert metrics["perplexity_aside"] == pytest.approx(metrics["perplexity"], rel=1e-6)  # the same text here
    weights, last = load_file(out / "weights.safetensors"), load_file(out / "step-000002.safetensors")
    assert set(weights) | {"lm_head.weight"} == set(demo_hf_model().state_dict())
    assert all(torch.equal(last[name], weights[name]) for name in weights)
    assert sorted(path.name for path in out.glob("step-*")) == [f"step-{n:06d}.safetensors" for n in range(3)]
    curve = pd.read_csv(out / "curve.csv")
    assert curve["step"].tolist() == [1, 2]
    assert math.exp(curve["heldout"].iloc[-1]) == pytest.approx(metrics["perplexity"], rel=0.01)
    main(line)  # the same weights and losses
    pd.testing.assert_frame_equal(pd.read_csv(out / "curve.csv").drop(columns="seconds"), curve.drop(columns="seconds"))
    assert all(torch.equal(x, last[name]) for name, x in load_file(out / "step-000002.safetensors").items())
    assert "perplexity" in capsys.readouterr().out


def test_tokenizer_training_is_reproducible() -> None:
    first, second = (train_tokenizer([demo_text()], vocabulary=400).to_str() for _ in range(2))
    assert first == second
