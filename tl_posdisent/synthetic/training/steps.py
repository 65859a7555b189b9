"""One step of training, and the measurements between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tl_posdisent.models.reading.forward import evaluating
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.sampling import IGNORED, Task, whole

from .runs import TrainConfig

_COLUMNS = ["step", "samples", "lr", "loss", "accuracy", "grad_norm", "test_loss", "test_accuracy", "seconds"]
_EIGHT = 8  # lengths are rounded up to this: kernels like it, and a compiled model sees fewer of them


class Training:
    """The state of a training run: all that the next step depends on.

    That is the weights, AdamW's two moments and ``done``; orders and dropout are drawn anew from the seed and the
    number of the epoch or step. ``rows`` are the metrics.
    """

    def __init__(self, model: SyntheticModel, task: Task, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        on_gpu = self.device.type != "cpu"
        self.split = task.split(config.n_train, config.n_test, config.split_seed, device=self.device)
        self.lengths = _lengths(self.split.train_tokens, model.config.pad_id).cpu()
        self.pieces = config.pieces or (1 if on_gpu else 4)
        self.half = config.precision == "bfloat16" or (config.precision == "auto" and on_gpu)
        self.forward = torch.compile(model) if config.compile else model
        self.named = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.named.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.done, self.seconds_before = 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.epoch, self.order = -1, torch.empty(0)
        self.started = time.perf_counter()
        self._forget()

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """AdamW's, by parameter; the third of its numbers is ``done``."""
        states = {name: self.optimizer.state[p] for name, p in self.named.items() if p in self.optimizer.state}
        return tuple({name: s[key] for name, s in states.items()} for key in ("exp_avg", "exp_avg_sq"))  # type: ignore[return-value]

    def go_on(self, done: int, rows: list[dict[str, Any]], first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
        """From here, with the weights that the model has."""
        self.done, self.rows = done, rows
        self.seconds_before = rows[-1]["seconds"] if rows else 0.0
        for name, moment in first.items():
            p = self.named[name]
            self.optimizer.state[p] = {
                "step": torch.tensor(float(done), device=self.device),
                "exp_avg": moment.to(p),
                "exp_avg_sq": second[name].to(p),
            }

    def step(self) -> None:
        """One batch: gradients, clipping, AdamW. Nothing here waits for a GPU."""
        config = self.config
        torch.manual_seed(seed_of(config.seed, "dropout", self.done))
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate(self.done)
        loss, accuracy = self._gradients(self._samples())
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), config.clip or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        self.recent.append(torch.stack([loss, accuracy, norm.detach().float()]))

    def _samples(self) -> Int[Tensor, "sample"]:
        """Which samples the step sees, on the CPU, the shortest first."""
        size = self.config.batch_size
        epoch, within = divmod(self.done, self.config.steps_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(seed_of(self.config.seed, "order", epoch))
            self.epoch, self.order = epoch, torch.randperm(self.config.n_train, generator=generator)
        chosen = self.order[within * size : (within + 1) * size]
        return chosen[self.lengths[chosen].argsort(stable=True)]

    def _gradients(self, chosen: Int[Tensor, "sample"]) -> tuple[Tensor, Tensor]:
        """Adds up the gradients of the mean loss; the loss, and the share of right answers, of samples that count."""
        loss = right = torch.zeros((), device=self.device)
        counted = (self.split.train_labels[chosen.to(self.device)] != IGNORED).sum().clamp_min(1)
        for piece in chosen.tensor_split(min(self.pieces, len(chosen))):
            width = _rounded(int(self.lengths[piece].max()), self.split.train_tokens.shape[1])
            there = piece.to(self.device, non_blocking=True)
            tokens, labels = self.split.train_tokens[there, :width], self.split.train_labels[there]
            with _half(self.device) if self.half else contextlib.nullcontext():
                logits = answers(self.forward, tokens, self.model.config.pad_id)
            part = cross_entropy(logits.float(), labels, reduction="sum") / counted
            part.backward()
            loss = loss + part.detach()
            right = right + (logits.argmax(-1) == labels).sum()
        return loss, right / counted

    def frame(self) -> pd.DataFrame:
        """The metrics as a table."""
        return pd.DataFrame(self.rows, columns=_COLUMNS)

    def log(self, *, test: bool) -> None:
        """A row of metrics about the steps since the last row; none if there were none.

        Raises:
            ValueError: a loss that was not finite.
        """
        if not self.recent:
            return
        recent = torch.stack(self.recent).cpu()
        self._check(recent[:, 0])
        loss, accuracy, norm = recent.double().mean(0).tolist()
        row: dict[str, Any] = {"step": self.done, "samples": self.config.samples(self.done)}
        row |= {"lr": self.config.learning_rate(max(0, self.done - 1)), "loss": loss, "accuracy": accuracy}
        measured = (torch.nan, torch.nan)
        if test:
            measured = evaluate(self.model, self.split.test_tokens, self.split.test_labels)
        row |= {"grad_norm": norm, "test_loss": measured[0], "test_accuracy": measured[1]}
        row["seconds"] = self.seconds_before + time.perf_counter() - self.started
        self.rows.append(row)
        self._forget()

    def _check(self, losses: Tensor) -> None:
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            step = self.done - len(losses) + int(bad[0])
            raise ValueError(
                f"loss must be finite, got {losses[bad[0]].item()} in step {step + 1} of {self.config.steps}, at "
                f"learning rate {self.config.learning_rate(step):.3g}: try a lower lr than {self.config.lr}"
            )

    def _forget(self) -> None:
        self.recent: list[Tensor] = []


@torch.no_grad()
def evaluate(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, "sample"],
    *,
    batch_size: int = 1024,
) -> tuple[float, float]:
    """Compute mean cross-entropy and accuracy on labelled samples, without dropout.

    Hooks on the model act: call it inside ``with model.hooks(fwd_hooks=…)`` to measure an intervention.

    Args:
        model: left in the mode it was in.
        tokens: ``[sample, pos]``, from ``task.batch`` or a split; padding behind.
        labels: ``[sample]``; those of -100 are outside loss and accuracy.
        batch_size: samples at a time, those of like length together.

    Returns:
        Loss in nats, and the share of labels that got the largest logit.

    Raises:
        ValueError: another model; no samples, or not as many labels; ids or labels that the model does not know.

    Example:
        >>> from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel, TriggerCount, evaluate
        >>> task = TriggerCount(d_vocab=8, n_triggers=1, max_count=3, min_length=4, max_length=6, n_ctx=6)
        >>> shape = dict(d_vocab=task.d_vocab, n_ctx=task.n_ctx, n_out=task.n_out, pad_id=task.pad_id)
        >>> model = SyntheticModel(SyntheticConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=16, **shape))
        >>> loss, accuracy = evaluate(model, *task.batch(100))
        >>> loss > 1, accuracy < 0.5  # it has learned nothing yet
        (True, True)
    """
    whole("batch_size", batch_size, least=1)
    check_samples(model, tokens, labels)
    pad = model.config.pad_id
    device = next(model.parameters()).device
    lengths = _lengths(tokens, pad).cpu()
    loss = right = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for piece in lengths.argsort(stable=True).split(batch_size):
            width = _rounded(int(lengths[piece].max()), tokens.shape[1])
            there = piece.to(tokens.device)
            wanted = labels[there].to(device)
            logits = answers(model, tokens[there, :width].to(device), pad).float()
            loss = loss + cross_entropy(logits, wanted, reduction="sum")
            right = right + (logits.argmax(-1) == wanted).sum()
    counted = int((labels != IGNORED).sum())
    return loss.item() / counted, right.item() / counted


def check_samples(model: Any, tokens: Any, labels: Any) -> None:
    """Raise if samples are invalid, or do not fit the model."""
    if not isinstance(model, SyntheticModel):
        raise ValueError(f"model must be a SyntheticModel, got {type(model).__name__}")
    for name, x in (("tokens", tokens), ("labels", labels)):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be integers, got {what}")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f"tokens must have shape (sample, pos) and not be empty, got {tuple(tokens.shape)}")
    if labels.shape != tokens.shape[:1]:
        raise ValueError(
            f"labels must be one per row of tokens, got {tuple(labels.shape)} for tokens of shape {tuple(tokens.shape)}"
        )
    counted = labels[labels != IGNORED]
    if not len(counted):
        raise ValueError(f"labels must have one or more that are not {IGNORED}, got {len(labels)} that are")
    for name, x, n in (("tokens", tokens, model.config.d_vocab), ("labels", counted, model.config.n_out)):
        least, most = (int(value) for value in x.aminmax())
        if least < 0 or most >= n:
            raise ValueError(f"{name} must be from 0 to {n - 1} for this model, got {least} … {most}")


def answers(model: Any, tokens: Int[Tensor, "sample pos"], pad: int | None) -> Tensor:
    """One row of logits per sample; with a read-out at every token, that of the last one."""
    logits: Tensor = model(tokens, checked=True)
    if logits.ndim == 2:
        return logits
    last = _lengths(tokens, pad) - 1
    return logits[torch.arange(len(tokens), device=tokens.device), last]


def _lengths(tokens: Int[Tensor, "sample pos"], pad: int | None) -> Int[Tensor, "sample"]:
    """Where the last token stands that is no padding, and one more."""
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    real = torch.ones_like(tokens) if pad is None else (tokens != pad)
    return (real * place).amax(-1).clamp(min=1)


@contextlib.contextmanager
def _half(device: torch.device) -> Iterator[None]:
    """Autocast to bfloat16, but on a CPU not of the fused attention, whose backward pass is many times slower in it."""
    attention = _Float32Attention() if device.type == "cpu" else contextlib.nullcontext()
    with torch.autocast(device.type, torch.bfloat16), attention:
        yield


class _Float32Attention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        args = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _rounded(width: int, most: int) -> int:
    return min(-(-width // _EIGHT) * _EIGHT, most)


def seed_of(seed: int, what: str, number: int) -> int:
    """Independent seeds for each order and each step, whichever numbers they start from."""
    entropy = (seed, *what.encode(), number)
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
