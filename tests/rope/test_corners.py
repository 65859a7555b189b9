"""Corners of maths/ that no other test turns: what is refused, what is empty, and laws of the smaller parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.covariance import LedoitWolf

from tl_posdisent import (
    Moments,
    decompose,
    fit_additive,
    fit_additive_qk,
    interaction_by_subspace,
    rope_capacity,
    score_correlation,
)
from tl_posdisent.additive.cells import Runs
from tl_posdisent.experiments.robustness.length_generalization import fit_typical
from tl_posdisent.rope import (
    EFFECTS,
    Rotary,
    VarianceShares,
    from_complex,
    interaction_bound,
    positional_symbolic_qk,
    rotary_from_table,
    rotate,
    subspace_patterns_qk,
    to_complex,
    toeplitz_share,
)
from tl_posdisent.rope.toeplitz import product_spectrum


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))


def some_moments() -> Moments:
    return Moments.from_qk(normal(12, 2, 4), normal(12, 2, 4, seed=1), ROTARY)


MOMENTS = some_moments()
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an effect that was not asked for": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, effects=["distance:key"]).share("query:key"),
        "effect must be one of distance:key, got 'query:key'",
    ),
    "one word for effects": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, effects="distance"),
        "effects must be a sequence of effects, got the one word 'distance'",
    ),
    "no effects": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, effects=[]),
        "effects must name at least one",
    ),
    "values of a table": (lambda: decompose(MOMENTS, range(4), scale=1.0).to_frame(values="sum"), "values must be"),
    "rows of a table": (lambda: interaction_bound(MOMENTS, range(4), scale=1.0).to_frame(rows="cell"), "rows must be"),
    "no moments": (lambda: decompose({}, range(4), scale=1.0), "moments must be Moments .* got dict"),
    "words for distances": (lambda: decompose(MOMENTS, ["far"], scale=1.0), "distances must be finite real numbers"),
    "a factor of nothing": (
        lambda: Rotary(ROTARY.frequencies, attention_factor=0.0),
        "attention_factor must be a",
    ),
    "angles in whole numbers": (
        lambda: Rotary(ROTARY.frequencies, angle_dtype=torch.int64),
        "angle_dtype must be",
    ),
    "real subspaces": (lambda: from_complex(normal(3, 2, 2), normal(3, 2, 0), ROTARY), "got torch.float64 of shape"),
    "a list for the rest": (lambda: from_complex(to_complex(normal(3, 2, 4), ROTARY)[0], [], ROTARY), "list"),
    "too few axes": (
        lambda: rotate(normal(3, 4), torch.arange(3), ROTARY),
        r"x must have shape \(\*batch, pos, hea",
    ),
    "a base for a rotation": (
        lambda: rotate(normal(3, 2, 4), torch.arange(3), 10000),
        "must be a Rotary, got int",
    ),
    "an array for vectors": (
        lambda: to_complex(normal(3, 2, 4).numpy(), ROTARY),
        "torch.Tensor, got ndarray",
    ),
    "a folder for a file": (lambda: Moments.from_file(Path.cwd()), "is no safetensors file, but a folder"),
    "whole numbers for cosines": (
        lambda: rotary_from_table(torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 2)),
        "cos must be a floating point torch.Tensor, got torch.int64",
    ),
    "vectors of other widths": (lambda: product_spectrum(normal(3, 2), normal(3, 4)), "q and k must have shapes"),
    "sparse scores": (lambda: fit_additive(normal(4, 4).to_sparse()), "scores must be dense .* call to_dense"),
    "scores without values": (lambda: fit_additive(torch.empty(4, 4, device="meta")), "meta tensor, which has no val"),
    "one vector": (lambda: fit_typical(normal(1, 3)), r"at least two finite vectors .* got shape \(1, 3\)"),
    "a vector with NaN": (lambda: fit_typical(normal(4, 3) * torch.nan), "got some that are not finite"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_refusals_say_what_is_needed(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("n", "d"), [(5, 8), (40, 3)])
def test_the_shrunk_covariance_is_that_of_ledoit_and_wolf(n: int, d: int) -> None:
    x = normal(2, n, d) * torch.arange(1.0, d + 1) + 3
    typical = fit_typical(x)
    for head in range(2):
        other = LedoitWolf().fit(x[head].numpy())
        torch.testing.assert_close(typical.covariance()[head], torch.from_numpy(other.covariance_))
        expected = torch.from_numpy(other.mahalanobis(x[head].numpy())).sqrt()
        torch.testing.assert_close(typical.distance(x)[head], expected)


def test_subspaces_know_their_wavelengths() -> None:
    patterns = subspace_patterns_qk(normal(12, 2, 4), normal(12, 2, 4, seed=1), ROTARY, range(4), scale=1.0)
    turns = patterns.wavelengths * patterns.frequencies
    torch.testing.assert_close(turns, torch.full_like(turns, 2 * torch.pi))


def test_queries_before_the_first_key_change_no_fit() -> None:
    """Whole blocks of queries without a cell: rows whose mask is empty are no data, wherever they stand."""
    scores, lone = normal(6, 6), 40
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    padded = torch.cat([normal(lone, 6, seed=2), scores])
    outside = torch.cat([torch.zeros(lone, 6, dtype=torch.bool), mask])
    fit, same = fit_additive(scores, mask=mask), fit_additive(padded, mask=outside)
    torch.testing.assert_close(fit.r, same.r)
    torch.testing.assert_close(fit.share_distance, same.share_distance)
    assert int(fit.n_cells) == int(same.n_cells) == 21


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fit_without_scores_is_the_fit_of_the_scores_across_blocks(seed: int) -> None:
    """At lengths on both sides of a block of keys, where an index that is off by one leaves or doubles a column."""
    for length in (2, 3, 127, 128, 129, 257):
        q, k = normal(length, 2, 3, seed=seed), normal(length, 1, 3, seed=seed + 5)
        scores = 0.5 * torch.einsum("ihd,jgd->hij", q, k)
        for mask in ("causal", "full"):
            one, other = fit_additive_qk(q, k, scale=0.5, mask=mask), fit_additive(scores, mask=mask)
            torch.testing.assert_close(one.r2, other.r2, rtol=1e-8, atol=1e-10, equal_nan=True)
            torch.testing.assert_close(one.key, other.key, rtol=1e-7, atol=1e-8)


def test_a_toeplitz_matrix_is_all_toeplitz_and_an_anti_one_as_little_as_chance() -> None:
    i = torch.arange(30)
    by_distance = normal(59)[i[:, None] - i + 29]
    torch.testing.assert_close(toeplitz_share(by_distance, mask="full"), torch.tensor(1.0, dtype=torch.float64))
    by_sum = normal(59)[i[:, None] + i]
    assert float(toeplitz_share(by_sum, mask="full")) < 0.2


def test_no_correlation_is_above_one_whatever_rounding_does() -> None:
    """Shares of a sum of parts add up to 1, or to a little more where the total was rounded down."""
    variances = torch.zeros(len(EFFECTS), 1, dtype=torch.float64)
    variances[:3, 0] = torch.tensor([0.3, 0.3, 0.4])
    shares = VarianceShares(torch.zeros(1, dtype=torch.float64), variances, variances.sum(0) * (1 - 1e-12))
    assert float(shares.r_three_axis) == 1
    assert float(shares.r_two_axis) == 1


LEARNT = normal(12, 2, 4).requires_grad_(), normal(12, 2, 4, seed=1).requires_grad_()
ATTENDED = torch.einsum("ihd,jhd->hij", *LEARNT)
MEASURED: dict[str, Callable[[], Any]] = {
    "fit_additive": lambda: fit_additive(ATTENDED),
    "fit_additive_qk": lambda: fit_additive_qk(*LEARNT, scale=1.0),
    "toeplitz_share": lambda: toeplitz_share(ATTENDED),
    "score_correlation": lambda: score_correlation(ATTENDED, ATTENDED * 2),
    "Moments.from_qk": lambda: Moments.from_qk(*LEARNT, ROTARY).query,
    "subspace_patterns_qk": lambda: subspace_patterns_qk(*LEARNT, ROTARY, range(4), scale=1.0),
    "positional_symbolic_qk": lambda: positional_symbolic_qk(*LEARNT, ROTARY),
    "rope_capacity": lambda: rope_capacity(ROTARY, range(8), LEARNT[0][:8, 0, 0]),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_holds_no_graph(name: str) -> None:
    """Or a table of results would keep every tensor of the model's pass alive."""
    result = MEASURED[name]()
    tensors = [result] if isinstance(result, torch.Tensor) else [x for x in vars(result).values() if torch.is_tensor(x)]
    assert tensors
    assert not any(x.requires_grad for x in tensors)


@pytest.mark.parametrize("n", [1, 3])
def test_capacity_says_of_how_many_dimensions_the_rank_is(n: int) -> None:
    """A frequency brings two functions of the distance, a cosine and a sine."""
    rotary = Rotary(torch.linspace(1, 0.2, n, dtype=torch.float64))
    best = rope_capacity(rotary, range(20), normal(20))
    assert best.rank == 2 * n
    assert f"rank {2 * n} of {2 * n}" in repr(best)


def test_one_huge_coefficient_leaves_the_sums_of_the_others_their_digits() -> None:
    """However large what came before: windows far from it are sums of small numbers and keep their precision."""
    n = 4000
    cells = Runs.band(n, n, 0, 1, "cpu")
    a, b, c = normal(2, seed=3), normal(n, seed=4), normal(n, seed=5)
    b[0] = c[0] = 1e12
    found = cells.split(cells.product(torch.cat([a, b, c])[None])[0]).query[2:]
    expected = a[0] + a[1] + 2 * b[2:] + c[2:] + c[1:-1]  # the two cells of each query
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_angles_that_do_not_grow_with_the_position_are_no_rotation() -> None:
    angle = torch.arange(64, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    table = rotary_from_table(angle.cos(), angle.sin())
    torch.testing.assert_close(table.frequencies, torch.tensor([1.0, 0.1], dtype=torch.float64))
    for bend in (0.1, 0.5, 0.9):  # radians, at one position that doubling from the first does not come by
        bent = angle.clone()
        bent[37] += bend
        with pytest.raises(ValueError, match="its angles do not grow linearly"):
            rotary_from_table(bent.cos(), bent.sin())
