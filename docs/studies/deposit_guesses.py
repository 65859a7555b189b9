"""Accuracies of guesses without a model, on reversal and brackets."""

from __future__ import annotations

from typing import Any

import torch

from tl_posdisent.synthetic import preset

TASKS = preset("small").tasks


def most_frequent(tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy on reversal of one of the most frequent tokens of each text, drawn at random."""
    counts = torch.stack([(tokens == token).sum(1) for token in range(2, int(tokens.max()) + 1)], 1)
    best = counts == counts.amax(1, keepdim=True)
    return float((best.gather(1, labels[:, None])[:, 0] / best.sum(1)).mean())


def area(tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy of the best threshold on the sum of depths before each place, to tell balanced brackets."""
    depth = ((tokens == 1).long() - (tokens == 2).long()).cumsum(1)
    areas = depth[:, :-1].sum(1)
    bounds = torch.cat([areas.unique(), areas.max()[None] + 1])
    return float(((areas[:, None] >= bounds) == (labels[:, None] == 1)).double().mean(0).max())


def main() -> None:
    """Print the accuracy of a constant, and of the best simple rule, on new texts."""
    rules = {"reversal": most_frequent, "balanced": area}
    for name in ("reversal", "balanced", "depth"):
        task: Any = TASKS[name]
        samples = task.batch(20_000, seed=99)
        rule = rules[name](*samples) if name in rules else task.from_length
        print(f"{name}: {task.chance:.2f} and {rule:.2f}")
