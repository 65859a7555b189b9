"""Training: the plain loop's weights, seeds, checkpoints at the ends of epochs, and accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tl_posdisent.synthetic import (
    Split,
    SyntheticConfig,
    SyntheticModel,
    TrainConfig,
    TrainRun,
    TriggerCount,
    TriggerDistance,
    evaluate,
    load_checkpoint,
    save_checkpoint,
    train,
)
from tl_posdisent.synthetic.training import train as training

TASK = TriggerDistance(d_vocab=8, min_gap=0, max_gap=3, min_side=0, max_side=12, n_ctx=32)
FEW = TrainConfig(epochs=2, batch_size=16, n_train=100, n_test=60, lr=3e-3, log_every=5)  # 12 steps


def small(seed: int = 0, **changed: Any) -> SyntheticModel:
    shape: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16, "pad_id": 0}
    shape |= {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out}
    return SyntheticModel(SyntheticConfig(**shape | changed), seed=seed)


def changed(config: TrainConfig, **fields: Any) -> TrainConfig:
    return TrainConfig(**{name: getattr(config, name) for name in config.__dataclass_fields__} | fields)


def go(model: SyntheticModel, config: TrainConfig = FEW, **more: Any) -> TrainRun:
    return train(model, TASK, config, progress=False, **more)


def weights(model: SyntheticModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# --- what a step does -------------------------------------------------------------------------------------------


def plain_loop(model: SyntheticModel, config: TrainConfig) -> tuple[list[float], list[float]]:
    """Whole-batch training as anybody would write it: losses and norms of the gradients."""
    split = TASK.split(config.n_train, config.n_test)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=config.betas, weight_decay=config.weight_decay, foreach=False
    )
    warm, losses, norms = round(config.warmup * config.epochs), [], []
    for step in range(config.epochs):
        up, down = (step + 1) / max(warm, 1), (step - warm) / (config.epochs - warm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (up if step < warm else (1 + math.cos(math.pi * down)) / 2)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(split.train_tokens), split.train_labels)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        if config.clip is not None and norm > config.clip:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= config.clip / norm
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


@pytest.mark.parametrize("pieces", [4, 1, 3, 20])
@pytest.mark.parametrize("clip", [0.1, None])
def test_is_the_plain_loop(pieces: int, clip: float | None) -> None:
    """With one batch per epoch the order does not matter. Pieces are as long as their texts, and change nothing."""
    config = TrainConfig(
        epochs=8, batch_size=12, n_train=12, n_test=9, lr=1e-3, warmup=0.3, weight_decay=0.1, log_every=1, clip=clip
    )
    expected, model = small(3, encoding="t5"), small(3, encoding="t5")
    losses, norms = plain_loop(expected, config)
    run = go(model, changed(config, pieces=pieces))
    torch.testing.assert_close(run.metrics["loss"].tolist(), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.metrics["grad_norm"].tolist(), norms, rtol=1e-3, atol=1e-5)
    assert max(norms) > 0.1
    assert run.metrics["step"].tolist() == list(range(1, 9))
    for name, x in expected.state_dict().items():
        if name.endswith("b_K"):
            continue  # no softmax sees it: its gradient is rounding, which Adam makes a step of
        torch.testing.assert_close(model.state_dict()[name], x, rtol=1e-3, atol=2e-5)


def test_the_last_batch_is_kept_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample once in an epoch, though the batch does not divide them; the loss is a mean of the batch's own."""
    config = changed(FEW, n_train=40, keep_last=True, n_test=1, log_every=1)
    assert (config.steps_per_epoch, config.steps) == (3, 6)
    assert [config.samples(n) for n in range(7)] == [0, 16, 32, 40, 56, 72, 80]
    sizes: list[int] = []
    batches = training._batches

    def note(config: TrainConfig, lengths: Tensor) -> Iterator[Tensor]:
        for samples in batches(config, lengths):
            sizes.append(len(samples))
            yield samples

    monkeypatch.setattr(training, "_batches", note)
    run = go(small(), config)
    assert sizes == [16, 16, 8] * 2
    assert run.metrics["samples"].tolist() == [16, 32, 40, 56, 72, 80]
    assert run.metrics["loss"].between(0.5, 3).all()


def test_ignored_labels_are_outside_loss_and_accuracy() -> None:
    """Gradients and metrics are those of the other samples alone."""
    task = TriggerCount(d_vocab=6, n_triggers=1, max_count=2, min_length=4, max_length=6, n_ctx=8, ignore_zero=True)
    shape: dict[str, Any] = {"d_vocab": 6, "n_ctx": 8, "n_out": 3}
    config = changed(FEW, epochs=1, batch_size=20, n_train=20, n_test=40, log_every=1, lr=1e-3, warmup=0.0)
    one, other = small(**shape), small(**shape)
    run = train(one, task, config, progress=False)
    split = run.split()
    counted = split.train_labels >= 0
    assert 0 < counted.sum() < 20
    logits = other(split.train_tokens[counted])
    loss = torch.nn.functional.cross_entropy(logits, split.train_labels[counted])
    assert run.metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    accuracy = (logits.argmax(-1) == split.train_labels[counted]).double().mean().item()
    assert run.metrics["accuracy"].item() == pytest.approx(accuracy)
    kept = split.test_labels >= 0
    measured = evaluate(one, split.test_tokens, split.test_labels)
    assert measured == pytest.approx(evaluate(one, split.test_tokens[kept], split.test_labels[kept]), rel=1e-5)


def test_padding_can_be_read() -> None:
    """``pad_id=None``: texts are not shortened, and the answer depends on how much padding there is."""
    run = go(small(pad_id=None), changed(FEW, n_train=32))
    split = run.split()
    assert run.test_accuracy == evaluate(run.model, split.test_tokens, split.test_labels)[1]
    shorter = split.test_tokens[:1, : int((split.test_tokens[0] != 0).sum())]
    assert not torch.allclose(run.model(shorter), run.model(split.test_tokens[:1]))


def test_an_epoch_sees_every_sample_once_in_a_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    answers = training.answers

    def listen(model: Any, tokens: Tensor, pad: int | None) -> Tensor:
        seen.extend(tuple(row) for row in torch.nn.functional.pad(tokens, (0, 32 - tokens.shape[1])).tolist())
        return answers(model, tokens, pad)

    monkeypatch.setattr(training, "answers", listen)
    go(small(), changed(FEW, n_train=96, pieces=2, n_test=1))
    expected = sorted(map(tuple, TASK.split(96, 1).train_tokens.tolist()))
    first, second = seen[:96], seen[96:192]
    assert sorted(first) == sorted(second) == expected
    assert {*first[:16]} != {*second[:16]}


def test_metrics_are_means_since_the_row_before() -> None:
    every, some = (go(small(1), changed(FEW, log_every=n)).metrics for n in (1, 5))
    assert some["step"].tolist() == [5, 10, 12]
    assert some["samples"].tolist() == [80, 160, 192]
    for column in ("loss", "accuracy", "grad_norm"):
        values = every[column]
        expected = [values[:5].mean(), values[5:10].mean(), values[10:].mean()]
        assert some[column].tolist() == pytest.approx(expected, rel=1e-6)
    assert some["lr"].tolist() == [FEW.learning_rate(step) for step in (4, 9, 11)]
    assert some["test_accuracy"].isna().tolist() == [True, True, False]
    assert some["seconds"].is_monotonic_increasing


def test_bfloat16_is_near_float32() -> None:
    usual, other = (
        go(small(2), changed(FEW, precision=name)).metrics["loss"].tolist() for name in ("float32", "bfloat16")
    )
    assert other == pytest.approx(usual, rel=0.02)
    assert other != usual


# --- seeds ------------------------------------------------------------------------------------------------------


def test_seeds_settle_everything_and_nobody_elses_numbers() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(go(small(dropout=0.2)).model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same(first, weights(go(small(dropout=0.2)).model))
    assert not same(first, weights(go(small(dropout=0.2), changed(FEW, seed=1)).model))
    assert not same(first, weights(go(small(dropout=0.2), changed(FEW, split_seed=1)).model))
    assert not same(first, weights(go(small(dropout=0.1)).model))


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_error_modes_and_random_state_are_as_before(error: type[BaseException]) -> None:
    def fail(step: int, model: SyntheticModel) -> None:
        raise error("of the user's")

    model = small(dropout=0.2).eval()
    model.blocks[0].train()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    with pytest.raises(error, match="of the user's"):
        go(model, on_step=fail)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_nan_is_an_error() -> None:
    model = small().eval()

    def spoil(step: int, model: SyntheticModel) -> None:
        if step == 7:
            with torch.no_grad():
                model.unembed.b_U[0] = torch.nan

    with pytest.raises(ValueError, match=r"loss must be finite, got nan in step 8 of 12, at learning rate .* lower lr"):
        go(model, on_step=spoil)
    assert not model.training


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_last", "ends"), [(False, [6, 12]), (True, [7, 14])])
def test_checkpoints_are_the_weights_at_the_ends_of_epochs(keep_last: bool, ends: list[int], tmp_path: Path) -> None:
    """Each says what it is: model, task, settings, step."""
    then: dict[int, dict[str, Tensor]] = {}
    config, model = changed(FEW, keep_last=keep_last), small(4)
    run = go(model, config, folder=tmp_path, on_step=lambda step, m: then.update({step: weights(m)}))
    assert run.checkpoints == {step: tmp_path / f"step-{step:06d}.safetensors" for step in ends}
    assert sorted(tmp_path.iterdir()) == [*run.checkpoints.values()]
    for step, path in run.checkpoints.items():
        there = load_checkpoint(path)
        assert same(weights(there), then[step])
        assert there.config == model.config
        assert not there.training
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
        assert notes["step"] == step
        assert notes["task"] == {"name": "TriggerDistance", **asdict(TASK)}
        assert notes["training"] == {**asdict(config), "betas": [*config.betas], "shared": 0}
    assert same(weights(go(small(4), config).model), then[ends[-1]])  # saving leaves no trace in the weights


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    go(small(), changed(FEW, epochs=1), folder=tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    model = small(1)
    before = weights(model)
    with pytest.raises(ValueError, match=r"folder must have no checkpoints .*step-000006.safetensors exists: choose"):
        go(model, folder=tmp_path / "run")
    assert same(weights(model), before)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files
    with pytest.raises(ValueError, match=r"folder must be a folder, but .* is a file"):
        go(model, folder=next(iter(files)))


def test_a_loss_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """The first epoch has no row of metrics, and ends in an error before its weights are written."""

    def spoil(step: int, model: SyntheticModel) -> None:
        if step == 4:
            with torch.no_grad():
                model.unembed.b_U[0] = torch.nan

    with pytest.raises(ValueError, match="loss must be finite, got nan in step 5 of 12"):
        go(small(), changed(FEW, log_every=50), folder=tmp_path, on_step=spoil)
    assert not list(tmp_path.iterdir())


def test_the_result_says_which_samples_were_drawn() -> None:
    """Also if some are in both sets, here by a task that draws without looking."""

    class Overlapping(TriggerDistance):
        def split(self, *args: Any, **options: Any) -> Split:
            split = super().split(*args, **options)
            test = torch.cat([split.test_tokens[:-2], split.train_tokens[5:6].repeat(2, 1)])
            labels = torch.cat([split.test_labels[:-2], split.train_labels[5:6].repeat(2)])
            return Split(split.train_tokens, split.train_labels, test, labels)

    config = changed(FEW, epochs=1, split_seed=3)
    run = go(small(), config)
    assert run.shared == 0
    assert repr(run).splitlines()[-1] == "  100 training and 60 test samples of seed 3, 0 in both"
    task = Overlapping(**asdict(TASK))
    other = train(small(), task, config, progress=False)
    assert other.shared == 2
    assert repr(other).endswith("100 training and 60 test samples of seed 3, 2 in both")


@pytest.mark.parametrize("encoding", ["learned", "t5", "rope", "mla"])
def test_saved_and_loaded(encoding: str, tmp_path: Path) -> None:
    model = small(2, encoding=encoding, causal=True, read_out="last")
    tokens, _ = TASK.batch(20)
    again = load_checkpoint(save_checkpoint(model, tmp_path / "deep" / "x.safetensors", {"anything": [1, "two"]}))
    assert again.config == model.config
    assert torch.equal(again(tokens), model.eval()(tokens))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.safetensors"]  # nothing unfinished beside it


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    whole = save_checkpoint(small(), tmp_path / "good.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + size])
    head["__metadata__"]["notes"] = head["__metadata__"]["notes"].replace('"d_model": 16', '"d_model": 32')
    text = json.dumps(head).encode()
    (tmp_path / "shape").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    with pytest.raises(ValueError, match=r"weights in .*shape must fit the model: .*size mismatch for embed"):
        load_checkpoint(tmp_path / "shape")


# --- measuring --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_out", ["mean", "last", "token"])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_evaluate_is_one_text_after_the_other(read_out: str, batch_size: int) -> None:
    model = small(read_out=read_out, dropout=0.3).train()
    tokens, labels = TASK.batch(30)
    losses, right = [], 0
    with torch.no_grad():
        model.eval()
        for row, label in zip(tokens, labels, strict=True):
            logits = model(row[row != 0][None])[0]
            logits = (logits[-1] if read_out == "token" else logits).double()
            losses.append(-logits.log_softmax(-1)[label].item())
            right += int(logits.argmax() == label)
        model.train()
    loss, accuracy = evaluate(model, tokens, labels, batch_size=batch_size)
    assert loss == pytest.approx(sum(losses) / 30, rel=1e-5)
    assert accuracy == right / 30
    assert model.training


def test_evaluate_sees_hooks_and_survives_them() -> None:
    model = small()
    tokens, labels = TASK.batch(64)

    def answer_two(x: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(x)

    def fail(x: Tensor, hook: Any) -> Tensor:
        raise RuntimeError("of the user's")

    with torch.no_grad():
        model.unembed.b_U[2] = 5.0
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", answer_two)]):
        assert evaluate(model, tokens, labels)[1] == (labels == 2).float().mean().item()
    model.train()
    with (
        model.hooks(fwd_hooks=[("ln_final.hook_normalized", fail)]),
        pytest.raises(RuntimeError, match="of the user's"),
    ):
        evaluate(model, tokens, labels)
    assert model.training
