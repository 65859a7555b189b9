"""Distance patterns in each rotary subspace: sizes, phases and variance shares; which subspaces break additivity."""

from __future__ import annotations

import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tl_posdisent.rope.factorial_variance_decomposition import (
    COMPONENTS,
    decompose_factors,
    read_factors,
    share_of,
)
from tl_posdisent.rope.moments import Moments, Spread, check_distances, chunks, spread_of, total
from tl_posdisent.rope.rotary import Rotary, to_complex
from tl_posdisent.utils.tables import index_columns, with_ends
from tl_posdisent.utils.tensor_checks import Numbers


@torch.no_grad()
def subspace_patterns_qk(
    q: Float[Tensor, "*n_q head d_head"],
    k: Float[Tensor, "*n_k kv_head d_head"],
    rotary: Rotary,
    distances: Numbers,
    *,
    scale: float,
) -> pd.DataFrame:
    """Measure the distance patterns of arXiv 2503.13305 (Observation 1, Theorem 2) in one layer's queries and keys.

    Scores are additive in position and content if every subspace either hardly turns over the distances (slow: it can
    carry content) or has nearly equal keys (concentrated: it can carry position).

    Args:
        q, k, rotary: as in ``Moments.from_qk``.
        distances, scale: as in ``decompose``.

    Returns:
        One row per query head and subspace c, in which vectors are complex numbers z. Coordinates that RoPE does not
        rotate follow, two by two, at frequency 0; which two make a pair is arbitrary, so their phases
        and concentrations are NaN.

        * ``head``, ``subspace``, ``frequency`` (θ, radians per position), ``wavelength``, the last column but one;
        * ``turn``: standard deviation of ``exp(i θ_c d)`` over the distances, 0 … 1;
        * ``query_…`` and ``key_size`` (mean of ``|z|``), ``variation`` (standard deviation of ``|z|`` over its mean),
          ``phase`` (``arg E[z]``, radians) and ``concentration`` (``|E[z]| / E[|z|]``, 0 … 1);
          ``E|z - E z|² = size² (1 + variation² - concentration²)``;
        * ``relative_phase``: phase of the mean of ``q_c · conj(k_c)`` over all pairs, -π … π;
        * ``distance``, ``semantic``, ``interaction``: shares of the scores' variance at controlled distances:
          ``distance``; ``query``, ``key`` and ``query:key`` together; and the three other components together. Summed
          over subspaces and all three, they are 1. A covariance of two subspaces is split equally between them, so a
          share is negative where a subspace cancels more of the others' variance than it adds;
        * ``spread``: size of the mean query × standard deviation of the key × ``turn``, with scale and attention
          factor, in standard deviations of the scores. The square of their sum over subspaces bounds the share of
          ``distance:key`` (by the triangle inequality and Cauchy–Schwarz).

    Raises:
        ValueError: as ``Moments.from_qk`` and ``decompose``.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Rotary, subspace_patterns_qk
        >>> rotary = Rotary(torch.tensor([1.0], dtype=torch.float64))
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[:, None]  # two keys of length 1, a right angle apart
        >>> table = subspace_patterns_qk(torch.tensor([[[0.0, 2.0]]]), k, rotary, range(8), scale=1.0)
        >>> table[["key_size", "key_phase", "key_concentration", "relative_phase"]].round(3).values.tolist()
        [[1.0, 0.785, 0.707, 0.785]]
    """
    moments = Moments.from_qk(q, k, rotary)
    factors = read_factors(moments, distances, scale)
    variance, group = decompose_factors(factors).total[:, None], q.shape[-2] // k.shape[-2]
    columns = {f"query_{name}": x for name, x in _side(q, moments.query, rotary).items()}
    columns |= {f"key_{name}": x.repeat_interleave(group, 0) for name, x in _side(k, moments.key, rotary).items()}
    relative = columns["query_phase"] - columns["key_phase"]
    columns["relative_phase"] = torch.remainder(relative + torch.pi, 2 * torch.pi) - torch.pi
    # Pairs are symmetric, so a row sum is each subspace's own term plus half of its covariance with every other.
    parts = torch.stack([torch.add(*factors.pair(name)).real.sum(-1) / 2 for name in COMPONENTS])
    semantic = [i for i, name in enumerate(COMPONENTS) if "distance" not in name]
    mixed = [i for i, name in enumerate(COMPONENTS) if name.startswith("distance:")]
    spreads = factors.pair("distance:key").hermitian.diagonal(dim1=-2, dim2=-1).real.clamp(min=0).sqrt()
    columns["spread"] = share_of(spreads, variance.sqrt())
    for column, components in (("distance", [0]), ("semantic", semantic), ("interaction", mixed)):
        columns[column] = share_of(parts[components].sum(0), variance)
    heads, n = columns["spread"].shape
    theta = torch.nn.functional.pad(rotary.frequencies, (0, n - len(rotary.frequencies)))
    of_all = {"frequency": theta, "wavelength": 2 * torch.pi / theta, "turn": _turn(moments, distances, n)}
    index = {**index_columns((heads,), repeat=n), "subspace": [*range(n)] * heads}
    index |= {name: x.tolist() * heads for name, x in of_all.items()}
    table = pd.DataFrame({**index, **{name: x.flatten().tolist() for name, x in columns.items()}})
    return with_ends(table, (), ["key_concentration", "wavelength", "distance"])


def _side(x: Tensor, vectors: Spread, rotary: Rotary) -> dict[str, Float64[Tensor, "head subspace"]]:
    """Compute size, variation, phase and concentration of queries or of keys."""
    pad, odd = torch.nn.functional.pad, x.shape[-1] % 2

    def magnitudes(part: Tensor) -> Float64[Tensor, "part head subspace"]:
        planes, rest = to_complex(part, rotary)
        pairs = pad(rest, (0, odd)).reshape(*rest.shape[:-1], (rest.shape[-1] + odd) // 2, 2)
        return torch.cat([planes.abs(), pairs.norm(dim=-1)], -1)

    spread = total(spread_of(magnitudes(part)) for part in chunks(x.detach()))
    size, deviation = spread.mean, spread.cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    mean = torch.view_as_complex(pad(vectors.mean, (0, odd)).unflatten(-1, (-1, 2)))
    phase, concentration = torch.where(size > 0, mean.angle(), torch.nan), share_of(mean.abs(), size).clamp(max=1)
    for values in (phase, concentration):
        values[:, len(rotary.frequencies) :] = torch.nan
    return {"size": size, "variation": share_of(deviation, size), "phase": phase, "concentration": concentration}


def _turn(moments: Moments, distances: Numbers, n: int) -> Float64[Tensor, " subspace"]:
    """Compute the standard deviation of ``exp(i θ d)``; exactly 0 for a subspace that does not turn."""
    angle = moments.rotary.angles(check_distances(moments, distances))
    points = torch.stack([angle.cos(), angle.sin()], -1)
    points = points - points[0]
    variance = (points - points.mean(0)).square().mean(0).sum(-1)
    return torch.nn.functional.pad(variance.sqrt(), (0, n - len(variance)))
