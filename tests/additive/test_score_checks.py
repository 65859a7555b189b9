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
from tl_posdisent.utils.errors import ArgumentError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTH = 12


def scores_of(dtype: torch.dtype = torch.float32, size: float = 3.0, length: int = LENGTH) -> Tensor:
    x = size * torch.randn(2, 3, length, length, generator=torch.Generator().manual_seed(0))
    return x.to(dtype)


def masked(scores: Tensor, cells: Tensor, value: float, how: str) -> Tensor:
    """Masked as models do: in place of the scores, or by addition."""
    if how == "replaced":
        return scores.masked_fill(~cells, value)
    return scores + torch.zeros(cells.shape, dtype=scores.dtype).masked_fill(~cells, value)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [*((fit_additive, dtype) for dtype in DTYPES), (fit_attention, torch.float32)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_masked_cells_inside_the_mask_are_refused(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """As models mask: with -inf, or with the lowest number of a dtype, in place of the scores or added to them."""
    causal, window = allowed(LENGTH, LENGTH), allowed(LENGTH, LENGTH, window=5)
    lowest = torch.finfo(dtype).min
    for value in (-torch.inf, lowest, *([lowest / 2] if dtype != torch.float16 else [])):
        for cells, options in ((causal, {"mask": "full"}), (window, {})):
            for how in ("replaced", "added"):
                scores = masked(scores_of(dtype), cells, value, how)
                n = int((~cells & allowed(LENGTH, LENGTH, **options)).sum()) * 6 - 1
                with pytest.raises(
                    ValueError, match=rf"inside the mask, got -.* at index .* and {n} more such cells; pass the mask"
                ):
                    function(scores, **options)
                function(scores, mask=cells)  # what was advised


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_cells_that_no_mask_explains_are_told_first(value: float) -> None:
    """Also behind a masked cell, and in a pattern."""
    scores = scores_of(torch.float32)
    scores[..., 5, 2], scores[..., 7, 3] = -torch.inf, value
    for function in (fit_additive, fit_attention):
        with pytest.raises(ValueError, match=rf"got {value} at .*query 7, key 3.* the model's weights or activations"):
            function(scores)
    with pytest.raises(ValueError, match=r"got NaN among .*; the model's weights"):
        fit_attention(pattern=scores.masked_fill(~allowed(LENGTH, LENGTH), -torch.inf).softmax(-1))


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


@pytest.mark.parametrize(  # fewer positions than coordinates, and more
    ("fit", "length"), [(fit_additive, 12), *slow([(fit_attention, 12), (fit_additive, 80), (fit_attention, 80)])]
)
def test_of_all_activations_only_scores_are_fitted(fit: Callable[[Tensor], Any], length: int) -> None:
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
    for value in (-torch.inf, torch.finfo(torch.float32).min, 0.0):  # the last queries of cached generation
        assert fit_additive(z.masked_fill(~allowed(4, 8), value)).to_frame().equals(causal)
