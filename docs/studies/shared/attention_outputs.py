"""Attention outputs of the same tokens in two situations, and how well scores fitted to other texts tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shared.rows import Row, area, row
from tl_posdisent.hooks import applied

FOLDS = 4
Outputs = tuple[Tensor, Tensor]  # [layer, text, pos, coordinate], and the loss of each text
Score = Callable[[Tensor], Tensor]


def outputs(model: Any, texts: Tensor, compared: int, hooks: Any = ()) -> Outputs:
    """Attention outputs at the last tokens of texts, and the loss of these tokens."""
    kept: list[Tensor] = []
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    watch = [(name, lambda z, hook: kept.append(z[0, -compared:])) for name in names]
    losses = []
    with torch.no_grad(), applied(model, [*hooks, *watch]):
        for text in texts:
            logits = model(text[None])[0, -compared - 1 : -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, text[-compared:]))
    z = torch.stack(kept).unflatten(0, (len(texts), -1)).transpose(0, 1)
    return z.flatten(3), torch.stack(losses)


def covariance(z: Tensor) -> Tensor:
    """With a twentieth of the mean variance in every direction."""
    c = torch.cov(z.T)
    return 0.95 * c + 0.05 * c.diagonal().mean() * torch.eye(len(c), dtype=c.dtype)


def scores(near: Tensor, far: Tensor) -> tuple[Score, Score]:
    """The linear discriminant of two sets of outputs, and the Mahalanobis distance from the first set."""
    mean, own = near.mean(0), covariance(near)
    axis = torch.linalg.solve(own + covariance(far), far.mean(0) - mean)
    inverse = torch.linalg.inv(own)
    return lambda z: z @ axis, lambda z: (((z - mean) @ inverse) * (z - mean)).sum(1)


def areas(near: Tensor, far: Tensor) -> Tensor:
    """``[score, layer, text]``: how well scores fitted to other texts tell a text's far outputs from its near ones."""
    n_layers, n, compared, _ = near.shape
    found, fold, is_far = torch.zeros(2, n_layers, n), torch.arange(n) % FOLDS, torch.arange(2 * compared) >= compared
    for layer, of in torch.cartesian_prod(torch.arange(n_layers), fold.unique()):
        fitted = scores(*(z[layer, fold != of].flatten(0, 1).double() for z in (near, far)))
        for text in (fold == of).nonzero()[:, 0]:
            both = torch.cat([near[layer, text], far[layer, text]]).double()
            for n_score, score in enumerate(fitted):
                found[n_score, layer, text] = area(score(both).numpy(), is_far.numpy())
    return found


def compare(name: str, near: Outputs, far: Outputs, length: int) -> Iterator[Row]:
    """The loss added, and the areas in the layers of lowest and of highest mean."""
    yield row(f"loss added, {name}", far[1] - near[1], length, "hook_z of the same tokens")
    for score, by_layer in zip(("probe", "distance"), areas(near[0], far[0]), strict=True):
        order = by_layer.mean(1).argsort()
        for which, layer in (("lowest", order[0]), ("highest", order[-1])):
            yield row(f"{score}, {name}, {which} layer", by_layer[layer], length, f"hook_z, layer {layer}")


def positions(length: int, compared: int, gap: int) -> Tensor:
    """Those of a text whose last tokens come a gap later; the keys stay the same."""
    p = torch.arange(length)
    return p + gap * (p >= length - compared)
