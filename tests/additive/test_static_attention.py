"""Static heads on texts that they were not fitted on: by brute force, causal, and refused where nothing was fitted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.attention_patterns import causal, divergence, marginals, mixed, pattern_of
from support.masks import padding
from support.tolerance import TIMES
from torch import Tensor

from tl_posdisent import fit_attention
from tl_posdisent.additive.attention import newton
from tl_posdisent.additive.attention.features import first_keys

N, L, HEADS, KV, F = 3, 12, 4, 2, 3
GENERATOR = torch.Generator().manual_seed(0)
KEYS = torch.randn(N, L, KV, F, generator=GENERATOR)
SCORES = torch.randn(N, HEADS, L, L, generator=GENERATOR)
OTHER = torch.randn(2, 9, KV, F, generator=GENERATOR)
CLOSE = TIMES * newton.MARGINAL_ERROR


def by_hand(fit: Any, keys: Tensor, mask: Tensor) -> Tensor:
    """Cell by cell."""
    texts, n = keys.shape[:2]
    out = torch.full((texts, HEADS, n, n), -torch.inf, dtype=torch.float64)
    for t in range(texts):
        seen = mask[t].any(0).nonzero().flatten().tolist()
        for h in range(HEADS):
            for i, j in mask[t].nonzero().tolist():
                score = fit.distance[h, fit.distances.tolist().index(i - j)]
                score = score + fit.direction[h] @ keys[t, j, h // (HEADS // KV)].double()
                n_sinks = 0 if fit.sinks is None else fit.sinks.shape[-1]
                if j in seen[:n_sinks]:
                    score = score + fit.sinks[h, seen.index(j)]
                out[t, h, i, j] = score
    return out


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_scores_of_another_text_cell_by_cell(sinks: int) -> None:
    fit = fit_attention(SCORES, keys=KEYS, sinks=sinks)
    assert f"static: {KEYS.shape[-1]} features" + {0: "\n", 1: " and a sink\n"}.get(sinks, " and 3 sinks\n") in repr(
        fit
    )
    mask = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(fit.static_scores(OTHER), by_hand(fit, OTHER, mask))
    mask[0, :, :2] = False  # padding
    mask[0, :2] = False
    mask[1] &= ~torch.ones(9, 9, dtype=torch.bool).tril(-4)  # a window
    got = fit.static_scores(OTHER, mask=mask[:, None])
    torch.testing.assert_close(got, by_hand(fit, OTHER, mask))
    torch.testing.assert_close(got[0, :, 2:, 2:], fit.static_scores(OTHER[0, 2:]))
    torch.testing.assert_close(got[1], fit.static_scores(OTHER[1], window=4))
    torch.testing.assert_close(got[1], fit.static_scores(OTHER[1], mask=mask[1]))


def test_profiles_fitted_on_padded_texts_reach_as_far_as_the_longest() -> None:
    mask = torch.ones(N, 1, L, L, dtype=torch.bool).tril()
    for text, length in enumerate((7, 9, 8)):
        mask[text, :, length:] = False
    fit = fit_attention(SCORES, keys=KEYS, mask=mask)
    fit.static_scores(OTHER)  # nine tokens
    with pytest.raises(ValueError, match="0 to 8, got a text with distance 9: fit"):
        fit.static_scores(KEYS[:, :10])


def test_the_texts_of_the_fit_get_its_pattern() -> None:
    for options in ({}, {"pool": False}, {"sinks": 0}, {"sinks": 2}):
        fit = fit_attention(SCORES, keys=KEYS, **options)
        torch.testing.assert_close(fit.static_scores(KEYS).softmax(-1), fit.pattern())
    for scores, keys in ((SCORES, KEYS), (SCORES[0], KEYS[0])):  # no feature: a profile, and a sink or not
        for sinks in (0, 1):
            alone = fit_attention(scores, keys=keys[..., :0], sinks=sinks)
            torch.testing.assert_close(alone.static_scores(keys[..., :0]).softmax(-1), alone.pattern())


def pooled_masks() -> dict[str, tuple[Tensor, int]]:
    """Masks of pooled texts `(text, 1, query, key)`, and the number of texts whose patterns must be computed."""
    i, whole = torch.arange(L), causal(L).repeat(N, 1, 1, 1)
    inside = i < torch.tensor([7, L, 9])[:, None, None]
    longer = whole & inside[:, None] & inside[..., None]
    window = i[:, None] - i < 5
    holes = whole.clone()
    holes[2, :, 8, 4] = False
    return {
        "equal": (whole, 1),
        "lengths": (longer, 1),
        "window": (longer & window, 1),
        "other first keys": (padding(L, (0, 3, 0), (2, 0, 0)), N),
        "holes": (holes, N),
    }


POOLED = pooled_masks()


@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("name", POOLED)
def test_distances_and_first_keys_of_pooled_texts_get_the_attention_of_the_data(
    name: str, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without features a text's pattern depends on its mask alone, and is computed once where texts share it."""
    (mask, n_texts), evaluated, evaluate = POOLED[name], set[int](), newton.AttentionSums

    def sums(systems: Any, stacked: Tensor, *times: Any) -> Any:
        evaluated.add(stacked.shape[1])
        return evaluate(systems, stacked, *times)

    monkeypatch.setattr(newton, "AttentionSums", sums)
    fit = fit_attention(SCORES, keys=KEYS[..., :0], sinks=sinks, mask=mask)
    assert evaluated == {n_texts}
    own, mask = pattern_of(SCORES.double(), mask), mask.expand(SCORES.shape)
    low, high = int(fit.distances[0]), int(fit.distances[-1])
    found, expected = (marginals(x, low, high) for x in (fit.pattern(), mixed(own, mask, fit.pseudo_count)))
    torch.testing.assert_close(found[0].sum(0), expected[0].sum(0), rtol=CLOSE, atol=CLOSE)
    first = first_keys(mask.any(-2), sinks)
    found, expected = (torch.einsum("thk,thkn->hn", x[1], first) for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(fit.kl, divergence(own, fit.pattern()), rtol=0, atol=1e-9)


def test_some_heads_are_those_of_all() -> None:
    fit = fit_attention(SCORES, keys=KEYS)
    some = fit.static_scores(OTHER[:, :, [1, 0]], heads=[3, 1])
    assert torch.equal(some, fit.static_scores(OTHER)[:, [3, 1]])
    assert torch.equal(fit.static_scores(OTHER[:, :, 1:], heads=-1), some[:, :1])


def test_what_follows_a_query_does_not_matter() -> None:
    fit = fit_attention(SCORES, keys=KEYS)
    changed = OTHER.clone()
    changed[:, 5:] = 9.0
    a, b = (fit.static_scores(x).softmax(-1) for x in (OTHER, changed))
    assert torch.equal(a[:, :, :5], b[:, :, :5])
    assert not torch.equal(a[:, :, 5:], b[:, :, 5:])


def test_distances_that_were_not_fitted() -> None:
    fit = fit_attention(SCORES, keys=KEYS, window=6)
    with pytest.raises(
        ValueError, match=r"keys must come from texts whose distances were fitted, 0 to 5, got .* 8: fit"
    ):
        fit.static_scores(OTHER)
    i, j = 8, 3
    expected = fit.distance[:, 5] + (fit.direction * OTHER[0, j, [0, 0, 1, 1]].double()).sum(-1)
    torch.testing.assert_close(fit.static_scores(OTHER, window=6)[0, :, i, j], expected)
    scattered = torch.ones(L, L, dtype=torch.bool).tril()
    distance = torch.arange(L)[:, None] - torch.arange(L)
    scattered &= (distance != 3) & (distance != 4)
    gap = fit_attention(SCORES, keys=KEYS, mask=scattered)
    with pytest.raises(ValueError, match="with distance 4: fit"):
        gap.static_scores(OTHER)


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    fit = fit_attention(SCORES, keys=KEYS)
    with pytest.raises(ValueError, match=r"static_scores needs a fit .* keys=\), got one with free importances"):
        fit_attention(SCORES).static_scores(KEYS)
    for keys in (OTHER[..., :2], OTHER[:, :, [0, 1, 0]], OTHER[0, 0], OTHER[:, :0]):
        with pytest.raises(ValueError, match=r"keys must have shape \(\*texts, key, kv_head, 3\) .* 4 heads, got \("):
            fit.static_scores(keys)
    with pytest.raises(ValueError, match=r"keys must have shape \(3, key, kv_head, 3\)"):
        fit_attention(SCORES, keys=KEYS, pool=False).static_scores(OTHER)
    for keys, got in ((OTHER.long(), "torch.int64"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"keys must be a floating point tensor, got {got}"):
            fit.static_scores(keys)
    with pytest.raises(ValueError, match="keys must be finite, got 108 NaN or infinite values"):
        fit.static_scores(OTHER * torch.nan)
    with pytest.raises(ValueError, match="heads must be integers from 0 to 3"):
        fit.static_scores(OTHER, heads=4)


def test_few_keys_for_each_feature_are_warned_of() -> None:
    """With the numbers; of the keys of all pooled texts, and not of padding; and such a direction is of no use."""
    n, length, size = 2, 30, 30
    random = torch.Generator().manual_seed(1)
    keys, others = (torch.randn(some, length, 1, size, generator=random, dtype=torch.float64) for some in (n, 8))
    of_key = 3 * torch.randn(n, 1, 1, length, generator=random, dtype=torch.float64)  # by nothing that features tell
    planted = 0.3 * torch.randn(size, generator=random, dtype=torch.float64)
    scores = (of_key + (keys[:, :, 0] @ planted)[:, None, None]).expand(-1, -1, length, -1)

    def static(texts: Tensor) -> Tensor:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return (texts[:, :, 0] @ planted)[:, None, None].expand(-1, 1, length, -1).masked_fill(~mask, -torch.inf)

    with pytest.warns(
        UserWarning, match=r"direction of 30 features is fitted to 60 keys: with fewer than 4 .*120 in all"
    ):
        few = fit_attention(scores, keys=keys)
    truth = static(others).log_softmax(-1)

    def lost(scores: Tensor) -> float:
        return float((truth.exp() * (truth - scores.log_softmax(-1)).nan_to_num()).sum(-1).mean())

    assert few.explained.item() > 0.7
    assert lost(few.static_scores(others, mask=truth[0, 0] > -torch.inf)) > lost(static(0 * others))  # than uniform
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = fit_attention(scores.repeat(2, 1, 1, 1), keys=torch.cat([keys, keys]))
        fit_attention(scores, keys=keys[..., :15])
        fit_attention(scores, keys=keys[..., :0])
        fit_attention(scores)
    assert many.explained.item() == pytest.approx(few.explained.item(), abs=1e-3)
    padded = torch.ones(4, 1, length, length, dtype=torch.bool).tril()
    padded[3, :, :, 5:] = False
    with pytest.warns(UserWarning, match="fitted to 95 keys"):
        fit_attention(scores.repeat(2, 1, 1, 1), keys=torch.cat([keys, keys]), mask=padded)
