"""A score as a product of three numbers per subspace, and the variance of such sums of products.

With every subspace a complex number, the score of query i and key j at distance d is

    W[d, i, j] = Re Σ_c  u_c(d) · q_c(i) · conj(k_c(j)),      u_c(d) = scale · factor² · exp(i θ_c d),

where coordinates that RoPE leaves alone form subspaces too, two by two, with ``u = scale``. Over *all* combinations
of distances, queries and keys the three factors are independent of each other, so every moment of their product is the
product of their moments. As ``Re x · Re y = ½ Re(x ȳ + x y)``, the variance that belongs to a set of factors is a sum
over pairs of subspaces of elementwise products of three small matrices, and of three more:

    ½ Re Σ_cc' ( U ∘ Q ∘ K + Ũ ∘ Q̃ ∘ K̃ )[c, c'].

A factor that takes part has its covariance here, ``Q[c, c'] = E[q_c conj(q_c')]`` and ``Q̃[c, c'] = E[q_c q_c']`` of
the centred queries (K of the conjugate keys); one that does not has the same products of its mean. Nothing else of
the data matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from .moment_merging import Spread, spread_of, total
from .moments import Moments
from .rotary import Rotary

Effect = Literal["distance", "query", "key", "distance:query", "distance:key", "query:key", "distance:query:key"]

_CHUNK = 2**21  # angles in one chunk


class Pair(NamedTuple):
    """For all pairs of subspaces, ``E[x_c conj(x_c')]`` and ``E[x_c x_c']``."""

    hermitian: Complex128[Tensor, "*head subspace subspace"]
    plain: Complex128[Tensor, "*head subspace subspace"]


class Factor(NamedTuple):
    """One of the three factors of a score, as far as variances go."""

    mean: Complex128[Tensor, "*head subspace"]
    of_mean: Pair
    cov: Pair

    @property
    def power(self) -> Float64[Tensor, "*head subspace"]:
        """Mean square in each subspace."""
        return (self.of_mean.hermitian + self.cov.hermitian).diagonal(dim1=-2, dim2=-1).real


class Factors(NamedTuple):
    """The factors of all heads of a layer. Query heads are ``[kv_head, group]``, so that they meet their key head."""

    distance: Factor
    query: Factor
    key: Factor

    def pair(self, effect: Effect) -> Pair:
        """The summands of an effect, ``[head, c, c']``: its variance is ``½ Re`` of the sum over all pairs and both."""
        taking_part = effect.split(":")
        u, q, k = (x.cov if name in taking_part else x.of_mean for name, x in self._asdict().items())
        hermitian, plain = (a * b * c for a, b, c in zip(u, q, k, strict=True))
        return Pair(hermitian.flatten(0, 1), plain.flatten(0, 1))

    def mean(self) -> Float64[Tensor, "head"]:
        """Mean score over all combinations."""
        return (self.distance.mean * self.query.mean * self.key.mean).sum(-1).real.flatten()

    def reach(self) -> Float64[Tensor, "head"]:
        """No mean square of scores is larger (Cauchy–Schwarz); what is tiny beside it is rounding."""
        vectors = self.query.power.sum(-1) * self.key.power.sum(-1)
        return (self.distance.power.amax(-1) * vectors).flatten()


@torch.no_grad()
def read_factors(
    moments: Moments, distances: Float64[Tensor, "distance"], weights: Float64[Tensor, "distance"], scale: float
) -> Factors:
    """The factors' means and covariances; the key's are those of its conjugate, so that all three multiply."""
    d_head, rotary = moments.query.mean.shape[-1], moments.rotary
    used = weights > 0
    turned = _rotations(rotary, distances[used], weights[used], -(-d_head // 2), scale)
    u = _factor(total(turned))
    q, k = _factor(moments.query), _factor(moments.key)
    groups = len(moments.key.mean), -1
    query = Factor(q.mean.unflatten(0, groups), *(Pair(*(x.unflatten(0, groups) for x in pair)) for pair in q[1:]))
    key = Factor(k.mean[:, None].conj(), *(Pair(*(x[:, None].conj() for x in pair)) for pair in k[1:]))
    return Factors(u, query, key)


def all_frequencies(moments: Moments) -> Float64[Tensor, "subspace"]:
    """θ of every subspace of the factors: 0 for the coordinates that RoPE leaves alone, two to a subspace."""
    rest = moments.query.mean.shape[-1] - moments.rotary.dim
    return torch.nn.functional.pad(moments.rotary.frequencies, (0, -(-rest // 2)))


def _rotations(rotary: Rotary, distances: Tensor, weights: Tensor, n_subspaces: int, scale: float) -> Iterator[Spread]:
    step = max(1, _CHUNK // n_subspaces)
    for d, w in zip(distances.split(step), weights.split(step), strict=True):
        angle = rotary.angles(d)
        u = torch.full((len(d), n_subspaces), scale, dtype=torch.complex128, device=d.device)
        u[:, : angle.shape[1]] = scale * rotary.attention_factor**2 * torch.polar(torch.ones_like(angle), angle)
        yield spread_of(torch.view_as_real(u).flatten(1)[:, None], w)


def _factor(spread: Spread) -> Factor:
    odd = spread.mean.shape[-1] % 2  # a last un-rotated coordinate stands alone in its subspace
    mean = torch.nn.functional.pad(spread.mean, (0, odd)).unflatten(-1, (-1, 2))
    z = torch.view_as_complex(mean)
    of_mean = Pair(z[..., :, None] * z[..., None, :].conj(), z[..., :, None] * z[..., None, :])
    return Factor(z, of_mean, _complex_pair(torch.nn.functional.pad(spread.cov, (0, odd, 0, odd))))


def _complex_pair(cov: Float64[Tensor, "*head coordinate coordinate"]) -> Pair:
    """From real coordinates x = a + ib, y = c + id: x ȳ = ac + bd + i(bc − ad), x y = ac − bd + i(bc + ad)."""
    ac, ad = cov[..., ::2, ::2], cov[..., ::2, 1::2]
    bc, bd = cov[..., 1::2, ::2], cov[..., 1::2, 1::2]
    return Pair(torch.complex(ac + bd, bc - ad), torch.complex(ac - bd, bc + ad))
