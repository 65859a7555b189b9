"""The additive model as a table of ones, one row per cell: slow, plain, and independent of the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def allowed(n_query: int, n_key: int, mask: str = "causal", window: int | None = None) -> Tensor:
    """Return the cells of a named mask by its definition."""
    distance = torch.arange(n_query)[:, None] + (n_key - n_query) - torch.arange(n_key)
    seen = torch.ones(n_query, n_key, dtype=torch.bool) if mask == "full" else distance >= 0
    return seen if window is None else seen & (distance.abs() < window)


@dataclass
class Dense:
    """Least squares over the cells of one mask per text; texts share the distances."""

    masks: Tensor  # [text, query, key]

    def __post_init__(self) -> None:
        n_text, n_query, n_key = self.masks.shape
        text, i, j = self.masks.nonzero(as_tuple=True)
        n_distance = n_query + n_key - 1
        # Columns: distances of all texts, then queries and keys of the first text, of the second …
        own = n_distance + text * (n_query + n_key)
        self.columns = torch.stack([i - j + n_key - 1, own + i, own + n_query + j])
        self.n_columns = n_distance + n_text * (n_query + n_key)

    def table(self) -> Tensor:
        """The design: 1 where a cell has that distance, query or key."""
        x = torch.zeros(self.columns.shape[1], self.n_columns, dtype=torch.float64)
        for column in self.columns:
            x[torch.arange(len(x)), column] = 1
        return x

    def rank(self) -> int:
        return int(torch.linalg.matrix_rank(self.table()))

    def fitted(self, scores: Tensor) -> Tensor:
        """Fitted scores ``[text, query, key]``, 0 outside the mask."""
        y = scores[self.masks].double()
        level = y.mean()
        y = y - level
        coefficients = torch.zeros(self.n_columns, dtype=torch.float64)
        solve = self._solver()
        for _ in range(2):  # once, and once more for the rounding of the normal equations
            left = y - coefficients[self.columns].sum(0)
            marginals = torch.zeros_like(coefficients)
            for column in self.columns:
                marginals.index_add_(0, column, left)
            coefficients = coefficients + solve(marginals)
        out = torch.zeros(self.masks.shape, dtype=torch.float64)
        out[self.masks] = level + coefficients[self.columns].sum(0)
        return out

    def _solver(self):
        gram = torch.zeros(self.n_columns, self.n_columns, dtype=torch.float64)
        one = torch.ones(self.columns.shape[1], dtype=torch.float64)
        for a in self.columns:
            for b in self.columns:
                gram.index_put_((a, b), one, accumulate=True)
        if self.n_columns > 1000:
            # A tiny weight on every coefficient makes it invertible; the second pass takes care of the bias.
            factor = torch.linalg.cholesky(gram + 1e-7 * torch.eye(self.n_columns, dtype=torch.float64))
            return lambda x: torch.cholesky_solve(x[:, None], factor)[:, 0]
        values, vectors = torch.linalg.eigh(gram)
        inverse = torch.where(values > 1e-10 * values.max(), 1 / values, 0.0)
        return lambda x: vectors @ (inverse * (vectors.T @ x))


def dense_fitted(scores: Tensor, mask: Tensor) -> Tensor:
    """Fitted scores of every matrix by itself, ``mask`` broadcast against them."""
    flat = scores.reshape(-1, *scores.shape[-2:])
    masks = mask.expand(scores.shape).reshape(flat.shape)
    return torch.stack([Dense(m[None]).fitted(s[None])[0] for s, m in zip(flat, masks, strict=True)]).reshape(
        scores.shape
    )


def dense_components(scores: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Mean, components and residual of the three-axis fit of scores ``[*batch, query, key]`` in one mask, 0 outside it.

    In the gauge of ``AdditiveFit``: each component has mean 0 over the cells, and over them the key's has no linear
    trend in the key's position.
    """
    i, j = mask.nonzero(as_tuple=True)
    y = scores[..., i, j].double()
    tables = [torch.nn.functional.one_hot(x - x.min()).double() for x in (i - j, i, j)]
    design = torch.cat(tables, 1)
    n_free = int(torch.linalg.matrix_rank(design)) - sum(int(table.any(0).sum()) for table in tables)
    if n_free != -3:  # two constants and the line
        raise ValueError(f"the components of this mask are not unique: {-n_free} directions are free, 3 are fixed")
    mean = y.mean(-1, keepdim=True)
    found = (y - mean) @ torch.linalg.pinv(design, rtol=1e-10).T
    widths = [table.shape[1] for table in tables]
    distance, query, key = (
        part @ table.T for part, table in zip(found.split(widths, -1), tables, strict=True)
    )  # of each cell
    ahead, row, column = ((x - x.double().mean()) for x in (i - j, i, j))
    slope = (key @ column / column.square().sum())[..., None]
    distance, query, key = distance - slope * ahead, query + slope * row, key - slope * column
    parts = {"mean": mean.expand(y.shape)}
    parts |= {n: x - x.mean(-1, keepdim=True) for n, x in (("distance", distance), ("query", query), ("key", key))}
    parts["residual"] = y - sum(parts.values())
    out = {name: torch.zeros(scores.shape, dtype=torch.float64) for name in parts}
    for name, x in parts.items():
        out[name][..., i, j] = x
    return out


def dense_attention(pattern: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Logits ``features · w`` nearest to patterns ``[batch, query, key]`` in one mask, by the sum of the queries' KL.

    ``features`` are ``[batch or 1, query, key, feature]``; Newton's method with halved steps, down to no gradient.
    """
    x = torch.where(mask[..., None], features.double(), 0.0).expand(len(pattern), -1, -1, -1)
    w = torch.zeros(len(pattern), x.shape[-1], dtype=torch.float64)

    def logits(w: Tensor) -> Tensor:
        return torch.einsum("bqkf,bf->bqk", x, w).masked_fill(~mask, -torch.inf)

    def divergence(w: Tensor) -> Tensor:
        at = logits(w)
        return at.logsumexp(-1).sum(-1) - (pattern * at.masked_fill(~mask, 0.0)).sum((-2, -1))

    for _ in range(200):
        q = logits(w).softmax(-1)
        gradient = torch.einsum("bqkf,bqk->bf", x, q - pattern)
        if gradient.abs().max() < 1e-9 * max(1.0, float(x.abs().max())):
            return logits(w)
        means = torch.einsum("bqkf,bqk->bqf", x, q)
        hessian = torch.einsum("bqkf,bqk,bqkg->bfg", x, q, x) - torch.einsum("bqf,bqg->bfg", means, means)
        values, vectors = torch.linalg.eigh(hessian)
        inverse = torch.where(values > 1e-12 * values.amax(-1, keepdim=True), 1 / values, 0.0)
        step = torch.einsum("bfg,bg,bhg,bh->bf", vectors, inverse, vectors, gradient)
        size, before, fall = torch.ones(len(w), 1, dtype=torch.float64), divergence(w), (step * gradient).sum(-1)
        for _ in range(40):
            worse = divergence(w - size * step) > before - 1e-4 * size[:, 0] * fall + 1e-13 * before.abs()
            size = torch.where(worse[:, None], size / 2, size)
            if not worse.any():
                break
        w = w - size * step
    raise ValueError(f"no optimum was found, the gradient is {gradient.abs().max():.1e}")
