"""Scores of a layer's queries and keys, and scores that no head computes."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

import tl_posdisent as tp


def of_layer(generator: torch.Generator, layer: tp.Captured) -> pd.DataFrame:
    """Fit a layer's own scores, and those of its queries and keys at other places."""
    q, k, at = layer.q, layer.k, torch.arange(layer.q.shape[1])
    q_order, k_order = (torch.randperm(len(at), generator=generator) for _ in range(2))
    origins = {
        "own": (q, k),
        "permuted positions": (q[:, q_order], k[:, k_order]),
        "keys of another text": (q, k.roll(1, 0)),
        "normal distribution": tuple(normal(x, generator) for x in (q, k)),
    }
    frames = []
    for name, (queries, keys) in origins.items():
        scores = layer.spec.score(layer.spec.rotated(queries, at), layer.spec.rotated(keys, at))
        r = tp.fit_additive(scores, window=layer.spec.window).r
        batch, head = (x.flatten().tolist() for x in torch.meshgrid(*map(torch.arange, r.shape), indexing="ij"))
        columns = {"layer": layer.layer, "head": head, "batch": batch, "scores": name, "r": r.flatten().tolist()}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames)


def normal(x: Tensor, generator: torch.Generator) -> Tensor:
    """Draw vectors with the mean and the covariance of those of each text and head, ``[text, pos, head, d_head]``."""
    mean = x.mean(1, keepdim=True)
    drawn = torch.randn(x.shape[0], x.shape[1], x.shape[1], generator=generator) / x.shape[1] ** 0.5
    return mean + torch.einsum("bnp,bphd->bnhd", drawn, x - mean)
