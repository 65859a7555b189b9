"""What is no score is refused, and scores are not, however sharp the attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dense import allowed
from support.lanes import slow
from torch import Tensor

from tl_posdisent import demo_tokens, fit_additive, fit_attention, load_demo_model
from tl_posdisent.additive.score_checks import is_pattern
from tl_posdisent.rope import toeplitz_share
from tl_posdisent.utils.errors import ArgumentError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MASKING = [-torch.inf, -1e4, -5e4, -65504.0, -1e6, -1e9, -1e10, -1e20]
LENGTH = 12


def scores_of(dtype: torch.dtype = torch.float32, size: float = 3.0, length: int = LENGTH) -> Tensor:
    x = size * torch.randn(2, 3, length, length, generator=torch.Generator().manual_seed(0))
    return x.to(dtype)


def masked(scores: Tensor, cells: Tensor, value: float, how: str) -> Tensor:
    """Masked as models do: in place of the scores, or by addition."""
    if how == "replaced":
        return scores.masked_fill(~cells, value)
    return scores + torch.zeros(cells.shape).masked_fill(~cells, value).to(scores.dtype)


@pytest.mark.parametrize("how", ["replaced", "added"])
@pytest.mark.parametrize("n", range(len(MASKING)))
def test_masking_values_are_refused_and_the_argument_is_named(n: int, how: str) -> None:
    causal, window = allowed(LENGTH, LENGTH), allowed(LENGTH, LENGTH, window=5)
    no_key = causal & (torch.arange(LENGTH) != 1)
    dtypes = DTYPES[1:] if -torch.inf < MASKING[n] < -65504 else DTYPES
    for at, (cells, options, advice) in enumerate(
        (
            (causal, {"mask": "full"}, r"pass mask=\"causal\""),
            (window, {"mask": "full"}, r"pass mask=\"causal\", window=5"),
            (window, {}, "pass window=5"),
            (no_key, {}, "pass the mask that the model used"),
        )
    ):
        scores = masked(scores_of(dtypes[(n + at) % len(dtypes)]), cells, MASKING[n], how)
        for function in (fit_additive, toeplitz_share):
            with pytest.raises(ValueError, match=r"inside the mask, got -.* at index .* more such cells; " + advice):
                function(scores, **options)
        fit_additive(scores, mask=cells)  # what was advised


@pytest.mark.parametrize("value", [-1e4, -1e9])
def test_one_head_masked_and_two_tokens(value: float) -> None:
    scores = scores_of()
    scores[1, 2] = masked(scores[1, 2], allowed(LENGTH, LENGTH), value, "replaced")
    with pytest.raises(ValueError, match=r"at index \(1, 2, 0, 1\) .* and 65 more such cells; pass mask=\"causal\" "):
        fit_additive(scores, mask="full")
    two = torch.tensor([[1.0, value], [2.0, -0.5]])
    with pytest.raises(ValueError, match=r'and 0 more such cells; pass mask="causal"'):
        fit_additive(two, mask="full")


def test_one_number_three_times_beside_very_different_scores() -> None:
    """Scores of a sharp head are far from each other too: three tokens, and three cells of the future."""
    scores = torch.tensor([[-900.0, 0, 0], [1100.0, 30.0, 0], [-20.0, 700.0, 5.0]]).masked_fill(~allowed(3, 3), -65504)
    with pytest.raises(ValueError, match=r'and 2 more such cells; pass mask="causal"'):
        fit_additive(scores, mask="full")


def test_a_boolean_mask_is_taken_as_it_is() -> None:
    scores = masked(scores_of(torch.float64), allowed(LENGTH, LENGTH), -1e4, "replaced")
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    assert bool((fit_additive(scores, mask=everything).r > 0.5).all())
    assert not toeplitz_share(scores, mask=everything).isnan().any()


@pytest.mark.parametrize("size", [0.01, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sharp_attention_is_fitted(dtype: torch.dtype, size: float) -> None:
    """Also short texts, one very low score, a quadratic slope, and rows that are low as a whole."""
    for length in (3, 7, 40):
        scores = (scores_of(torch.float64, size, length)).clamp(-6e4, 6e4).to(dtype)
        for mask in ("causal", "full"):
            fit_additive(scores, mask=mask)
    scores = scores_of(torch.float64, size)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    fit_additive((scores - 40 * distance**2).to(dtype), mask="full")
    fit_additive((scores - 5e3 * (torch.arange(LENGTH)[:, None] % 2)).to(dtype))
    scores[..., 7, 3] -= 20 * size
    fit_additive(scores.clamp(-6e4, 6e4).to(dtype))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patterns_are_refused_unless_insisted(dtype: torch.dtype, mask: Any) -> None:
    scores = scores_of(torch.float32).masked_fill(~allowed(LENGTH, LENGTH, mask), -torch.inf)
    pattern = scores.softmax(-1).to(dtype)
    for padding in (None, 0.0, torch.nan):
        if padding is not None:
            pattern[0, :, :2] = padding  # queries of a padded text
        with pytest.raises(ValueError, match="got an attention pattern: its rows are non-negative and sum to 1"):
            fit_additive(pattern, mask=mask)
    pattern[0, :, :2] = 0.0
    assert bool((fit_additive(pattern, mask=mask, check=False).r > 0).all())


def test_patterns_beside_attention_sinks_are_refused() -> None:
    """Their rows sum to less than 1."""
    scores = scores_of().masked_fill(~allowed(LENGTH, LENGTH), -torch.inf)
    pattern = torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
    with pytest.raises(ValueError, match="scores must be attention logits before the softmax"):
        fit_additive(pattern)
    assert bool((fit_additive(pattern + 1e-3).r > 0).all())


def test_what_only_resembles_a_pattern_is_fitted() -> None:
    pattern = scores_of().masked_fill(~allowed(LENGTH, LENGTH), -torch.inf).softmax(-1)
    for scores in (pattern.log().nan_to_num(neginf=-100.0), 1.02 * pattern, pattern - 1e-3, torch.zeros(5, 5)):
        fit_additive(scores)
    pattern[0, 0, 5, 3] += 0.5  # one row that is none
    fit_additive(pattern)


def test_negative_scores_whose_rows_sum_to_one_are_fitted() -> None:
    """A pattern has no entry below zero, however small: here in every row but the last."""
    scores = torch.full((40, 40), 1 / 40)
    scores[:-1, 0] -= 0.5
    scores[:-1, 1] += 0.5
    assert not is_pattern(scores)
    assert is_pattern(scores.clamp_min(0.0) / scores.clamp_min(0.0).sum(-1, keepdim=True))
    fit_additive(scores, mask="full")


@pytest.mark.parametrize("fit", [fit_additive, fit_attention])
@pytest.mark.parametrize("length", [12, *slow([40, 80])])  # fewer positions than coordinates, and more
def test_of_all_activations_only_scores_are_fitted(length: int, fit: Callable[[Tensor], Any]) -> None:
    _, cache = load_demo_model().run_with_cache(demo_tokens(length=length))
    fitted = set()
    for name, x in cache.items():
        for each in (x, x[0]):  # with and without an axis of texts
            with contextlib.suppress(ArgumentError):
                fit(each)
                fitted.add(name.split(".")[-1])
    assert fitted == {"hook_attn_scores"}


@pytest.mark.parametrize("fit", [fit_additive, fit_attention])
def test_vectors_are_refused_and_scores_of_few_queries_are_not(fit: Callable[..., Any]) -> None:
    z = torch.randn(1, 12, 4, 8)  # as cache["z", 3] and cache["q", 3]: batch, pos, head, d_head
    sines = torch.outer(torch.arange(12.0), torch.logspace(0, -4, 16)).sin()  # 0 in all coordinates at position 0
    for x in (z, z[0], z[0, 0], z.bfloat16(), torch.randn(2, 12, 64), sines):
        with pytest.raises(ValueError, match=r"a residual stream .* set keys after a query to -inf, or pass mask="):
            fit(x)
    own = torch.ones(4, 8, dtype=torch.bool)
    fit(z, mask="full")  # what was advised
    fit(z, mask=own)
    fit(z[..., :1, :])  # one query at the last key sees all
    fit(torch.randn(2, 3, 9, 9))
    causal = fit_additive(z, check=False).to_frame()
    fit(z.masked_fill(~allowed(4, 8), -torch.inf))
    for value in (-torch.inf, -1e9, torch.finfo(torch.float32).min, 0.0):  # the last queries of cached generation
        assert fit_additive(z.masked_fill(~allowed(4, 8), value)).to_frame().equals(causal)
