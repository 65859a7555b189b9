"""Training: the plain loop's weights, seeds, checkpoints, and accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tl_posdisent.synthetic import (
    SyntheticConfig,
    SyntheticModel,
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
FEW = {"epochs": 2, "batch_size": 16, "n_train": 100, "n_test": 60, "lr": 3e-3, "log_every": 5}  # 12 steps


def small(seed: int = 0, **changed: Any) -> SyntheticModel:
    shape: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16, "pad_id": 0}
    shape |= {"d_vocab": TASK.d_vocab, "n_ctx": TASK.n_ctx, "n_out": TASK.n_out}
    return SyntheticModel(SyntheticConfig(**shape | FEW | {"seed": seed} | changed))


def go(model: SyntheticModel, **more: Any) -> TrainRun:
    return train(model, TASK, progress=False, **more)


def weights(model: SyntheticModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# --- what a step does -------------------------------------------------------------------------------------------


def plain_loop(model: SyntheticModel) -> tuple[list[float], list[float]]:
    """Whole-batch training as anybody would write it: losses and norms of the gradients."""
    config = model.config
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
    how: dict[str, Any] = {"epochs": 8, "batch_size": 12, "n_train": 12, "n_test": 9, "lr": 1e-3, "log_every": 1}
    how |= {"warmup": 0.3, "weight_decay": 0.1, "clip": clip, "pieces": pieces, "encoding": "t5"}
    expected, model = small(3, **how), small(3, **how)
    losses, norms = plain_loop(expected)
    run = go(model)
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
    model = small(n_train=40, keep_last=True, n_test=1, log_every=1)
    config = model.config
    assert (config.steps_per_epoch, config.steps) == (3, 6)
    assert [config.samples(n) for n in range(7)] == [0, 16, 32, 40, 56, 72, 80]
    sizes: list[int] = []
    batches = training._batches

    def note(config: SyntheticConfig, lengths: Tensor) -> Iterator[Tensor]:
        for samples in batches(config, lengths):
            sizes.append(len(samples))
            yield samples

    monkeypatch.setattr(training, "_batches", note)
    run = go(model)
    assert sizes == [16, 16, 8] * 2
    assert run.metrics["samples"].tolist() == [16, 32, 40, 56, 72, 80]
    assert run.metrics["loss"].between(0.5, 3).all()


def test_ignored_labels_are_outside_loss_and_accuracy() -> None:
    """Gradients and metrics are those of the other samples alone."""
    task = TriggerCount(d_vocab=6, n_triggers=1, max_count=2, min_length=4, max_length=6, n_ctx=8, ignore_zero=True)
    shape: dict[str, Any] = {"d_vocab": 6, "n_ctx": 8, "n_out": 3}
    shape |= {"epochs": 1, "batch_size": 20, "n_train": 20, "n_test": 40, "log_every": 1, "lr": 1e-3, "warmup": 0.0}
    one, other = small(**shape), small(**shape)
    run = train(one, task, progress=False)
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
    run = go(small(pad_id=None, n_train=32))
    split = run.split()
    assert run.test_accuracy == evaluate(run.model, split.test_tokens, split.test_labels)[1]
    shorter = split.test_tokens[:1, : int((split.test_tokens[0] != 0).sum())]
    assert not torch.allclose(run.model(shorter), run.model(split.test_tokens[:1]))


def test_an_epoch_sees_every_sample_once_in_a_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    answers = training.answers

    def listen(logits: Tensor, tokens: Tensor, pad: int | None) -> Tensor:
        seen.extend(tuple(row) for row in torch.nn.functional.pad(tokens, (0, 32 - tokens.shape[1])).tolist())
        return answers(logits, tokens, pad)

    monkeypatch.setattr(training, "answers", listen)
    go(small(n_train=96, pieces=2, n_test=1))
    expected = sorted(map(tuple, TASK.split(96, 1).train_tokens.tolist()))
    first, second = seen[:96], seen[96:192]
    assert sorted(first) == sorted(second) == expected
    assert {*first[:16]} != {*second[:16]}


def test_metrics_are_means_since_the_row_before() -> None:
    every, some = (go(small(1, log_every=n)).metrics for n in (1, 5))
    assert some["step"].tolist() == [5, 10, 12]
    assert some["samples"].tolist() == [80, 160, 192]
    for column in ("loss", "accuracy", "grad_norm"):
        values = every[column]
        expected = [values[:5].mean(), values[5:10].mean(), values[10:].mean()]
        assert some[column].tolist() == pytest.approx(expected, rel=1e-6)
    assert some["lr"].tolist() == [small().config.learning_rate(step) for step in (4, 9, 11)]
    assert some["test_accuracy"].isna().tolist() == [True, True, False]
    assert some["seconds"].is_monotonic_increasing


def test_bfloat16_is_near_float32() -> None:
    usual, other = (go(small(2, precision=name)).metrics["loss"].tolist() for name in ("float32", "bfloat16"))
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
    assert not same(first, weights(go(small(dropout=0.2, split_seed=1)).model))
    assert not same(first, weights(go(small(dropout=0.1)).model))
    other = small(1, dropout=0.2)  # another order and other dropout, from the same weights
    other.load_state_dict(small(dropout=0.2).state_dict())
    assert not same(first, weights(go(other).model))


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

    with pytest.raises(ValueError, match="loss must be finite, got nan in steps 6 to 10: try a lower lr"):
        go(model, on_step=spoil)
    assert not model.training


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["learned", "t5", "rope", "mla"])
def test_saved_and_loaded(encoding: str, tmp_path: Path) -> None:
    model = small(2, encoding=encoding, causal=True, read_out="last", betas=(0.5, 0.25), clip=None)
    tokens, _ = TASK.batch(20)
    again = load_checkpoint(save_checkpoint(model, tmp_path / "deep" / "x.safetensors"))
    assert again.config == model.config
    assert torch.equal(again(tokens), model.eval()(tokens))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.safetensors"]  # nothing unfinished beside it


def test_on_step_writes_the_weights_of_a_step(tmp_path: Path) -> None:
    """A file that it saves leaves no trace in the weights."""
    run = go(small(4), on_step=lambda step, model: save_checkpoint(model, tmp_path / f"{step}.safetensors"))
    assert {path.stem for path in tmp_path.iterdir()} == {str(step) for step in range(1, 13)}
    last = load_checkpoint(tmp_path / "12.safetensors")
    assert same(weights(last), weights(run.model))
    assert same(weights(last), weights(go(small(4)).model))
    assert not last.training


def test_settings_that_a_file_does_not_have_are_the_defaults(tmp_path: Path) -> None:
    """Files of a version whose settings were those of the shape alone."""
    model = small(encoding="mla")
    shape: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_mlp": 16, "pad_id": 0, "encoding": "mla"}
    shape |= {"d_vocab": 8, "n_ctx": 32, "n_out": 4, "dropout_at": ("embed", "mlp_out")}
    notes = json.dumps({"step": 3, "training": {"lr": 0.1}, "model": shape})
    save_file(model.state_dict(), tmp_path / "old.safetensors", metadata={"notes": notes})
    assert load_checkpoint(tmp_path / "old.safetensors").config == SyntheticConfig(**shape)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path must be a checkpoint of a SyntheticModel, got .*other.safetensors"):
        load_checkpoint(tmp_path / "other.safetensors")


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
