"""How much of the scores of small models is a function of the distance?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, row
from shared.trained_models import NAMES, STEPS, TASK, TRAINED, long_texts, trained
from torch import Tensor


def synthetic_rows() -> Iterator[Row]:
    """The share of the variance of scores that is a function of the distance, and with RoPE of scores without it."""
    texts = long_texts(TASK, 64)
    for encoding, seeds in TRAINED.items():
        for state, step in {"untrained": 0, "trained": STEPS[-1]}.items():
            models = [trained(encoding, seed)[0][step] for seed in seeds]
            name, call = f"{NAMES[encoding]}, {state}", "variance between diagonals of attn_scores"
            values = torch.tensor([scores_by_distance(model, texts) for model in models])
            yield row(f"toeplitz, scores, {name}", values, len(texts[0]), call, "seeds")
            if encoding == "rope":
                values = torch.tensor([scores_by_distance(model, texts, rotated=False) for model in models])
                yield row(f"toeplitz, scores before rotation, {name}", values, len(texts[0]), call, "seeds")


def scores_by_distance(model: Any, texts: Tensor, *, rotated: bool = True) -> float:
    """The mean over layers and heads of the share that one function of the distance explains in all texts."""
    with torch.no_grad():
        _, cache = model.eval().run_with_cache(texts)
    shares = []
    for layer in range(model.cfg.n_layers):
        scores = cache["attn_scores", layer]
        if not rotated:
            scores = torch.einsum("bqhd,bkhd->bhqk", cache["q", layer], cache["k", layer])
        shares.append(between_distances(scores.transpose(0, 1).double()))
    return float(torch.stack(shares).nanmean(1).mean())


def between_distances(scores: Tensor) -> Tensor:
    """``[head]`` of ``[head, text, query, key]``: variance between distances over that of all cells.

    These models are not causal: every query sees all keys.
    """
    places = torch.arange(scores.shape[-1])
    distance = (places[:, None] - places).flatten()
    cells = scores.flatten(2) - scores.mean((1, 2, 3))[:, None, None]
    means = {d: cells[..., distance == d].mean((1, 2)) for d in distance.unique().tolist()}
    between = torch.stack([means[d] for d in distance.tolist()], 1)
    return between.square().mean(1) / cells.square().mean((1, 2))
