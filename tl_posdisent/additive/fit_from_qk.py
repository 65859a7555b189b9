"""Additive fit from queries and keys, without the scores: time O(length · d²), memory O(length · d).

All that the fit needs to know of the scores (``Marginals``) can be computed from the vectors: row and column sums by
cumulative sums, sums along diagonals by a Fourier transform, the sum of squares by Gram matrices of blocks of keys.

The vectors are centred first. With ``u = q - q̄`` and ``v = k - k̄`` the score is ``u_i·v_j + q_i·k̄ + q̄·v_j``. The
last two terms already are a query and a key component: their marginals are known exactly, and no large terms are left
to cancel in the squares, however nearly additive the scores are.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.fit import fit_marginals
from tl_posdisent.additive.marginals import Marginals
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_checks import check_pool, check_queries_and_keys
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_number

_BLOCK_SIDE = 256  # side of a block of queries and keys; blocks that are partly masked are computed cell by cell
_COORDINATES_AT_ONCE = 8  # coordinates that are summed and transformed at a time, so that their data stays in cache


@torch.no_grad()
def fit_additive_qk(
    q_rot: Float[Tensor, "*batch query head d_head"],
    k_rot: Float[Tensor, "*batch key kv d_head"],
    *,
    scale: float,
    mask: MaskKind = "causal",
    window: int | None = None,
    pool: bool = False,
) -> AdditiveFit:
    """Fit the scores ``scale · ⟨q_rot[i], k_rot[j]⟩`` as ``fit_additive`` does, without forming them.

    The numbers are the same up to rounding, and need far less memory: at 131 072 tokens one head's scores take 64 GiB,
    its queries and keys 128 MiB. Scores with a bias or a soft cap are not inner products and need ``fit_additive``.

    Args:
        q_rot: rotated queries ``[*batch, query, head, d_head]``, as ``capture`` yields them.
        k_rot: rotated keys ``[*batch, key, kv_head, d_head]``; query head h reads key head ``h // (head // kv_head)``.
        scale: factor of the inner products, usually ``d_head ** -0.5`` (``AttentionSpec.scale``).
        mask: ``"causal"`` or ``"full"``.
        window, pool: as in ``fit_additive``; pooling is over the first batch axis.

    Returns:
        An ``AdditiveFit`` with leading axes ``*batch head``.

    Raises:
        ValueError: shapes that do not match, vectors that are not finite, a boolean mask.

    Example:
        >>> import torch
        >>> from tl_posdisent import fit_additive, fit_additive_qk
        >>> q, k = torch.randn(2, 64, 4, 8), torch.randn(2, 64, 2, 8)  # two texts, four heads on two key heads
        >>> scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
        >>> bool(torch.allclose(fit_additive_qk(q, k, scale=8**-0.5).r, fit_additive(scores).r, atol=1e-6))
        True
    """
    if not isinstance(mask, str):
        raise ArgumentError("mask", 'must be "causal" or "full"; for other masks use fit_additive, with scores')
    check_queries_and_keys(q_rot=q_rot, k_rot=k_rot)
    check_number("scale", scale)
    check_pool(pool, "q_rot", q_rot, 3)
    *batch, n_query, n_heads, _ = q_rot.shape
    n_key, n_kv = k_rot.shape[-3:-1]
    cells = make_cells((*batch, n_heads, n_query, n_key), mask, window, device=q_rot.device)
    queries, keys = (x.reshape(-1, *x.shape[-3:]) for x in (q_rot, k_rot))
    groups = queries.unflatten(2, (n_kv, -1))
    parts = [
        _read_group(groups[text, :, head].movedim(1, 0).double() * scale, keys[text, :, head].double(), cells)
        for text in range(len(queries))
        for head in range(n_kv)
    ]
    pivot, sums, squares, size = (torch.cat(x) for x in zip(*parts, strict=True))
    shape = (*batch, n_heads)
    read = Marginals(pivot.reshape(shape), sums.reshape(*shape, -1), squares.reshape(shape))
    return fit_marginals(read, cells, pool=pool, size=size.reshape(shape))


def _read_group(
    q: Float64[Tensor, "head query d"], k: Float64[Tensor, "key d"], cells: Cells
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute pivot, marginal sums, sum of squares and size ``|q|·|k|`` for the query heads of one key head."""
    size = q.square().sum(-1).mean(-1).sqrt() * k.square().sum(-1).mean().sqrt()
    q_mean, k_mean = q.mean(1, keepdim=True), k.mean(0)
    of_query = q @ k_mean
    u, v = q - q_mean, k - k_mean
    of_key = (q_mean @ v.T)[:, 0]
    pivot = of_query.mean(-1)
    # The known components as coefficients of the model, whose marginals need no scores either.
    zero = q.new_zeros(len(q), cells.n_distance)
    known = torch.cat([zero, of_query - pivot[:, None], of_key], -1)
    sums = _bilinear_sums(u, v, cells)
    squares = _bilinear_squares(u, v, cells)
    known_sums = cells.product(known)
    squares = squares + (known * (2 * sums + known_sums)).sum(-1)
    return pivot, sums + known_sums, squares, size


def _bilinear_sums(
    u: Float64[Tensor, "head query d"], v: Float64[Tensor, "key d"], cells: Cells
) -> Float64[Tensor, "head coefficient"]:
    """Sum ``u_i·v_j`` over the cells of each distance, query and key, stacked."""
    i = torch.arange(cells.n_query, device=u.device) + cells.offset
    j = torch.arange(cells.n_key, device=u.device) - cells.offset
    length = 1 << (cells.n_query + cells.n_key - 1).bit_length()
    by_query, by_key = u.new_zeros(len(u), cells.n_query), u.new_zeros(len(u), cells.n_key)
    spectrum = torch.zeros(len(u), length // 2 + 1, dtype=torch.complex128, device=u.device)
    for column in range(0, u.shape[-1], _COORDINATES_AT_ONCE):
        x, y = (z[..., column : column + _COORDINATES_AT_ONCE].contiguous() for z in (u, v))
        by_query += (x * _span_sums(y, i - cells.high, i - cells.low + 1)).sum(-1)
        by_key += (y * _span_sums(x, j + cells.low, j + cells.high + 1)).sum(-1)
        # Σ_i u_i·v_{i + offset - d} for every d is a correlation: a product of Fourier transforms.
        spectrum += (torch.fft.rfft(x, length, dim=1) * torch.fft.rfft(y, length, dim=0).conj()).sum(-1)
    by_distance = torch.fft.irfft(spectrum, length)[:, (cells.distances - cells.offset) % length]
    return torch.cat([by_distance, by_query, by_key], -1)


def _span_sums(x: Float64[Tensor, "*head n d"], start: Tensor, stop: Tensor) -> Float64[Tensor, "*head span d"]:
    """Sum ``x`` over the half-open spans ``start … stop``, clipped to the axis."""
    n = x.shape[-2]
    total = torch.nn.functional.pad(x.cumsum(-2), (0, 0, 1, 0))
    start = start.clamp(0, n)
    return total[..., torch.maximum(stop.clamp(0, n), start), :] - total[..., start, :]


def _bilinear_squares(
    u: Float64[Tensor, "head query d"], v: Float64[Tensor, "key d"], cells: Cells
) -> Float64[Tensor, " head"]:
    """Sum ``(u_i·v_j)²``, with the Gram matrix of each block of keys that a block of queries sees completely."""
    blocks = v.split(_BLOCK_SIDE)
    # Cumulative sums of the blocks' Gram matrices, held once: for a long text they take the most memory.
    total = v.new_zeros(len(blocks) + 1, v.shape[-1], v.shape[-1])
    for n, keys in enumerate(blocks):
        torch.addmm(total[n], keys.T, keys, out=total[n + 1])
    squares = u.new_zeros(len(u))
    for row in range(0, cells.n_query, _BLOCK_SIDE):
        stop = min(row + _BLOCK_SIDE, cells.n_query)
        block = u[:, row:stop]
        whole, partial = _key_blocks(cells, row, stop)
        if whole.stop > whole.start:
            squares += (block @ (total[whole.stop] - total[whole.start]) * block).sum((-2, -1))
        for key in partial:
            columns = slice(key * _BLOCK_SIDE, min((key + 1) * _BLOCK_SIDE, cells.n_key))
            scores = block @ v[columns].T
            squares += scores.square().mul_(cells.inside(slice(row, stop), columns)).sum((-2, -1))
    return squares


def _key_blocks(cells: Cells, row: int, stop: int) -> tuple[range, list[int]]:
    """Return the blocks of keys that all queries ``row … stop`` see completely, and those that they see in part."""
    first, last = row + cells.offset, stop - 1 + cells.offset
    seen = range(max(0, first - cells.high), min(cells.n_key, last - cells.low + 1))
    by_all = range(max(0, last - cells.high), min(cells.n_key, first - cells.low + 1))
    if len(seen) == 0:
        return range(0), []
    touched = range(seen.start // _BLOCK_SIDE, math.ceil(seen.stop / _BLOCK_SIDE))
    inner_stop = math.ceil(by_all.stop / _BLOCK_SIDE) if by_all.stop == cells.n_key else by_all.stop // _BLOCK_SIDE
    whole = range(math.ceil(by_all.start / _BLOCK_SIDE), inner_stop)
    return whole, [b for b in touched if b not in whole]
