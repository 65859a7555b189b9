"""The additive model as a table of ones, one row per cell: slow, plain, and independent of the library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def allowed(n_query: int, n_key: int, mask: str = "causal", window: int | None = None) -> Tensor:
    """The cells of a named mask, by its definition."""
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
