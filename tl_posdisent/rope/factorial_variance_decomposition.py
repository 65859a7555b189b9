"""Factorial variance decomposition (ANOVA) of attention scores at controlled distances, by distance, query and key.

The computation itself, from the moments of queries and keys. ``controlled_distance`` in ``experiments`` applies it to
the heads of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.tables import HasTable, index_columns, with_ends
from tl_posdisent.utils.tensor_checks import Numbers
from tl_posdisent.utils.validation import check_choice, check_number
from tl_posdisent.utils.words import plural

from .moments import Moments, Spread, check_distances, spread_of, total
from .rotary import Rotary

# A score as a product of three numbers per subspace, and the variance of such sums of products.
#
# With every subspace a complex number, the score of query i and key j at distance d is
#
#     W[d, i, j] = Re Σ_c  u_c(d) · q_c(i) · conj(k_c(j)),      u_c(d) = scale · factor² · exp(i θ_c d),
#
# where coordinates that RoPE leaves alone form subspaces too, two by two, with ``u = scale``. Over *all* combinations
# of distances, queries and keys the three factors are independent of each other, so every moment of their product is
# the product of their moments. As ``Re x · Re y = ½ Re(x ȳ + x y)``, the variance that belongs to a set of factors is a
# sum over pairs of subspaces of elementwise products of three small matrices, and of three more:
#
#     ½ Re Σ_cc' ( U ∘ Q ∘ K + Ũ ∘ Q̃ ∘ K̃ )[c, c'].
#
# A factor that takes part has its covariance here, ``Q[c, c'] = E[q_c conj(q_c')]`` and ``Q̃[c, c'] = E[q_c q_c']`` of
# the centred queries (K of the conjugate keys); one that does not has the same products of its mean. Nothing else of
# the data matters.

Component = Literal["distance", "query", "key", "distance:query", "distance:key", "query:key", "distance:query:key"]

ANGLES_AT_ONCE = 2**21


class Pair(NamedTuple):
    """For all pairs of subspaces, ``E[x_c conj(x_c')]`` and ``E[x_c x_c']``."""

    hermitian: Complex128[Tensor, "*head subspace subspace"]
    plain: Complex128[Tensor, "*head subspace subspace"]


class Factor(NamedTuple):
    """One of the three factors of a score: its mean and covariance."""

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

    def pair(self, component: Component) -> Pair:
        """Return the summands of a component, ``[head, c, c']``: its variance is ``½ Re`` of the sum of all in both."""
        taking_part = component.split(":")
        u, q, k = (x.cov if name in taking_part else x.of_mean for name, x in self._asdict().items())
        hermitian, plain = (a * b * c for a, b, c in zip(u, q, k, strict=True))
        return Pair(hermitian.flatten(0, 1), plain.flatten(0, 1))

    def mean(self) -> Float64[Tensor, " head"]:
        """Compute the mean score over all combinations."""
        return (self.distance.mean * self.query.mean * self.key.mean).sum(-1).real.flatten()

    def reach(self) -> Float64[Tensor, " head"]:
        """Upper bound of the mean square of the scores (Cauchy–Schwarz); anything tiny in comparison is rounding."""
        vectors = self.query.power.sum(-1) * self.key.power.sum(-1)
        return (self.distance.power.amax(-1) * vectors).flatten()


@torch.no_grad()
def read_factors(moments: Moments, distances: Numbers, scale: float) -> Factors:
    """Compute the factors' means and covariances; the key's are those of its conjugate, so that all three multiply."""
    d, n_subspaces = check_distances(moments, distances), -(-moments.query.mean.shape[-1] // 2)
    u = _factor(total(_rotations(moments.rotary, d, n_subspaces, check_number("scale", scale))))
    q, k = _factor(moments.query), _factor(moments.key)
    groups = len(moments.key.mean), -1
    query = Factor(q.mean.unflatten(0, groups), *(Pair(*(x.unflatten(0, groups) for x in pair)) for pair in q[1:]))
    key = Factor(k.mean[:, None].conj(), *(Pair(*(x[:, None].conj() for x in pair)) for pair in k[1:]))
    return Factors(u, query, key)


def _rotations(rotary: Rotary, distances: Tensor, n_subspaces: int, scale: float) -> Iterator[Spread]:
    step = max(1, ANGLES_AT_ONCE // n_subspaces)
    for d in distances.split(step):
        angle = rotary.angles(d)
        u = torch.full((len(d), n_subspaces), scale, dtype=torch.complex128, device=d.device)
        u[:, : angle.shape[1]] = scale * rotary.attention_factor**2 * torch.polar(torch.ones_like(angle), angle)
        yield spread_of(torch.view_as_real(u).flatten(1)[:, None])


def _factor(spread: Spread) -> Factor:
    odd = spread.mean.shape[-1] % 2  # a last un-rotated coordinate stands alone in its subspace
    mean = torch.nn.functional.pad(spread.mean, (0, odd)).unflatten(-1, (-1, 2))
    z = torch.view_as_complex(mean)
    of_mean = Pair(z[..., :, None] * z[..., None, :].conj(), z[..., :, None] * z[..., None, :])
    return Factor(z, of_mean, _complex_pair(torch.nn.functional.pad(spread.cov, (0, odd, 0, odd))))


def _complex_pair(cov: Float64[Tensor, "*head coordinate coordinate"]) -> Pair:
    """Compute the pair from the covariance of real coordinates.

    With x = a + ib and y = c + id, x ȳ = ac + bd + i(bc − ad) and x y = ac − bd + i(bc + ad).
    """
    ac, ad = cov[..., ::2, ::2], cov[..., ::2, 1::2]
    bc, bd = cov[..., 1::2, ::2], cov[..., 1::2, 1::2]
    return Pair(torch.complex(ac + bd, bc - ad), torch.complex(ac - bd, bc + ad))


COMPONENTS: tuple[Component, ...] = get_args(Component)
"""Names of the components of a variance decomposition: distance, query, key and their interactions."""

_ROUNDING = 1e-14  # scores that vary by less than this, for vectors of their length, do not vary


@dataclass(frozen=True, eq=False, repr=False)
class VarianceShares(HasTable):
    """Factorial variance decomposition of the scores over all combinations of distances, queries and keys.

    All tensors are float64. Components are orthogonal: their variances add up to the total.

    Attributes:
        mean: ``[head]``, mean score.
        variances: ``[component, head]``, population variances in the order of ``COMPONENTS``, in units of the scores
            squared.
        total: ``[head]``, variance of the scores; exactly 0 where they vary by rounding alone.
    """

    mean: Float64[Tensor, " head"]
    variances: Float64[Tensor, "component head"]
    total: Float64[Tensor, " head"]

    @property
    def shares(self) -> Float64[Tensor, "component head"]:
        """Variances over the total, which sum to 1; NaN where the scores do not vary."""
        return share_of(self.variances, self.total)

    def variance(self, component: Component) -> Float64[Tensor, " head"]:
        """Return one component's variance for every head."""
        check_choice("component", component, COMPONENTS)
        return self.variances[COMPONENTS.index(component)]

    def share(self, component: Component) -> Float64[Tensor, " head"]:
        """Return one component's share of the variance for every head, 0…1."""
        check_choice("component", component, COMPONENTS)
        return self.shares[COMPONENTS.index(component)]

    @property
    def r_three_axis(self) -> Float64[Tensor, " head"]:
        """Correlation of the scores with their best fit ``a(distance) + b(query) + c(key)``."""
        return (self.share("distance") + self.share("query") + self.share("key")).clamp(0, 1).sqrt()

    @property
    def r_two_axis(self) -> Float64[Tensor, " head"]:
        """Correlation of the scores with their best fit ``f(query, distance) + g(query, key)``."""
        return (1 - self.share("distance:key") - self.share("distance:query:key")).clamp(0, 1).sqrt()

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per head: ``mean``, ``total``, both r, and the share of each component.

        The shares of distance, query and key alone come last.
        """
        columns = {"mean": self.mean, "total": self.total}
        columns |= {"r_three_axis": self.r_three_axis, "r_two_axis": self.r_two_axis}
        columns |= dict(zip(COMPONENTS, self.shares, strict=True))
        table = {**index_columns(self.total.shape), **{name: x.tolist() for name, x in columns.items()}}
        return with_ends(pd.DataFrame(table), (), ["distance", "query", "key"])

    def plot(self, **options: Any) -> Any:
        """Plot the shares of each head, stacked: ``plot_shares``, with its options."""
        return public_name("viz", "plot_shares")(self.to_frame(), **options)

    def __repr__(self) -> str:
        named: list[tuple[str, Tensor]] = [*zip(COMPONENTS, self.shares, strict=True)]
        named += [("\n  r three-axis", self.r_three_axis), ("r two-axis", self.r_two_axis)]
        means = "   ".join(f"{name} {x.nanmean().item():.3f}" for name, x in named)
        return f"VarianceShares of {plural(len(self.total), 'head')}, on average:\n  {means}"


def decompose(moments: Moments, distances: Numbers, *, scale: float) -> VarianceShares:
    """Decompose the variance of the scores over all combinations of these distances, queries and keys, exactly.

    Each pair's score is taken at every distance (arXiv 2503.13305, §3),
    ``W[d, i, j] = scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c d))`` with RoPE's subspaces c as complex numbers, and

        W[d, i, j] = mean + a_d + b_i + c_j + (ab)_di + (ac)_dj + (bc)_ij + (abc)_dij,

    each term with mean 0 over each of its indices; a component's variance is the mean square of its term. W is never
    formed: the cost grows with ``d_head²`` and not with the number of queries and keys.

    Args:
        moments: of queries and keys, possibly summed over many texts.
        distances: query position minus key position in tokens: any finite numbers, 1-D; one that is given several
            times counts as often.
        scale: what the model multiplies ``⟨q, k⟩`` by, usually ``d_head ** -0.5``.

    Returns:
        ``VarianceShares``: variance and share of each component per query head, ``r_three_axis``, ``r_two_axis``.

    Raises:
        ValueError: distances or a scale that are not finite; none.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Moments, Rotary, decompose
        >>> rotary = Rotary(torch.tensor([torch.pi / 4, 1e-6], dtype=torch.float64), "adjacent")
        >>> angle = torch.arange(8) * torch.pi / 4
        >>> same = torch.tensor([1.0, 0.0]).expand(8, 2)  # a constant in the plane that turns,
        >>> content = torch.stack([angle.cos(), angle.sin()], -1)  # and content in the one that does not
        >>> q = k = torch.cat([same, content], -1)[:, None]  # 8 tokens, one head
        >>> shares = decompose(Moments.from_qk(q, k, rotary), range(64), scale=0.5)
        >>> shares.to_frame().round(3)[["distance", "query:key", "distance:key"]].values.tolist()
        [[0.5, 0.5, 0.0]]
    """
    return decompose_factors(read_factors(moments, distances, scale))


def decompose_factors(factors: Factors) -> VarianceShares:
    """Decompose the variance of a sum of products of three independent complex numbers."""
    pairs = [factors.pair(component) for component in COMPONENTS]
    variances = torch.stack([(x + y).sum((-2, -1)).real / 2 for x, y in pairs]).clamp(min=0)
    constant = variances.sum(0) <= _ROUNDING**2 * factors.reach()
    variances = torch.where(constant, 0.0, variances)
    return VarianceShares(factors.mean(), variances, variances.sum(0))


def share_of(part: Tensor, total: Tensor) -> Tensor:
    """``part / total``, NaN where there is nothing to share."""
    return torch.where(total > 0, part / total, torch.nan)
