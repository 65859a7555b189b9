"""Presets: the paper's numbers, and trainings that go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lanes import slow

from tl_posdisent.synthetic import (
    TriggerCount,
    TriggerDistance,
    accuracies,
    load_checkpoint,
    preset,
    train_preset,
)

SMALL = preset("small")
BRIEF: dict[str, Any] = {"n_train": 64, "batch_size": 32, "n_test": 20, "progress": False}  # two steps


def test_the_paper() -> None:
    """The published settings, one by one; each is an option with a test of what it does."""
    paper = preset("paper")
    assert paper.tasks["distance"] == TriggerDistance(
        574, 1, 70, 1, 25, 128, two_triggers=True, stray_triggers=True, repeats=False, max_length=120, first_label=2,
        n_logits=574,
    )  # fmt: skip
    assert paper.tasks["count"] == TriggerCount(574, 30, 0, 100, 120, 120, 128, ignore_zero=True, n_logits=574)
    for encoding in paper.encodings:
        config = paper.config(encoding, "distance")
        assert (config.n_layers, config.d_model, config.n_heads, config.d_mlp, config.n_out) == (6, 256, 16, 512, 574)
        assert (config.causal, config.read_out, config.pad_id) == (False, "mean", None)
        assert (config.keys_from, config.source_norm) == ("layer" if "mla" in encoding else "input", False)
        assert (config.final_norm, config.activation, config.initialisation) == (False, "relu", "torch")
        assert (config.dropout, set(config.dropout_at)) == (0.1, {"pattern", "attn_out", "mlp_out"})
        assert (config.sinusoids, config.alibi_slopes, config.rope_base) == ("halves", "exponential", 10000.0)
    mla = paper.config("absolute_mla", "count")
    assert (mla.query_latent, mla.key_latent, mla.latent_norm, mla.shared_rotary_query) == (128, 128, False, True)
    assert (mla.rotary_dim, mla.head_size - mla.rotary_dim) == (16, 16)


def test_how_the_paper_trains() -> None:
    paper = preset("paper")
    for task, n_train, n_test, per_epoch in (("distance", 70_000, 30_000, 137), ("count", 35_000, 15_000, 69)):
        how = paper.config("rope", task, seed=3)
        assert (how.n_train, how.n_test, how.epochs, how.batch_size, how.seed) == (n_train, n_test, 100, 512, 3)
        assert (how.lr, how.betas, how.weight_decay, how.warmup, how.clip) == (1e-4, (0.98, 0.9), 1e-5, 0.06, None)
        assert how.steps == 100 * per_epoch  # the last batch of an epoch is kept
        mla = paper.config("absolute_mla", task)
        assert (mla.batch_size, mla.epochs, mla.lr) == (1024, 150, 1e-4)


def test_a_fifth_of_the_papers_texts_have_a_stray_trigger() -> None:
    tokens, labels = preset("paper").tasks["distance"].batch(3000)
    strays = ((tokens == 1) | (tokens == 2)).sum(1) > 2
    assert strays.double().mean().item() == pytest.approx(0.2, abs=0.025)
    assert (int(labels.min()), int(labels.max()), int((tokens != 0).sum(1).max())) == (2, 71, 120)


def test_the_medium_one_has_the_papers_architecture() -> None:
    medium, paper = preset("medium"), preset("paper")
    for name in ("keys_from", "source_norm", "final_norm", "activation", "initialisation", "sinusoids"):
        assert medium.settings[name] == paper.settings[name]
    config = medium.config("sinusoidal_rope", "gap32")
    assert (config.n_layers, config.n_heads, config.d_model, config.n_out, config.pad_id) == (6, 16, 128, 32, 0)
    assert [medium.tasks[f"gap{n}"].n_out for n in (8, 16, 32, 70)] == [8, 16, 32, 70]


@pytest.mark.parametrize("name", ["small", *slow(["medium", "paper"])])
def test_models_fit_their_tasks(name: str) -> None:
    chosen = preset(name)  # type: ignore[arg-type]
    for task, source in chosen.tasks.items():
        tokens, _ = source.batch(2)
        for encoding in chosen.encodings:
            assert chosen.model(encoding, task)(tokens).shape == (2, source.n_out)


def test_all_of_them_are_trained_each_with_its_file(tmp_path: Path) -> None:
    runs = train_preset(SMALL, encodings=["rope", "none"], seeds=[0, 1], folder=tmp_path, **BRIEF)
    tasks = ("distance", "count", "reversal", "balanced", "depth")
    assert list(runs) == [(name, task, seed) for seed in (0, 1) for task in tasks for name in ("rope", "none")]
    assert len(runs) == len(list(tmp_path.iterdir())) == 20
    for (encoding, task, seed), run in runs.items():
        assert run.model.config == SMALL.config(encoding, task, seed, n_train=64, batch_size=32, n_test=20)
        assert run.task == SMALL.tasks[task]
    saved = load_checkpoint(tmp_path / "count-rope-seed0.safetensors")
    trained = runs["rope", "count", 0].model
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), trained.parameters(), strict=True))
    table = accuracies(runs)
    assert table["accuracy"].tolist() == [run.test_accuracy for run in runs.values()]
    assert table.loc[0, ["chance", "steps", "samples"]].tolist() == [1 / 16, 2, 64]


def test_seeds_give_other_weights_and_the_same_samples_and_changes_reach_the_models() -> None:
    a, b = train_preset(SMALL, encodings=["rope"], tasks=["count"], seeds=2, **BRIEF, rotary_heads=1).values()
    assert not torch.equal(a.model.embed.W_E, b.model.embed.W_E)
    assert torch.equal(a.split().test_tokens, b.split().test_tokens)
    assert a.model.config.rotary_heads == 1
