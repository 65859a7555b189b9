"""The expected gradient for the positional part of a head's scores, before training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from shared.rows import Row, row
from shared.trained_models import BATCHES, NAMES, SEEDS, SMALL, TASK

from tl_posdisent.synthetic import positional_gradients


def synthetic_rows() -> Iterator[Row]:
    """The expected gradient for the positional part of a head's scores, before training; 0 if batches cancel."""
    samples = TASK.batch(BATCHES["batches"] * BATCHES["batch_size"], seed=1)
    order = torch.randperm(len(samples[1]), generator=torch.Generator().manual_seed(1))
    pairs = [("distance", name) for name in ("rope", "alibi", "none")] + [("encoding", x) for x in ("rope", "alibi")]
    for part, encoding in pairs:
        for labels, answers in {"": samples[1], ", shuffled labels": samples[1][order]}.items():
            tables = [
                positional_gradients(
                    SMALL.model(encoding, "distance", seed), (samples[0], answers), part=part, **BATCHES
                )
                for seed in SEEDS
            ]
            name, call = f"{part}, {NAMES[encoding]}{labels}", f"positional_gradients(part='{part}')"
            fraction = torch.tensor([(t["expected_norm"] / t["mean_norm"]).mean() for t in tables])
            yield row(f"expected over mean norm, {name}", fraction, 0, call, "seeds")
            above = torch.tensor([(t["expected_norm"] > 2 * t["expected_norm_se"]).mean() for t in tables])
            yield row(f"share of heads above two errors, {name}", above, 0, call, "seeds")
