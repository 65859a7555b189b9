"""Small models: samples made per minute, and training against the plain loop.

``python benchmarks/synthetic.py [tasks] [training]``: both by default. BENCH_BATCH is the batch of the second (default
64 on a CPU, the paper's 512 on a GPU); for CPU seconds of one thread set BENCH_CLOCK=cpu and OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from common import device, medians, report, seconds
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tl_posdisent.synthetic import (
    SyntheticConfig,
    SyntheticModel,
    Task,
    TrainConfig,
    TriggerCount,
    TriggerDistance,
)
from tl_posdisent.synthetic.training.presets import preset
from tl_posdisent.synthetic.training.train import TaskTraining

PAPER = preset("paper")


def tasks() -> None:
    """At the paper's sizes, in batches of 5000."""
    rows = []
    for task in (TriggerDistance(), TriggerCount()):
        time = medians({"": lambda task=task: task.batch(5000, device=device())})[""]
        rows.append({"task": type(task).__name__, "million samples a minute": 5000 / time * 60 / 1e6})
    report("synthetic_tasks", "Samples are made as tensors, with no loop over samples or tokens", rows)


# --- the plain loop ---------------------------------------------------------------------------------------------


class PlainAttention(nn.Module):
    """Attention as in [B], spelled out: RoPE, keys and values from the embedded input, dropout of the pattern."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.heads, self.size = config.n_heads, config.head_size
        self.q, self.k, self.v = (nn.Linear(config.d_model, config.d_model) for _ in range(3))
        self.out, self.dropout = nn.Linear(config.d_model, config.d_model), nn.Dropout(config.dropout)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1
        )

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        batch, pos, _ = x.shape
        q, k, v = (
            f(y).view(batch, pos, self.heads, self.size).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, source), (self.v, source))
        )
        scores = self.rotate(q) @ self.rotate(k).transpose(-1, -2) / math.sqrt(self.size)
        z = self.dropout(scores.softmax(-1)) @ v
        return self.out(z.transpose(1, 2).reshape(batch, pos, -1))


class PlainModel(nn.Module):
    """The model of ``preset("paper")`` with rotation alone: the same function of the same weights as ours."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(config.d_vocab, config.d_model), nn.Dropout(config.dropout)
        self.attention = nn.ModuleList(PlainAttention(config) for _ in range(config.n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(config.d_model) for _ in range(2 * config.n_layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(config.d_model, config.d_mlp), nn.ReLU(), nn.Linear(config.d_mlp, config.d_model))
            for _ in range(config.n_layers)
        )
        self.classify = nn.Linear(config.d_model, config.n_out)

    def forward(self, tokens: Tensor) -> Tensor:
        x = source = self.embed(tokens)
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + self.dropout(attention(self.norms[2 * layer](x), source))
            x = x + self.dropout(mlp(self.norms[2 * layer + 1](x)))
        return self.classify(x.mean(1))


@torch.no_grad()
def check_same_model(config: SyntheticConfig, task: Task) -> None:
    """Raise unless both compute the same logits from the same weights."""
    ours, plain = SyntheticModel(config).eval(), PlainModel(config).eval()
    plain.embed.weight.copy_(ours.embed.W_E)
    for block, attention, mlp in zip(ours.blocks, plain.attention, plain.mlps, strict=True):
        for name, linear in zip("QKV", (attention.q, attention.k, attention.v), strict=True):
            linear.weight.copy_(getattr(block.attn, f"W_{name}").transpose(0, 1).flatten(1).T)
            linear.bias.copy_(getattr(block.attn, f"b_{name}").flatten())
        attention.out.weight.copy_(block.attn.W_O.flatten(0, 1).T)
        attention.out.bias.copy_(block.attn.b_O)
        for linear, name in ((mlp[0], "in"), (mlp[2], "out")):
            linear.weight.copy_(getattr(block.mlp, f"W_{name}").T)
            linear.bias.copy_(getattr(block.mlp, f"b_{name}"))
    plain.classify.weight.copy_(ours.unembed.W_U.T)
    plain.classify.bias.copy_(ours.unembed.b_U)
    tokens, _ = task.batch(4)
    torch.testing.assert_close(plain(tokens), ours(tokens), rtol=0, atol=1e-3)


def plain_steps(config: SyntheticConfig, task: Task, batch: int, steps: int, *, words: bool = True) -> Any:
    """A function that trains for some steps as people write it: texts are tokenised one by one, padded to the full
    length, in float32, and the loss is read after every step; or, without ``words``, from tensors of ids."""
    tokens, labels = task.batch(batch * steps)
    samples = [
        (" ".join(f"w{t}" for t in row if t != 0), label)
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]
    vocabulary = {f"w{t}": t for t in range(task.d_vocab)}
    model = PlainModel(config).to(device()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.98, 0.9), weight_decay=1e-5)

    def tokenised(some: slice) -> tuple[Tensor, Tensor]:
        if not words:
            return tokens[some].to(device()), labels[some].to(device())
        ids, targets = [], []
        for text, label in samples[some]:
            row = [vocabulary[word] for word in text.split()]
            ids.append(row + [0] * (task.n_ctx - len(row)))
            targets.append(label)
        return torch.tensor(ids, device=device()), torch.tensor(targets, device=device())

    def go() -> None:
        for step in range(steps):
            ids, targets = tokenised(slice(step * batch, (step + 1) * batch))
            loss = cross_entropy(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    return go


def our_steps(config: SyntheticConfig, task: Task, batch: int, steps: int, **how: Any) -> Any:
    """The same number of steps of ours."""
    training = TaskTraining(
        SyntheticModel(config).to(device()),
        task,
        TrainConfig(epochs=10**6, batch_size=batch, n_train=batch * steps, n_test=1, clip=None, **how),
    )
    return lambda: training.run(stop_at=training.done + steps, progress=False)


def training() -> None:
    """Rotation alone at the paper's shape, on task 1. First the same model, then one gain after the other."""
    batch, steps = int(os.environ.get("BENCH_BATCH", 512 if device().type == "cuda" else 64)), 2
    task = PAPER.tasks["distance"]
    same = PAPER.config("rope", "distance")
    check_same_model(same, task)
    undropped = replace(same, dropout_at=("attn_out", "mlp_out"))
    short = replace(undropped, pad_id=0)
    functions = {
        "plain": plain_steps(same, task, batch, steps),
        "plain, from ids": plain_steps(same, task, batch, steps, words=False),
        "train, batches in one piece": our_steps(same, task, batch, steps, precision="float32", pieces=1),
        "train as it is": our_steps(same, task, batch, steps, precision="float32"),
        "and bfloat16": our_steps(same, task, batch, steps, precision="bfloat16"),
        "and no dropout of the pattern": our_steps(undropped, task, batch, steps, precision="bfloat16"),
        "and padding hidden": our_steps(short, task, batch, steps, precision="bfloat16"),
    }
    times = medians(functions, repeats=int(os.environ.get("BENCH_REPEATS", 3)))
    rows = [
        {"loop": label, "samples a second": batch * steps / time, "times faster": times["plain"] / time}
        for label, time in times.items()
    ]
    report("synthetic_training", f"Training at the paper's shape, batches of {batch}", rows)


if __name__ == "__main__":
    for part in (tasks, training):
        if part.__name__ in (sys.argv[1:] or ["tasks", "training"]):
            print(f"{part.__name__}: {seconds(part):.0f} s")
