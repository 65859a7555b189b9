"""Positional–symbolic plane: how far a head's scores stay with the place, and how far they travel with the key.

For query i let ``x[p, j]`` be the score that key j would have at place p ≤ i. Shuffling the keys among their places
picks one entry of every row and column of this table. Scores that stay where they are (*positional*) depend on the row
alone, scores that travel with the keys (*symbolic*) on the column alone. Between two independent shuffles the scores at
the same place have the correlation ``Var(row means) / Var(x)``, the scores of the same key
``Var(column means) / Var(x)``; these are the head's two coordinates, and they add up to 1 at most.

The table is never formed. ``x[p, j] = φ(i - p)ᵀ f(q_i, k_j)`` with the rotation basis φ (a cosine and a sine for every
subspace) and f bilinear, so both variances are quadratic forms in the running means and covariances of φ and of the
keys: O(length · d²) for all queries together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from jaxtyping import Complex, Float, Float64
from torch import Tensor

from tl_posdisent.additive.score_checks import check_queries_and_keys
from tl_posdisent.utils.precision import own_sums
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_flag

from .rotary import Rotary, check_rotary, to_complex

_QUERIES_AT_ONCE = 64
_ROUNDING = 1e-12  # scores that vary by less than this of their size do not vary


@own_sums()
def positional_symbolic_qk(
    q: Float[Tensor, "*batch pos head d_head"],
    k: Float[Tensor, "*batch pos kv d_head"],
    rotary: Rotary,
    *,
    by_subspace: bool = False,
) -> pd.DataFrame:
    """Compute each head's point in the positional–symbolic plane of arXiv 2511.11579, without sampling.

    Queries see the keys at places 0 … i (causal); the first query, which sees one key, is left out.

    Args:
        q: queries before rotation, ``[*batch, pos, head, d_head]``.
        k: keys likewise, ``[*batch, pos, kv_head, d_head]``; query head h reads key head ``h // (head // kv_head)``.
        rotary: the layer's rotation. The scale of the scores does not matter.
        by_subspace: one row for each rotary subspace instead, for the scores of that subspace alone.

    Returns:
        One row per text and head (and subspace): ``batch``, ``head``, (``subspace``, ``frequency``,) ``positional``
        and ``symbolic``, means over queries, each 0 … 1: how far the scores depend on the place alone, and on the key
        alone. Their sum is at most 1, the rest depends on both together. NaN where scores vary for no query.

    Raises:
        ValueError: shapes that do not fit, fewer than two positions, values that are not finite.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, positional_symbolic_qk
        >>> rotary = Rotary(torch.tensor([1.0, 0.0], dtype=torch.float64))  # one subspace turns, one does not
        >>> q, k = torch.ones(40, 1, 4), torch.ones(40, 1, 4)
        >>> positional_symbolic_qk(q, k, rotary)  # all keys are alike: only the place can matter
           head  positional  symbolic
        0     0         1.0       0.0
    """
    check_queries_and_keys(q=q, k=k)
    if q.shape[-3] != k.shape[-3]:
        raise ValueError(f"q and k must have as many positions, got {tuple(q.shape)} and {tuple(k.shape)}")
    check_rotary(rotary)
    check_flag("by_subspace", by_subspace)
    *batch, _, n_heads, _ = q.shape
    n, sides = rotary.dim // 2, []
    for x in (q, k):  # every coordinate that is not rotated becomes a subspace that never turns
        z, rest = to_complex(x.double().reshape(-1, *x.shape[-3:]), rotary)
        sides.append(torch.cat([z, rest.to(z.dtype)], -1))
    queries, keys = sides
    queries[..., :n] *= rotary.attention_factor**2
    theta = torch.nn.functional.pad(rotary.frequencies.to(q.device), (0, queries.shape[-1] - n))
    texts = zip(queries.movedim(2, 1), keys.movedim(2, 1), strict=True)
    points = torch.stack([_points(x, y, theta, alone=by_subspace) for x, y in texts])
    points = points.permute(0, 3, 2, 1).reshape(*batch, n_heads, -1, 2)
    points = points[..., :n, :] if by_subspace else points
    index = index_columns((*batch, n_heads), repeat=points.shape[-2])
    if by_subspace:
        repeats = points[..., 0, 0].numel()
        index |= {"subspace": [*range(n)] * repeats, "frequency": rotary.frequencies.tolist() * repeats}
    values = points.flatten(0, -2).T.tolist()
    return pd.DataFrame({**index, "positional": values[0], "symbolic": values[1]})


def _points(
    q: Complex[Tensor, "head pos subspace"],
    k: Complex[Tensor, "kv pos subspace"],
    theta: Float64[Tensor, " subspace"],
    *,
    alone: bool,
) -> Float64[Tensor, "2 parts head"]:
    """Average both shares over queries; ``parts`` are the single subspaces or, unless ``alone``, the whole score."""
    grouped = q.unflatten(0, (len(k), -1)).transpose(1, 2)  # of each position, the query heads of a key head
    distance = torch.arange(k.shape[1], device=k.device).double()
    turns = torch.polar(torch.ones_like(distance)[:, None], distance[:, None] * theta)
    centre = k.mean(1, keepdim=True)  # far from 0, it would cost the covariances their digits
    sums = torch.zeros(2, len(k), grouped.shape[2], q.shape[-1] if alone else 1, dtype=torch.float64, device=q.device)
    count = torch.zeros_like(sums[0])
    for (block, key, key_second), (_, turn, turn_second) in zip(
        _running_moments(k - centre), _running_moments(turns[None]), strict=True
    ):
        x = grouped[:, block]
        key_spread, turn_spread = _covariances(key, key_second), _covariances(turn, turn_second)
        by_place = _variance(x * (key + centre)[:, :, None].conj(), turn_spread, alone)  # of the row means
        by_key = _variance((x * turn[:, :, None]).conj(), key_spread, alone)  # of the column means
        # The rest: in each row the place is fixed and the key varies.
        within = _variance(x.conj(), [a * b.conj() for a, b in zip(key_spread, turn_second, strict=True)], alone)
        total = by_place + within
        size = key_second[0].diagonal(dim1=-2, dim2=-1).real.sqrt() + centre.abs()
        largest = (x.abs() * size[:, :, None]) ** 2
        largest = largest if alone else largest.sum(-1, keepdim=True)
        varies = (total > _ROUNDING**2 * largest).double()
        shares = [torch.where(varies > 0, v / total, 0.0) for v in (by_place, by_key)]
        sums += torch.stack(shares).sum(2)
        count += varies.sum(1)
    return (sums / count).flatten(1, 2).mT


def _running_moments(x: Complex[Tensor, "*head pos n"]) -> Iterator[tuple[slice, Tensor, tuple[Tensor, Tensor]]]:
    """Yield, for blocks of positions, mean, ``mean(x xᴴ)`` and ``mean(x xᵀ)`` over all positions up to each."""
    carried: list[Tensor | float] = [0.0, 0.0, 0.0]
    for start in range(0, x.shape[-2], _QUERIES_AT_ONCE):
        block = slice(start, min(start + _QUERIES_AT_ONCE, x.shape[-2]))
        column, row = x[..., block, :][..., :, None], x[..., block, :][..., None, :]
        number = torch.arange(block.start + 1, block.stop + 1, device=x.device).double()
        mean, hermitian, symmetric = (
            (carry + new.flatten(-2).cumsum(-2).unflatten(-1, new.shape[-2:])) / number[:, None, None]
            for carry, new in zip(carried, (column, column * row.conj(), column * row), strict=True)
        )
        carried = [m[..., -1:, :, :] * number[-1] for m in (mean, hermitian, symmetric)]
        yield block, mean[..., 0], (hermitian, symmetric)


def _covariances(mean: Tensor, second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    column, row = mean[..., :, None], mean[..., None, :]
    return second[0] - column * row.conj(), second[1] - column * row


def _variance(
    w: Complex[Tensor, "kv pos group n"], second: Sequence[Tensor], alone: bool
) -> Float64[Tensor, "kv pos group parts"]:
    """Variance of ``Re Σ_c w_c y_c``, or of each term ``alone``, given the covariances of complex y."""
    hermitian, symmetric = second
    if alone:
        of_terms = [x.diagonal(dim1=-2, dim2=-1)[:, :, None] for x in second]
        return (w.abs() ** 2 * of_terms[0] + w**2 * of_terms[1]).real / 2
    rows = w if len(hermitian) == len(w) else w.transpose(0, 1).flatten(1, 2)[None]  # covariances that all heads share
    along = (rows @ hermitian) * rows.conj() + (rows @ symmetric) * rows
    along = along if rows is w else along[0].unflatten(1, (len(w), -1)).transpose(0, 1)
    return along.sum(-1, keepdim=True).real / 2
