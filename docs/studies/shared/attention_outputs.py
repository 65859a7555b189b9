"""Attention outputs of the same tokens in two situations, and how well a direction tells them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared.rows import Row, area, row
from tl_posdisent.hooks import applied

FOLDS = 4


def outputs(model: Any, texts: Tensor, compared: int, hooks: Any = ()) -> Tensor:
    """``[layer, text, pos, coordinate]``: attention outputs at the last tokens of texts."""
    kept: list[Tensor] = []
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    watch = [(name, lambda z, hook: kept.append(z[0, -compared:])) for name in names]
    with torch.no_grad(), applied(model, [*hooks, *watch]):
        for text in texts:
            model(text[None])
    return torch.stack(kept).unflatten(0, (len(texts), -1)).transpose(0, 1).flatten(3)


def positions(length: int, compared: int, gap: int) -> Tensor:
    """Those of a text whose last tokens come a gap later; the keys stay the same."""
    p = torch.arange(length)
    return p + gap * (p >= length - compared)


def compare(name: str, near: Tensor, far: Tensor, length: int) -> Row:
    """The AUC of a linear discriminant that is fitted to other texts, in the layer with the highest mean."""
    n_layers, n, compared, _ = near.shape
    areas, fold, is_far = torch.zeros(n_layers, n), torch.arange(n) % FOLDS, torch.arange(2 * compared) >= compared
    for layer, of in torch.cartesian_prod(torch.arange(n_layers), fold.unique()):
        axis = discriminant(*(z[layer, fold != of].flatten(0, 1).double() for z in (near, far)))
        for text in (fold == of).nonzero()[:, 0]:
            both = torch.cat([near[layer, text], far[layer, text]]).double()
            areas[layer, text] = area((both @ axis).numpy(), is_far.numpy())
    best = int(areas.mean(1).argmax())
    return row(f"probe, {name}, highest layer", areas[best], length, f"hook_z, layer {best}")


def discriminant(near: Tensor, far: Tensor) -> Tensor:
    """The direction between two means in units of both covariances, each with a twentieth of its mean variance in every
    direction."""
    eye = torch.eye(near.shape[1], dtype=near.dtype)
    covariances = [torch.cov(z.T) for z in (near, far)]
    pooled = sum(0.95 * c + 0.05 * c.diagonal().mean() * eye for c in covariances)
    return torch.linalg.solve(pooled, far.mean(0) - near.mean(0))
