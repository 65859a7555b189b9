"""Variance at controlled distances: against the tensor of all scores, and against what algebra demands."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tl_posdisent.rope import covariance
from tl_posdisent.rope.covariance import Spread
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary, rotate
from tl_posdisent.rope.subspace_interactions import interaction_bound, interaction_by_subspace
from tl_posdisent.rope.variance_decomposition import EFFECTS, VarianceShares, decompose

SCALE = 0.35


def frequencies(n: int, base: float = 50.0) -> Tensor:
    return base ** (-torch.arange(n, dtype=torch.float64) / max(n, 1))


def llama3(n: int) -> Tensor:
    """Slow subspaces are slowed down eightfold, middle ones gradually."""
    theta = frequencies(n, 1e4)
    blend = ((2 * torch.pi / theta).log() / math.log(200)).clamp(0, 1)
    return theta * (1 - blend) + theta / 8 * blend


LAYERS: dict[str, tuple[Rotary, int, int, int]] = {  # rotation, heads, key heads, d_head
    "half": (Rotary(frequencies(4)), 2, 2, 8),
    "adjacent": (Rotary(frequencies(4), "adjacent"), 2, 2, 8),
    "partial": (Rotary(frequencies(2)), 2, 2, 8),
    "odd rest": (Rotary(frequencies(2), "adjacent"), 2, 1, 7),
    "grouped": (Rotary(frequencies(3)), 6, 2, 6),
    "multi-query": (Rotary(frequencies(3), "adjacent"), 4, 1, 6),
    "llama3": (Rotary(llama3(4)), 4, 2, 8),
    "yarn": (Rotary(frequencies(3), attention_factor=1.2), 2, 2, 10),
    "MLA": (Rotary(frequencies(2), "adjacent"), 3, 3, 16),
    "float32 angles": (Rotary(frequencies(4), angle_dtype=torch.float32), 2, 2, 8),
    "standing": (Rotary(torch.tensor([1.0, 0.0], dtype=torch.float64)), 2, 2, 4),
    "no rotation": (Rotary(frequencies(0)), 2, 2, 5),
}
DISTANCES: dict[str, tuple[Any, Any]] = {
    "range": (range(1, 12, 2), None),
    "fractions": (torch.tensor([0.5, -3.25, 100.75, 1e4]), None),
    "weighted": ([0.0, 1.0, 2.5, 7.0, 40.0], [3.0, 0.0, 1.0, 0.5, 2.0]),
}


def draw(layer: str, n_q: int = 9, n_k: int = 7, mean: float = 1.0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated queries and keys with means of their own."""
    _, n_heads, n_kv, d_head = LAYERS[layer]

    def side(n: int, heads: int) -> Tensor:
        mixed = torch.randn(n, heads, d_head, dtype=torch.float64) @ torch.randn(d_head, d_head, dtype=torch.float64)
        return mean * torch.randn(heads, d_head, dtype=torch.float64) + spread * mixed

    return side(n_q, n_heads), side(n_k, n_kv)


def all_scores(q: Tensor, k: Tensor, rotary: Rotary, distances: Any, scale: float = SCALE) -> Tensor:
    """``[head, distance, query, key]``: every query turned to every distance, keys at position 0."""
    still = rotate(k, torch.zeros(len(k)), rotary).repeat_interleave(q.shape[1] // k.shape[1], 1)
    distances = torch.as_tensor(distances, dtype=torch.float64)
    turned = torch.stack([rotate(q, d.expand(len(q)), rotary) for d in distances])
    return scale * torch.einsum("dihc,jhc->hdij", turned, still)


def anova(scores: Tensor, weights: Any = None) -> dict[str, Tensor]:
    """The textbook: an effect is the mean over all other axes, less all smaller effects."""
    w = torch.as_tensor([1.0] * scores.shape[1] if weights is None else weights, dtype=torch.float64)
    w = (w / w.sum())[:, None, None]

    def average(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = (x * w).sum(1, keepdim=True) if 1 in axes else x
        rest = [axis for axis in axes if axis != 1]
        return x.mean(rest, keepdim=True) if rest else x

    terms: dict[tuple[int, ...], Tensor] = {}
    for size in range(4):
        for factors in itertools.combinations((1, 2, 3), size):
            smaller = sum(terms[f] for n in range(size) for f in itertools.combinations(factors, n))
            terms[factors] = average(scores, tuple({1, 2, 3} - set(factors))) - smaller
    names = {1: "distance", 2: "query", 3: "key"}
    squares = {":".join(names[f] for f in factors): average(x**2, (1, 2, 3)).flatten() for factors, x in terms.items()}
    return {**squares, "mean": terms[()].flatten()}


def assert_same(ours: VarianceShares, theirs: dict[str, Tensor], close: float = 1e-12) -> None:
    total = sum(theirs[effect] for effect in EFFECTS)
    torch.testing.assert_close(ours.total, total, rtol=close, atol=0)
    torch.testing.assert_close(ours.mean, theirs["mean"], rtol=close, atol=close * float(total.max()) ** 0.5)
    for effect in EFFECTS:
        error = (ours.variance(effect) - theirs[effect]).abs() / total
        assert float(error.max()) < close, effect


# --- the decomposition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", DISTANCES)
@pytest.mark.parametrize("layer", LAYERS)
def test_decomposition_is_the_anova_of_all_scores(layer: str, at: str) -> None:
    rotary, (distances, weights) = LAYERS[layer][0], DISTANCES[at]
    q, k = draw(layer)
    ours = decompose(Moments.from_qk(q, k, rotary), distances, scale=SCALE, weights=weights)
    assert_same(ours, anova(all_scores(q, k, rotary, distances), weights))
    torch.testing.assert_close(ours.shares.sum(0), torch.ones(q.shape[1]).double())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    n_q=st.integers(1, 6),
    n_k=st.integers(2, 6),
    distances=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    log_mean=st.floats(-3, 3),
    scale=st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3),
    seed=st.integers(0, 1000),
)
def test_decomposition_of_anything(
    layer: str, n_q: int, n_k: int, distances: list[float], log_mean: float, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rotary = LAYERS[layer][0]
    q, k = draw(layer, n_q, n_k, mean=10**log_mean)
    ours = decompose(Moments.from_qk(q, k, rotary), distances, scale=scale)
    assert_same(ours, anova(all_scores(q, k, rotary, distances, scale)), close=1e-9)


def test_means_far_larger_than_the_spread() -> None:
    rotary = LAYERS["half"][0]
    q, k = draw("half", mean=1e6)
    ours = decompose(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)
    # The oracle cancels: its interactions come from differences of scores of 1e13. Centre what it sees instead.
    q0, k0 = (x.mean(0, keepdim=True) for x in (q, k))
    pure = anova(all_scores(q - q0, k - k0, rotary, range(9)))
    for effect in ("query:key", "distance:query:key"):
        torch.testing.assert_close(ours.variance(effect), pure[effect], rtol=1e-9, atol=0)
    one_side = anova(all_scores(q0, k - k0, rotary, range(9)))
    for effect in ("key", "distance:key"):
        torch.testing.assert_close(ours.variance(effect), one_side[effect], rtol=1e-9, atol=0)


def test_both_r_are_correlations_of_fitted_scores() -> None:
    rotary = LAYERS["grouped"][0]
    q, k = draw("grouped")
    shares = decompose(Moments.from_qk(q, k, rotary), range(10), scale=SCALE)
    w = all_scores(q, k, rotary, range(10))
    additive = w.mean((2, 3), True) + w.mean((1, 3), True) + w.mean((1, 2), True)
    two_axis = w.mean(3, True) + w.mean(1, True) - w.mean((1, 3), True)
    for fitted, r in ((additive, shares.r_three_axis), (two_axis, shares.r_two_axis)):
        expected = [
            torch.corrcoef(torch.stack([x.expand_as(y).flatten(), y.flatten()]))[0, 1]
            for x, y in zip(fitted, w, strict=True)
        ]
        torch.testing.assert_close(r, torch.stack(expected), rtol=1e-10, atol=0)


def test_variances_scale_with_the_scale_squared() -> None:
    moments = Moments.from_qk(*draw("yarn"), LAYERS["yarn"][0])
    one, minus_three = (decompose(moments, range(5), scale=s) for s in (1.0, -3.0))
    torch.testing.assert_close(minus_three.variances, 9 * one.variances, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(minus_three.mean, -3 * one.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(minus_three.shares, one.shares, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layer", ["half", "adjacent", "partial"])
def test_a_shift_of_all_distances_is_a_rotation_of_the_keys(layer: str) -> None:
    rotary = LAYERS[layer][0]
    q, k = draw(layer)
    before = decompose(Moments.from_qk(q, k, rotary), range(8), scale=SCALE)
    moved = rotate(k, torch.full((len(k),), 100.0), rotary)
    after = decompose(Moments.from_qk(q, moved, rotary), range(100, 108), scale=SCALE)
    torch.testing.assert_close(after.variances, before.variances, rtol=1e-10, atol=1e-13)


def test_weights_count_repetitions_and_ignore_order() -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    repeated = decompose(moments, [4, 1, 4, 9, 4, 9], scale=SCALE)
    weighted = decompose(moments, torch.tensor([1, 4, 9]), scale=SCALE, weights=torch.tensor([1, 3, 2]))
    torch.testing.assert_close(repeated.variances, weighted.variances, rtol=1e-12, atol=1e-15)


def test_many_distances_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    whole = decompose(moments, range(1000), scale=SCALE, weights=torch.arange(1000))
    monkeypatch.setattr("tl_posdisent.rope.variance_decomposition._CHUNK", 400)
    parts = decompose(moments, range(1000), scale=SCALE, weights=torch.arange(1000))
    torch.testing.assert_close(parts.variances, whole.variances, rtol=1e-12, atol=1e-15)


def test_table_has_a_row_per_head_and_says_what_the_result_says() -> None:
    moments = Moments.from_qk(*draw("grouped"), LAYERS["grouped"][0])
    shares = decompose(moments, range(6), scale=SCALE)
    table = shares.to_frame()
    assert table["head"].tolist() == list(range(6))
    assert table["distance:key"].tolist() == shares.share("distance:key").tolist()
    assert table["r_two_axis"].tolist() == shares.r_two_axis.tolist()
    variances = shares.to_frame("variance")
    assert variances[list(EFFECTS)].sum(axis=1).tolist() == pytest.approx(shares.total.tolist())
    assert f"r two-axis {shares.r_two_axis.mean().item():.3f}" in repr(shares)


# --- where something does not vary ------------------------------------------------------------------------------------


def test_one_distance_has_no_distance_terms() -> None:
    shares = decompose(Moments.from_qk(*draw("half"), LAYERS["half"][0]), [17.5], scale=SCALE)
    assert all(bool((shares.variance(effect) == 0).all()) for effect in EFFECTS if "distance" in effect)
    torch.testing.assert_close(shares.r_two_axis, torch.ones(2).double(), rtol=0, atol=0)


def test_without_rotation_no_distance_terms() -> None:
    shares = decompose(Moments.from_qk(*draw("no rotation"), LAYERS["no rotation"][0]), range(9), scale=SCALE)
    assert all(bool((shares.variance(effect) == 0).all()) for effect in EFFECTS if "distance" in effect)


def test_constant_keys_have_no_key_terms() -> None:
    q, k = draw("grouped")
    moments = Moments.from_qk(q.float(), k[:1].expand_as(k).float(), LAYERS["grouped"][0])
    shares = decompose(moments, range(9), scale=SCALE)
    assert all(bool((shares.variance(effect) == 0).all()) for effect in EFFECTS if "key" in effect)
    assert bool((shares.total > 0).all())


def test_heads_whose_scores_do_not_vary_have_no_shares() -> None:
    q, k = draw("half")
    q[:, 1] = 0
    moments = Moments.from_qk(q, k, LAYERS["half"][0])
    shares = decompose(moments, range(9), scale=SCALE)
    assert shares.total[0] > 0
    assert shares.total[1] == 0
    parts = interaction_by_subspace(moments, range(9), scale=SCALE)
    bound = interaction_bound(moments, range(9), scale=SCALE).to_frame()
    for values in (shares.shares.T, shares.r_three_axis, shares.r_two_axis, parts.shares.transpose(0, 1)):
        assert not bool(values[0].isnan().any())
        assert bool(values[1].isnan().all())
    assert bound["share"].isna().tolist() == [False, True]


def test_scores_that_vary_by_rounding_alone_do_not_vary() -> None:
    q, k = torch.zeros(9, 1, 4), torch.ones(7, 1, 4)
    q[:, 0, 0], k[:, 0, 0] = torch.randn(9), 0.0  # queries vary where keys are nothing
    q[:, 0, 1:] = 0.1
    shares = decompose(Moments.from_qk(q, k, Rotary(frequencies(0))), range(9), scale=SCALE)
    assert shares.total.tolist() == [0.0]
    assert bool(shares.shares.isnan().all())


# --- subspaces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_subspaces_sum_to_the_whole(layer: str) -> None:
    rotary, _, _, d_head = LAYERS[layer]
    moments = Moments.from_qk(*draw(layer), rotary)
    whole = decompose(moments, range(9), scale=SCALE)
    parts = interaction_by_subspace(moments, range(9), scale=SCALE, effects=EFFECTS)
    assert parts.variances.shape[-1] == rotary.dim // 2 + math.ceil((d_head - rotary.dim) / 2)
    error = (parts.variances.sum(-1) - whole.variances).abs() / whole.total
    assert float(error.max()) < 1e-12
    for effect in ("distance", "distance:query", "distance:key", "distance:query:key"):
        assert bool((parts.share(effect)[:, parts.frequencies == 0] == 0).all())


def test_a_pair_of_subspaces_is_shared_in_halves() -> None:
    rotary = LAYERS["half"][0]
    q, k = draw("half")
    parts = interaction_by_subspace(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)

    def alone(*subspaces: int) -> Tensor:
        """distance:key variance of scores that only these subspaces make."""
        kept = torch.zeros(8).double()
        kept[[i for c in subspaces for i in (c, c + 4)]] = 1
        return anova(all_scores(q * kept, k, rotary, range(9)))["distance:key"]

    for c in range(4):
        shared = sum(alone(c, other) - alone(c) - alone(other) for other in range(4) if other != c)
        torch.testing.assert_close(parts.variances[0, :, c], alone(c) + shared / 2, rtol=1e-9, atol=1e-12)


def test_subspace_table_has_its_frequencies_and_adds_up() -> None:
    rotary = LAYERS["yarn"][0]
    moments = Moments.from_qk(*draw("yarn"), rotary)
    parts = interaction_by_subspace(moments, range(9), scale=SCALE)
    table = parts.to_frame()
    assert list(table)[:4] == ["head", "subspace", "frequency", "wavelength"]
    assert table["frequency"].tolist() == [*rotary.frequencies.tolist(), 0.0, 0.0] * 2
    assert table["wavelength"].tolist() == [*rotary.wavelengths.tolist(), math.inf, math.inf] * 2
    by_head = table.groupby("head")["distance:key"].sum()
    assert by_head.tolist() == pytest.approx(decompose(moments, range(9), scale=SCALE).share("distance:key").tolist())
    assert f"distance:key {by_head.mean():.3f}" in repr(parts)


# --- the bound --------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    distances=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    mean=st.floats(0, 10),
    effect=st.sampled_from([effect for effect in EFFECTS if "distance:" in effect]),
    seed=st.integers(0, 1000),
)
def test_bound_holds(layer: str, distances: list[float], mean: float, effect: Any, seed: int) -> None:
    torch.manual_seed(seed)
    rotary = LAYERS[layer][0]
    q, k = draw(layer, mean=mean)
    bound = interaction_bound(Moments.from_qk(q, k, rotary), distances, scale=SCALE, effect=effect)
    exact = anova(all_scores(q, k, rotary, distances))[effect]
    rounding = 1e-9 * (1 + bound.total)
    assert bool((exact <= bound.pairwise + rounding).all())
    assert bool((bound.pairwise <= bound.separate * (1 + 1e-12) + rounding).all())
    torch.testing.assert_close(bound.variance, exact, rtol=1e-7, atol=float(rounding.max()))


def test_bound_is_the_product_of_three_standard_deviations() -> None:
    rotary = LAYERS["yarn"][0]
    q, k = draw("yarn")
    bound = interaction_bound(Moments.from_qk(q, k, rotary), range(9), scale=SCALE)
    planes = [[c, c + 3] for c in range(3)]
    sd_key = torch.stack([k[:, :, p].var(0, correction=0).sum(-1).sqrt() for p in planes], -1)
    mean_query = torch.stack([q[:, :, p].mean(0).norm(dim=-1) for p in planes], -1)
    resultant = torch.polar(torch.ones(9, 3).double(), rotary.angles(torch.arange(9.0))).mean(0).abs()
    expected = SCALE * 1.2**2 * mean_query * sd_key * (1 - resultant**2).sqrt()
    torch.testing.assert_close(bound.spreads[:, :3], expected, rtol=1e-10, atol=0)
    assert bound.spreads[:, 3:].count_nonzero() == 0  # what does not turn cannot interact with the distance
    torch.testing.assert_close(bound.separate, expected.sum(-1) ** 2, rtol=1e-10, atol=0)


def test_both_bounds_are_attained_by_subspaces_that_move_as_one() -> None:
    rotary = Rotary(torch.full((3,), torch.pi, dtype=torch.float64))  # turns over at every step: +1, −1
    size = torch.tensor([1.0, 2.0, 0.5, 0.0, 0.0, 0.0])  # real parts of three subspaces, different in size
    q = size.expand(5, 1, 6)
    k = torch.randn(40, 1, 1) * size  # all keys on one line
    bound = interaction_bound(Moments.from_qk(q, k, rotary), [0, 1], scale=SCALE)
    torch.testing.assert_close(bound.pairwise, bound.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(bound.separate, bound.variance, rtol=1e-10, atol=0)


def test_pairwise_bound_is_attained_over_a_full_turn_where_the_separate_one_is_twice_too_large() -> None:
    rotary = Rotary(torch.tensor([torch.pi / 4], dtype=torch.float64))
    bound = interaction_bound(Moments.from_qk(*torch.randn(2, 30, 2, 2), rotary), range(8), scale=SCALE)
    torch.testing.assert_close(bound.pairwise, bound.variance, rtol=1e-10, atol=0)
    torch.testing.assert_close(bound.separate, 2 * bound.variance, rtol=1e-10, atol=0)


def test_bound_vanishes_for_constant_keys_and_for_standing_subspaces() -> None:
    q, k = draw("half")
    constant = Moments.from_qk(q, k[:1].expand_as(k), LAYERS["half"][0])
    assert interaction_bound(constant, range(9), scale=SCALE).separate.tolist() == [0.0, 0.0]
    slow = Moments.from_qk(q, k, Rotary(torch.full((4,), 1e-9, dtype=torch.float64)))
    assert float(interaction_bound(slow, range(9), scale=SCALE).separate.max()) < 1e-12


def test_bound_tables() -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    bound = interaction_bound(moments, range(9), scale=SCALE)
    table = bound.to_frame()
    shares = decompose(moments, range(9), scale=SCALE)
    assert table["share"].tolist() == shares.share("distance:key").tolist()
    assert table["separate"].tolist() == (bound.separate / shares.total).tolist()
    by_subspace = bound.to_frame("subspace")
    assert by_subspace["spread"].tolist() == bound.spreads.flatten().tolist()
    assert by_subspace["frequency"].tolist() == LAYERS["half"][0].frequencies.tolist() * 2
    assert f"{table['pairwise'].mean():.3g} (pairwise)" in repr(bound)


# --- moments ----------------------------------------------------------------------------------------------------------


def assert_equal_moments(a: Moments, b: Moments, close: float) -> None:
    for x, y in ((a.query, b.query), (a.key, b.key)):
        assert x.count == y.count
        torch.testing.assert_close(x.mean, y.mean, rtol=close, atol=close)
        torch.testing.assert_close(x.cov, y.cov, rtol=close, atol=close)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_moments_are_those_of_the_coordinates_in_order_of_subspaces(pairing: Any) -> None:
    q, k = draw("odd rest")
    moments = Moments.from_qk(q, k, Rotary(frequencies(2), pairing))
    order = [0, 2, 1, 3, 4, 5, 6] if pairing == "half" else list(range(7))
    for x, spread in ((q, moments.query), (k, moments.key)):
        torch.testing.assert_close(spread.mean, x.mean(0)[:, order])
        for head in range(x.shape[1]):
            torch.testing.assert_close(spread.cov[head], x[:, head, order].T.cov(correction=0))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    cuts=st.tuples(st.integers(1, 49), st.integers(1, 49)),
    mean=st.sampled_from([0.0, 1.0, 1e5]),
    chunk=st.sampled_from([1, 20, 2**22]),
)
def test_merged_parts_are_the_whole(cuts: tuple[int, int], mean: float, chunk: int) -> None:
    torch.manual_seed(cuts[0])
    rotary = LAYERS["grouped"][0]
    q, k = draw("grouped", 50, 50, mean=mean)
    whole = Moments.from_qk(q, k, rotary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(covariance, "_CHUNK", chunk)
        parts = Moments.from_qk(q[: cuts[0]], k[: cuts[1]], rotary) + Moments.from_qk(
            q[cuts[0] :], k[cuts[1] :], rotary
        )
    close = 1e-12 * max(1.0, mean)  # subtracting the mean costs the digits that float64 has not got
    assert_equal_moments(parts, whole, close)


def test_sum_over_texts_and_leading_axes() -> None:
    rotary = LAYERS["half"][0]
    q, k = (x.unflatten(0, (2, 3, 4)) for x in draw("half", 24, 24))
    whole = Moments.from_qk(q, k, rotary)
    assert_equal_moments(sum(Moments.from_qk(a, b, rotary) for a, b in zip(q, k, strict=True)), whole, 1e-12)
    other_layout = (x.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4) for x in (q, k))
    assert_equal_moments(Moments.from_qk(*other_layout, rotary), whole, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_run_in_float64_whatever_the_dtype(dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in draw("half", 200, 200, mean=1000.0))
    rotary = LAYERS["half"][0]
    assert_equal_moments(Moments.from_qk(q, k, rotary), Moments.from_qk(q.double(), k.double(), rotary), 0.0)


def test_gradients_are_not_followed() -> None:
    q, k = draw("half")
    moments = Moments.from_qk(q.requires_grad_(), k, LAYERS["half"][0])
    assert not moments.query.cov.requires_grad
    assert not decompose(moments, torch.ones(3, requires_grad=True), scale=SCALE).variances.requires_grad


@pytest.mark.parametrize("layer", LAYERS)
def test_file_round_trip(layer: str, tmp_path: Path) -> None:
    moments = Moments.from_qk(*draw(layer), replace(LAYERS[layer][0], attention_factor=0.1 + 0.2))
    moments.to_file(tmp_path / "layer.moments")
    back = Moments.from_file(str(tmp_path / "layer.moments"))
    assert_equal_moments(back, moments, 0.0)
    assert_equal_moments(back + moments, moments + moments, 0.0)
    before, after = (decompose(x, range(5), scale=SCALE).variances for x in (moments, back))
    assert torch.equal(before, after)
    assert repr(back) == repr(moments)


def test_read_moments_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    moments.to_file(path)
    back = Moments.from_file(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert_equal_moments(back, moments, 0.0)


def test_repr_tells_size_grouping_and_rotation() -> None:
    assert repr(Moments.from_qk(*draw("yarn"), LAYERS["yarn"][0])).splitlines() == [
        "Moments of 9 queries and 7 keys: 2 heads, d_head 10",
        "  3 subspaces, wavelengths 6.28…85.3, 4 coordinates un-rotated",
    ]
    assert "4 heads on 1 key heads" in repr(Moments.from_qk(*draw("multi-query"), LAYERS["multi-query"][0]))
    assert "0 subspaces, 5 coordinates" in repr(Moments.from_qk(*draw("no rotation"), LAYERS["no rotation"][0]))


def test_to_keeps_everything() -> None:
    moments = Moments.from_qk(*draw("half"), LAYERS["half"][0])
    assert_equal_moments(moments.to("cpu"), moments, 0.0)


# --- refusals ---------------------------------------------------------------------------------------------------------

HALF = LAYERS["half"][0]
GOOD = torch.ones(3, 2, 8)


@pytest.mark.parametrize(
    ("q", "k", "rotary", "match"),
    [
        ([1.0], GOOD, HALF, r"q must be a floating-point torch\.Tensor, got list"),
        (GOOD, GOOD.long(), HALF, r"k must be a floating-point torch\.Tensor, got torch\.int64"),
        (GOOD[0], GOOD, HALF, r"q must have shape \(\*n_q, head, d_head\) and not be empty, got \(2, 8\)"),
        (GOOD, GOOD[:0], HALF, r"k must have shape \(\*n_k, kv_head, d_head\) and not be empty, got \(0, 2, 8\)"),
        (GOOD, GOOD[..., :6], HALF, r"queries and keys must have the same d_head, got 8 and 6"),
        (GOOD, torch.ones(3, 3, 8), HALF, r"number of key heads must divide that of heads, got 3 and 2"),
        (GOOD[..., :6], GOOD[..., :6], HALF, r"d_head must be at least 8, two per frequency, got 6"),
        (GOOD, GOOD.to("meta"), HALF, r"q and k must be on the same device, got cpu and meta"),
        (GOOD / 0, GOOD, HALF, r"q must be finite"),
        (GOOD, GOOD * torch.tensor([1.0] * 7 + [torch.nan]), HALF, r"k must be finite"),
        (
            GOOD.double() * torch.arange(3)[:, None, None] * 1e200,
            GOOD,
            HALF,
            r"q must be .* small enough to be squared",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_vectors_are_refused(q: Any, k: Any, rotary: Rotary, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Moments.from_qk(q, k, rotary)


ENTRIES: list[Callable[..., Any]] = [decompose, interaction_by_subspace, interaction_bound]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("distances", "options", "match"),
    [
        (range(0), {}, r"distances must be one-dimensional and not empty, got shape \(0,\)"),
        (torch.ones(2, 2), {}, r"distances must be one-dimensional and not empty, got shape \(2, 2\)"),
        ([1.0, math.inf], {}, r"distances must be finite real numbers"),
        (torch.tensor([True]), {}, r"distances must be finite real numbers"),
        (torch.tensor([1j]), {}, r"distances must be finite real numbers"),
        (range(3), {"weights": [1.0, 2.0]}, r"weights must be one per distance, got 2 weights for 3 distances"),
        (range(2), {"weights": [1.0, -1.0]}, r"weights must be non-negative with at least one positive, got values"),
        (range(2), {"weights": [0.0, 0.0]}, r"weights must be non-negative with at least one positive, got values"),
        (range(2), {"weights": [1.0, math.nan]}, r"weights must be finite real numbers"),
        (range(2), {"weights": 1.0}, r"weights must be one-dimensional"),
        (range(2), {"scale": math.nan}, r"scale must be a finite number, got nan"),
        (range(2), {"scale": "1"}, r"scale must be a finite number, got '1'"),
        (range(2), {"scale": True}, r"scale must be a finite number, got True"),
        (range(2), {"scale": torch.ones(2)}, r"scale must be a finite number, got tensor"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_distances_are_refused(
    entry: Callable[..., Any], distances: Any, options: dict[str, Any], match: str
) -> None:
    moments = Moments.from_qk(*draw("half"), HALF)
    with pytest.raises(ValueError, match=match):
        entry(moments, distances, **{"scale": 1.0, **options})


@pytest.mark.usefixtures("unchecked")
def test_unknown_names_are_refused() -> None:
    moments = Moments.from_qk(*draw("half"), HALF)
    known = r"effects? must be one of distance, query, key, distance:query, .* got 'place'"
    shares = decompose(moments, range(3), scale=1.0)
    for call in (shares.share, shares.variance):
        with pytest.raises(ValueError, match=known):
            call("place")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=known):
        interaction_bound(moments, range(3), scale=1.0, effect="place")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=known):
        interaction_by_subspace(moments, range(3), scale=1.0, effects=["place"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="effects must name at least one effect"):
        interaction_by_subspace(moments, range(3), scale=1.0, effects=[])
    parts = interaction_by_subspace(moments, range(3), scale=1.0)
    with pytest.raises(ValueError, match="effect must be one of distance:key, distance:query:key, got 'query'"):
        parts.share("query")
    with pytest.raises(ValueError, match="values must be 'share' or 'variance'"):
        shares.to_frame("r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be 'head' or 'subspace'"):
        interaction_bound(moments, range(3), scale=1.0).to_frame("layer")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_moments_of_different_layers_are_not_added() -> None:
    one = Moments.from_qk(*draw("half"), HALF)
    with pytest.raises(ValueError, match="must have the same rotary"):
        one + replace(one, rotary=Rotary(frequencies(4, 1e4)))
    with pytest.raises(ValueError, match="must have the same rotary"):
        one + replace(one, rotary=replace(HALF, pairing="adjacent"))
    with pytest.raises(ValueError, match=r"must have the same shape, got \(2, 8\) and \(4, 8\)"):
        one + Moments.from_qk(torch.randn(3, 4, 8), torch.randn(3, 2, 8), HALF)
    with pytest.raises(TypeError, match="unsupported operand"):
        one + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        sum([one], start=1)  # type: ignore[call-overload]


@pytest.mark.usefixtures("unchecked")
def test_spreads_that_are_none_are_refused() -> None:
    mean, cov = torch.zeros(2, 4).double(), torch.zeros(2, 4, 4).double()
    with pytest.raises(ValueError, match=r"mean must be float64 of shape \(head, coordinate\), got torch.float32"):
        Spread(1, mean.float(), cov)
    with pytest.raises(ValueError, match=r"cov must be float64 of shape \(head, coordinate, coordinate\)"):
        Spread(1, mean, cov[0])
    with pytest.raises(ValueError, match=r"mean and cov do not fit: their shapes are \(2, 4\) and \(1, 4, 4\)"):
        Spread(1, mean, cov[:1])
    for bad in ((0, mean, cov), (math.nan, mean, cov), (1, mean / 0, cov)):
        with pytest.raises(ValueError, match="positive count, and finite mean and covariance"):
            Spread(*bad)


def saved(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """A file of moments in which something was changed."""
    Moments.from_qk(*draw("half"), HALF).to_file(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["tl_posdisent"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(about, tensors)
    save_file(tensors, path, {"tl_posdisent": json.dumps(about)})
    return path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda about, _: about.update(kind="Fit"), "does not hold Moments of version 1"),
        (lambda about, _: about.update(version=2), "does not hold Moments of version 1"),
        (lambda about, _: about.pop("pairing"), "holds damaged Moments: 'pairing'"),
        (lambda about, _: about.update(pairing="third"), "holds damaged Moments: pairing must be"),
        (lambda about, _: about.update(angle_dtype="int8"), "holds damaged Moments: 'int8'"),
        (lambda about, _: about.update(queries=None), "holds damaged Moments"),
        (lambda about, _: about.update(keys=-3), "holds damaged Moments: .*positive count"),
        (lambda _, tensors: tensors.pop("k_cov"), "holds damaged Moments: 'k_cov'"),
        (lambda _, tensors: tensors.update(q_cov=torch.ones(2)), "holds damaged Moments: cov must be float64"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_changed_files_are_refused(change: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        Moments.from_file(saved(tmp_path / "file", change))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_files_are_refused(kept: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "file", lambda *_: None)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="is no safetensors file, or is truncated"):
        Moments.from_file(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mean,cov\n1,2\n" * 100)
    with pytest.raises(ValueError, match="is no safetensors file, or is truncated"):
        Moments.from_file(path)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="does not hold Moments of version 1"):
        Moments.from_file(path)
    save_file({"weight": torch.ones(3)}, path, {"tl_posdisent": "no json"})
    with pytest.raises(ValueError, match="is no safetensors file, or is truncated"):
        Moments.from_file(path)
    with pytest.raises(FileNotFoundError):
        Moments.from_file(tmp_path / "nothing")
