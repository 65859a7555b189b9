"""The synthetic laboratory: samples made per minute, training against the plain loop, and seeds trained together.

``python benchmarks/synthetic.py [tasks] [training] [together]``: all three by default. BENCH_BATCH is the batch of the
second (default 64 on a CPU, the paper's 512 on a GPU).
"""

from __future__ import annotations

import copy
import math
import os
import sys
from typing import Any

import torch
from common import device, medians, report, seconds
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from tl_posdisent.synthetic import (
    IndexLookup,
    Retrieval,
    SyntheticConfig,
    SyntheticModel,
    Task,
    TrainConfig,
    TriggerCount,
    TriggerDistance,
)
from tl_posdisent.synthetic.training.presets import preset
from tl_posdisent.synthetic.training.steps import Training

PAPER = preset("paper")


def tasks() -> None:
    """At the paper's sizes, in batches of 5000."""
    rows = []
    for task in (TriggerDistance(), TriggerCount(), IndexLookup(), Retrieval()):
        time = medians({"": lambda task=task: task.batch(5000, device=device())})[""]
        rows.append({"task": type(task).__name__, "million samples a minute": 5000 / time * 60 / 1e6})
    report("synthetic_tasks", "Samples are made as tensors, with no loop over samples or tokens", rows)


# --- the plain loop ---------------------------------------------------------------------------------------------


class PlainAttention(nn.Module):
    """RoPE and softmax, spelled out."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.heads, self.size = config.n_heads, config.head_size
        self.q, self.k, self.v = (nn.Linear(config.d_model, config.d_model) for _ in range(3))
        self.out = nn.Linear(config.d_model, config.d_model)

    def rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], dim=-1
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, pos, _ = x.shape
        q, k, v = (f(x).view(batch, pos, self.heads, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.rotate(q) @ self.rotate(k).transpose(-1, -2) / math.sqrt(self.size)
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        z = scores.softmax(-1) @ v
        return self.out(z.transpose(1, 2).reshape(batch, pos, -1))


class PlainModel(nn.Module):
    """A pre-norm transformer with a mean-pooled classifier, of the same shape as ours."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(config.d_vocab, config.d_model), nn.Dropout(config.dropout)
        self.attention = nn.ModuleList(PlainAttention(config) for _ in range(config.n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(config.d_model) for _ in range(2 * config.n_layers + 1))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(config.d_model, config.d_mlp), nn.GELU(), nn.Linear(config.d_mlp, config.d_model))
            for _ in range(config.n_layers)
        )
        self.classify = nn.Linear(config.d_model, config.n_out)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        x = self.dropout(self.embed(tokens))
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + self.dropout(attention(self.norms[2 * layer](x), mask))
            x = x + self.dropout(mlp(self.norms[2 * layer + 1](x)))
        x = self.norms[-1](x)
        return self.classify((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def plain_steps(config: SyntheticConfig, task: Task, batch: int, steps: int) -> Any:
    """A function that trains for some steps as people write it: texts are tokenised one by one, padded to the full
    length, in float32, and the loss is read after every step."""
    tokens, labels = task.batch(batch * steps)
    samples = [
        (" ".join(f"w{t}" for t in row if t != 0), label)
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]
    vocabulary = {f"w{t}": t for t in range(task.d_vocab)}
    model = PlainModel(config).to(device()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.98, 0.9), weight_decay=1e-5)

    def go() -> None:
        for step in range(steps):
            ids, targets = [], []
            for text, label in samples[step * batch : (step + 1) * batch]:
                row = [vocabulary[word] for word in text.split()]
                ids.append(row + [0] * (task.n_ctx - len(row)))
                targets.append(label)
            logits = model(torch.tensor(ids, device=device()))
            loss = cross_entropy(logits, torch.tensor(targets, device=device()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    return go


def our_steps(config: SyntheticConfig, task: Task, batch: int, steps: int, **how: Any) -> Any:
    """The same number of steps of ours."""
    training = Training(
        SyntheticModel(config).to(device()).train(),
        task,
        TrainConfig(epochs=10**6, batch_size=batch, n_train=batch * steps, n_test=1, **how),
    )

    def go() -> None:
        with torch.random.fork_rng():
            for _ in range(steps):
                training.step()
        training.log(test=False)

    return go


def training() -> None:
    """RoPE at the paper's shape, on both tasks."""
    batch, steps = int(os.environ.get("BENCH_BATCH", 512 if device().type == "cuda" else 64)), 2
    variants: dict[str, dict[str, Any]] = {
        "ours, bfloat16": {"precision": "bfloat16"},
        "ours, bfloat16, one piece": {"precision": "bfloat16", "pieces": 1},
        "ours, float32": {"precision": "float32"},
    }
    if os.environ.get("BENCH_COMPILE"):
        variants["ours, compiled, one piece"] = {"compile": True, "pieces": 1}
    for name in PAPER.tasks:
        task, config = PAPER.tasks[name], PAPER.config("rope", name)
        functions = {"plain": plain_steps(config, task, batch, steps)}
        functions |= {label: our_steps(config, task, batch, steps, **how) for label, how in variants.items()}
        times = medians(functions, repeats=int(os.environ.get("BENCH_REPEATS", 3)))
        rows = [
            {"loop": label, "samples a second": batch * steps / time, "times faster": times["plain"] / time}
            for label, time in times.items()
        ]
        report(f"synthetic_training_{name}", f"Training at the paper's shape, {name}, batches of {batch}", rows)


# --- several seeds at once --------------------------------------------------------------------------------------


def together() -> None:
    """Gradients of several models of the small preset: one after the other, or stacked and mapped over."""
    small = preset("small")
    task, config, batch = small.tasks["distance"], small.config("rope", "distance"), small.training.batch_size
    tokens, labels = task.batch(batch, device=device())
    rows = []
    for n in (2, 4):
        models = [SyntheticModel(config, seed=seed).to(device()).train() for seed in range(n)]
        parameters, buffers = stack_module_state(models)
        skeleton = copy.deepcopy(models[0])

        def loss(p: dict[str, Tensor], b: dict[str, Tensor], skeleton: Any = skeleton) -> Tensor:
            logits = functional_call(skeleton, (p, b), (tokens,), {"checked": True})
            return cross_entropy(logits, labels)

        def one_by_one(models: Any = models) -> None:
            for model in models:
                cross_entropy(model(tokens, checked=True), labels).backward()
                model.zero_grad(set_to_none=True)

        stacked = vmap(grad(loss), randomness="different")
        functions = {
            "one by one": one_by_one,
            "stacked": lambda f=stacked, p=parameters, b=buffers: f(p, b),
        }
        times = medians(functions, repeats=5)
        rows.append({"seeds": n, **{f"{k} ms": v * 1e3 for k, v in times.items()}})
    report("synthetic_together", "Gradients of several seeds of the small preset", rows)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["tasks", "training", "together"]
    for part in (tasks, training, together):
        if part.__name__ in chosen:
            print(f"{part.__name__}: {seconds(part):.0f} s")
