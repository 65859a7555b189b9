"""Presets: the paper's numbers, and trainings that go together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tl_posdisent.synthetic import (
    Preset,
    SyntheticModel,
    TriggerCount,
    TriggerDistance,
    accuracies,
    preset,
    train_preset,
)


def brief() -> Preset:
    """Two steps of the small one."""
    small = preset("small")
    return replace(small, training=replace(small.training, n_train=64, batch_size=32, n_test=20))


def test_the_paper() -> None:
    paper = preset("paper")
    assert paper.tasks == {"distance": TriggerDistance(), "count": TriggerCount()}
    for encoding in paper.encodings:
        config = paper.config(encoding, "distance")
        assert (config.n_layers, config.d_model, config.n_heads, config.d_mlp, config.dropout) == (6, 256, 16, 512, 0.1)
        assert (config.keys_from, config.causal, config.read_out) == ("input", False, "mean")
    for task, n_train, n_test in (("distance", 70_000, 30_000), ("count", 35_000, 15_000)):
        how = paper.train_config(task, seed=3)
        assert (how.n_train, how.n_test, how.epochs, how.batch_size, how.seed) == (n_train, n_test, 100, 512, 3)


@pytest.mark.parametrize("name", ["small", "paper"])
def test_models_fit_their_tasks(name: str) -> None:
    chosen = preset(name)  # type: ignore[arg-type]
    for task, source in chosen.tasks.items():
        tokens, _ = source.batch(2)
        for encoding in chosen.encodings:
            assert chosen.model(encoding, task)(tokens).shape == (2, source.n_out)


def test_all_of_them_are_trained_each_in_its_folder(tmp_path: Path) -> None:
    runs = train_preset(brief(), encodings=["rope", "none"], seeds=[0, 1], folder=tmp_path, progress=False)
    expected = [("rope", "distance", 0), ("none", "distance", 0), ("rope", "count", 0), ("none", "count", 0)]
    assert list(runs)[:4] == expected
    assert len(runs) == len(list(tmp_path.iterdir())) == 8
    for (encoding, task, seed), run in runs.items():
        assert run.model.config == brief().config(encoding, task)
        assert (run.config.seed, run.task) == (seed, brief().tasks[task])
    again = train_preset(brief(), encodings=["rope"], tasks=["count"], folder=tmp_path, progress=False)
    done, first = again["rope", "count", 0], runs["rope", "count", 0]
    assert all(torch.equal(a, b) for a, b in zip(done.model.parameters(), first.model.parameters(), strict=True))
    table = accuracies(runs)
    assert table["accuracy"].tolist() == [run.test_accuracy for run in runs.values()]
    assert table.loc[0, ["chance", "steps", "samples"]].tolist() == [1 / 16, 2, 64]


def test_seeds_give_other_weights_and_the_same_samples() -> None:
    one, two = (train_preset(brief(), encodings=["none"], tasks=["count"], seeds=[s], progress=False) for s in (0, 1))
    (a,), (b,) = one.values(), two.values()
    assert not torch.equal(a.model.embed.W_E, b.model.embed.W_E)
    assert torch.equal(a.split().test_tokens, b.split().test_tokens)


def test_changes_reach_the_models() -> None:
    runs = train_preset(brief(), encodings=["rope"], tasks=["count"], progress=False, rotary_heads=1)
    assert runs["rope", "count", 0].model.config.rotary_heads == 1
    assert not math.isnan(runs["rope", "count", 0].test_accuracy)
    assert isinstance(runs["rope", "count", 0].model, SyntheticModel)


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    with pytest.raises(ValueError, match='name must be "small" or "paper", got \'large\''):
        preset("large")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"task must be one of \['distance', 'count'\], got 'sum'"):
        train_preset(brief(), tasks=["sum"], progress=False)
    with pytest.raises(ValueError, match=r"encoding must be one of .*got 'rotary'"):
        train_preset(brief(), encodings=["rope", "rotary"], progress=False)
