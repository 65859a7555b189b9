"""Sufficient sets of heads: every subset by brute force on a tiny trained model."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from tl_posdisent import ablate_heads, limit_frequencies
from tl_posdisent.hooks import applied
from tl_posdisent.synthetic import (
    SyntheticConfig,
    SyntheticModel,
    TriggerCount,
    TriggerDistance,
    deposit,
    evaluate,
    head_drops,
    sufficient_heads,
    train,
)

pytestmark = pytest.mark.slow  # a model is trained first
TASK = TriggerDistance(d_vocab=6, max_gap=4, min_side=1, max_side=1, n_ctx=8)
HEADS = [(layer, head) for layer in range(2) for head in range(2)]
SUBSETS = [some for n in range(5) for some in itertools.combinations(HEADS, n)]


def tiny(**changed: Any) -> SyntheticModel:
    shape: dict[str, Any] = {"n_layers": 2, "d_model": 24, "n_heads": 2, "d_mlp": 24, "pad_id": 0, "rope_base": 30.0}
    shape |= {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out}
    return SyntheticModel(SyntheticConfig(**shape | {"seed": 1} | changed))


@pytest.fixture(scope="module")
def trained() -> SyntheticModel:
    how = {"epochs": 1, "batch_size": 64, "lr": 5e-3, "betas": (0.9, 0.98), "n_train": 64 * 90, "n_test": 10}
    model = tiny(**how, pieces=1)
    task = TriggerDistance(d_vocab=6, max_gap=4, min_side=1, max_side=1, n_ctx=8)
    # Few texts of a tiny task repeat; which ones it saw does not matter here.
    object.__setattr__(task, "split", lambda n, m, seed: _split(task, n, m))
    train(model, task, progress=False)
    return model


def _split(task: Any, n: int, m: int) -> Any:
    from tl_posdisent.synthetic import Split

    return Split(*task.batch(n, 0), *task.batch(m, 1))


SAMPLES = TASK.batch(150, seed=7)


@functools.cache  # a model that is asked for again has not changed: training is over
def mean_z(model: SyntheticModel, layer: int) -> Tensor:
    """Of all tokens that are no padding: one text at a time."""
    parts = [row[row != 0] for row in SAMPLES[0]]
    with torch.no_grad():
        return torch.cat([model.run_with_cache(row[None])[1]["z", layer][0] for row in parts]).mean(0)


def alone(model: SyntheticModel, heads: Any) -> tuple[float, float]:
    """Accuracy and loss with the rotation of these heads, by hooks of other making."""
    others = [head for head in HEADS if head not in heads]
    hooks = limit_frequencies(model, high=0.0, mode="freeze", heads=others) if others else []
    with applied(model, hooks):
        loss, accuracy = evaluate(model, *SAMPLES)
    return accuracy, loss


@pytest.fixture(scope="module")
def brute(trained: SyntheticModel) -> dict[frozenset[Any], tuple[float, float]]:
    return {frozenset(some): alone(trained, some) for some in SUBSETS}


# --- by brute force ---------------------------------------------------------------------------------------------


def test_the_model_has_learned_and_some_sets_do_not_suffice(trained: SyntheticModel, brute: Any) -> None:
    assert evaluate(trained, *SAMPLES)[1] > 0.9
    accuracies = [accuracy for accuracy, _ in brute.values()]
    assert min(accuracies) < 0.6
    assert len(set(accuracies)) > 8


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_set_suffices_and_none_of_its_heads_can_go(
    trained: SyntheticModel, brute: Any, keep: float, ordered: bool
) -> None:
    order = head_drops(trained, *SAMPLES, mode="mean", progress=False) if ordered else None
    found, all_sets = sufficient_heads(trained, *SAMPLES, keep=keep, order=order), brute
    enough, whole = keep * all_sets[frozenset(HEADS)][0] - 1e-9, frozenset(found.heads)
    assert (found.accuracy, found.loss) == pytest.approx(all_sets[whole], abs=1e-5)
    assert found.accuracy >= enough
    assert all(all_sets[whole - {head}][0] < enough for head in whole)
    smallest = min(len(some) for some, (accuracy, _) in all_sets.items() if accuracy >= enough)
    assert smallest <= len(found.heads) <= 4
    ends = found.path[["accuracy", "loss"]].iloc[[0, -1]].values
    assert ends.tolist() == [pytest.approx(all_sets[frozenset(x)], abs=1e-5) for x in (HEADS, [])]
    assert [found.baseline, found.none] == ends[:, 0].tolist()


# --- other models -----------------------------------------------------------------------------------------------


def test_rotary_heads_alone_are_candidates() -> None:
    model = tiny(rotary_heads=1)
    assert sufficient_heads(model, *SAMPLES).path["heads"].max() == 2


def test_padding_that_is_read_is_in_the_mean() -> None:
    model = tiny(pad_id=None).eval()
    drops = head_drops(model, *SAMPLES, mode="mean", progress=False)
    with model.hooks(fwd_hooks=ablate_heads(model, HEADS[:1], mode="mean", reference=SAMPLES[0])):
        loss, accuracy = evaluate(model, *SAMPLES)
    assert drops.loc[0, ["value", "loss_value"]].tolist() == pytest.approx([accuracy, loss], abs=1e-5)


@pytest.mark.parametrize("progress", [False, True])
def test_the_bar_counts_the_sets_and_can_be_switched_off(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, passes = tiny(rotary_heads=1), list[int]()
    model.embed.register_forward_hook(lambda part, inputs, x: passes.append(len(x)))
    sufficient_heads(model, *SAMPLES, progress=progress)
    shown = capsys.readouterr().err
    assert not shown if not progress else "sets of heads" in shown
    n_batches = -(-len(SAMPLES[0]) // 128)
    assert not progress or f"{len(passes) // n_batches}it" in shown


# --- reports ----------------------------------------------------------------------------------------------------


def test_drops_of_the_loss(trained: SyntheticModel) -> None:
    """Against a loop over ``evaluate``; a mean leaves padding out."""
    for mode in ("zero", "mean"):
        drops = head_drops(trained, *SAMPLES, mode=mode, progress=False)  # type: ignore[arg-type]
        losses = []
        for layer, head in HEADS:
            stand_in = torch.zeros(24 // 2) if mode == "zero" else mean_z(trained, layer)[head]

            def put(z: Tensor, hook: Any, head: int = head, stand_in: Tensor = stand_in) -> Tensor:
                z = z.clone()
                z[:, :, head] = stand_in
                return z

            with trained.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", put)]):
                losses.append(evaluate(trained, *SAMPLES)[0])
        baseline = evaluate(trained, *SAMPLES)[0]
        assert drops["loss_value"].tolist() == pytest.approx(losses, abs=1e-5)
        assert drops["loss_baseline"].tolist() == pytest.approx([baseline] * 4, abs=1e-5)
        report = deposit(drops, measure="loss")
        assert report.drop == pytest.approx(max(0.0, max(losses) - baseline), abs=1e-5)


def test_ignored_samples_do_not_count() -> None:
    task = TriggerCount(d_vocab=6, n_triggers=1, max_count=3, min_length=5, max_length=7, n_ctx=8, ignore_zero=True)
    tokens, labels = task.batch(80)
    model, kept = tiny(n_out=4), labels >= 0
    assert 0 < kept.sum() < 80
    some, all_of_them = (
        head_drops(model, *samples, progress=False) for samples in ((tokens[kept], labels[kept]), (tokens, labels))
    )
    pd.testing.assert_frame_equal(some, all_of_them, atol=1e-6)
