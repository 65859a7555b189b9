"""The best additive attention: its optimum is that of generic solvers, and its marginals are the data's."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from support.attention_patterns import causal, marginals, mixed, pattern_of
from support.masks import CASES, padding
from support.tolerance import TIMES
from torch import Tensor

from tl_posdisent import fit_attention
from tl_posdisent.additive import AttentionFit
from tl_posdisent.additive.attention import newton, patterns
from tl_posdisent.additive.attention.newton import MARGINAL_ERROR
from tl_posdisent.additive.attention.rungs import RUNGS, n_parameters
from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.utils.errors import ArgumentError

CLOSE = TIMES * MARGINAL_ERROR


def planted(n: int = 24, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A distance component, and logits of it and of importances."""
    generator = torch.Generator().manual_seed(seed)
    profile, keys = 2 * torch.randn(2, n, generator=generator, dtype=torch.float64)
    return profile, profile[cell_distances(n, n).clamp_min(0)] + keys


def test_planted_components_are_found_up_to_what_the_softmax_ignores() -> None:
    profile, logits = planted()
    fit = fit_attention(logits, pseudo_count=0)
    assert fit.explained.item() == pytest.approx(1, abs=1e-9)
    # What is left of the planted profile, less the found one, is a straight line and a constant.
    d = torch.arange(len(profile)).double()
    freedoms = torch.stack([d, torch.ones_like(d)], 1)
    rest = profile - fit.distance
    line = torch.linalg.lstsq(freedoms, rest[:, None]).solution
    torch.testing.assert_close(freedoms @ line, rest[:, None], rtol=0, atol=1e-6)
    torch.testing.assert_close(fit.pattern(), pattern_of(logits, causal(len(d))), rtol=0, atol=1e-8)


def test_components_obey_the_convention() -> None:
    n = 24
    fit = fit_attention(planted()[1])
    at, counts = torch.arange(n).double(), (n - torch.arange(n)).double()  # of each distance, and of each key
    zero = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close((fit.distance * counts).sum(), zero, rtol=0, atol=1e-9)
    torch.testing.assert_close((fit.key * counts).sum(), zero, rtol=0, atol=1e-9)
    lever = counts * (at - (at * counts).sum() / counts.sum())
    torch.testing.assert_close((lever * fit.key).sum(), zero, rtol=0, atol=1e-8)


def test_what_softmax_ignores_changes_nothing() -> None:
    case = CASES["causal-40"]
    scores = case.scores()
    query = 50 * torch.randn(*scores.shape[:-1], 1, dtype=torch.float64)
    plain, shifted = fit_attention(scores), fit_attention(scores + query)
    for name in ("distance", "key", "kl", "explained"):
        torch.testing.assert_close(getattr(shifted, name), getattr(plain, name), rtol=0, atol=1e-6)
    by_pattern = fit_attention(pattern=pattern_of(scores, case.mask))
    torch.testing.assert_close(by_pattern.key, plain.key, rtol=0, atol=1e-8)
    spoilt = torch.where(case.mask, scores, torch.nan)
    torch.testing.assert_close(fit_attention(spoilt).key, plain.key, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", [False, True])
def test_padding_changes_nothing(pool: bool) -> None:
    """A text in a padded batch is that text alone; texts that are pooled share their profile, padded or not."""
    mask = padding(12, (0, 3), (2, 0))
    scores = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    fit = fit_attention(scores, mask=mask, pool=pool)
    if pool:
        assert fit.distance.shape == (3, 10)
    for text, real in enumerate((slice(0, 10), slice(3, 12))):
        alone = fit_attention(scores[text, :, real, real])
        if not pool:
            torch.testing.assert_close(fit.kl[text, :, real], alone.kl, rtol=0, atol=1e-9)
        assert float(fit.kl[text, :, ~mask[text, 0].any(-1)].abs().sum()) == 0


def test_pooled_texts_share_one_profile() -> None:
    """At the optimum, distances get the attention of all texts together, and keys that of their own."""
    mask = causal(10)
    scores = torch.randn(3, 2, 10, 10, dtype=torch.float64)
    fit = fit_attention(scores, pool=True)
    data = mixed(pattern_of(scores, mask), mask, 1e-3)
    found, expected = marginals(fit.pattern(), 0, 9), marginals(data, 0, 9)
    torch.testing.assert_close(found[0].sum(0), expected[0].sum(0), rtol=0, atol=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-8)
    repeated = fit_attention(scores[:1].expand(4, -1, -1, -1), pool=True)
    torch.testing.assert_close(repeated.distance, fit_attention(scores[0]).distance, rtol=0, atol=1e-6)


def test_one_feature_for_each_key_is_a_free_fit() -> None:
    scores = torch.randn(2, 9, 9, dtype=torch.float64)
    free = fit_attention(scores)
    static = fit_attention(scores, keys=torch.eye(9, dtype=torch.float64)[:, None], sinks=0)
    torch.testing.assert_close(static.pattern(), free.pattern(), rtol=0, atol=1e-7)


def test_a_planted_static_head_is_found() -> None:
    """Over texts with a shared direction, profile and sink; and on each head's own key vectors."""
    keys = torch.randn(4, 15, 2, 3, dtype=torch.float64)
    direction = torch.randn(6, 3, dtype=torch.float64)
    profile, sink = torch.randn(6, 15, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    importance = torch.einsum("tkhf,hf->thk", keys.repeat_interleave(3, 2), direction)
    importance[..., :1] += sink
    logits = importance[..., None, :] + profile[:, cell_distances(15, 15).clamp_min(0)]
    fit = fit_attention(logits, keys=keys, pseudo_count=0)
    assert fit.direction is not None
    assert fit.sinks is not None
    assert fit.pooled
    torch.testing.assert_close(fit.direction, direction, rtol=0, atol=1e-6)
    torch.testing.assert_close(fit.sinks, sink, rtol=0, atol=1e-6)
    torch.testing.assert_close(fit.key, importance, rtol=0, atol=1e-6)
    torch.testing.assert_close(fit.pattern(), pattern_of(logits, causal(15)), rtol=0, atol=1e-8)


def test_tables_hold_the_results() -> None:
    fit: AttentionFit = fit_attention(torch.randn(2, 3, 6, 6))
    summary = fit.to_frame()
    assert summary.columns.tolist() == ["batch", "head", "explained", "kl"]
    assert summary["explained"].tolist() == fit.explained.flatten().tolist()
    keys = fit.to_frame("key")
    assert keys.columns.tolist() == ["batch", "head", "key", "value"]
    assert keys.query("batch == 1 and head == 2 and key == 3")["value"].item() == fit.key[1, 2, 3]
    distances = fit.to_frame("distance")
    assert distances.query("batch == 1 and head == 0 and distance == 4")["value"].item() == fit.distance[1, 0, 4]
    assert "explained" in fit._repr_html_()
    assert fit.to_frame("query").query("batch == 0 and head == 1 and query == 5")["value"].item() == fit.kl[0, 1, 5]
    both_ways = fit_attention(torch.randn(4, 4), mask="full").to_frame("distance")
    assert both_ways["distance"].tolist() == list(range(-3, 4))


def test_a_representation_solves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_attention(torch.randn(2, 9, 9))

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("solved")

    monkeypatch.setattr(newton, "_solve_together", refuse)
    assert f"explained {fit.explained.mean():.3f}" in repr(fit)
    assert f"{fit.explained[1]:.3f}"[:4] in fit._repr_html_()
    with pytest.raises(AssertionError, match="solved"):
        fit_attention(torch.randn(2, 9, 9))


@pytest.mark.parametrize("static", [False, True])
def test_several_layers_are_fitted_as_each_alone(static: bool) -> None:
    """A whole cache, of scores or patterns, or a list; with keys, texts share a direction in each layer."""
    noise = torch.randn(2, 3, 2, 9, 9, dtype=torch.float64)
    scores = dict(zip((4, 1), noise.masked_fill(~causal(9), -torch.inf), strict=True))
    keys = torch.randn(3, 2, 9, 1, 2, dtype=torch.float64)  # text, layer, key, key head, feature
    cache = {f"blocks.{layer}.attn.hook_attn_scores": x for layer, x in scores.items()}
    cache |= {f"blocks.{layer}.attn.hook_pattern": x.softmax(-1) for layer, x in scores.items()}
    given: list[dict[str, Any]] = [{"scores": cache}, {"pattern": cache}, {"scores": [scores[1], scores[4]]}]
    for arguments in given:
        fit = fit_attention(**arguments, keys=keys if static else None)
        assert fit.pooled is static
        assert fit.layers == ((0, 1) if isinstance(arguments.get("scores"), list) else (1, 4))
        for component in ("summary", "distance", "key", "query"):
            table = fit.to_frame(component)
            for n, (layer, at) in enumerate(zip((1, 4), fit.layers, strict=True)):
                alone = fit_attention(scores[layer], keys=keys[:, n] if static else None).to_frame(component)
                got = table[table["layer"] == at].drop(columns="layer").reset_index(drop=True)
                pd.testing.assert_frame_equal(got, alone, rtol=1e-6, atol=1e-6)
    with pytest.raises(ArgumentError, match="pool must be False for layers without an axis of texts"):
        fit_attention([x[0] for x in scores.values()], pool=True)
    one_text = fit_attention([x[0] for x in scores.values()], keys=keys[0] if static else None)
    assert not one_text.pooled  # its first axis is that of the layers


@pytest.mark.parametrize("options", [{}, {"pseudo_count": 0}], ids=str)
def test_a_previous_token_head_to_the_letter(options: dict) -> None:
    """What gets no attention at all needs a coefficient of minus infinity, or one as low as can be told."""
    fit = fit_attention(pattern=torch.eye(5), **options)
    assert fit.explained.item() > 0.99
    assert bool(fit.converged)
    assert bool(fit.key.isfinite().all())


@pytest.mark.parametrize("options", [{}, {"mask": "full"}, {"window": 5}, {"pool": True}], ids=str)
def test_blocks_of_few_queries_and_of_one_head_are_the_whole(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    k, scores = torch.randn(2, 30, 2, 6, dtype=torch.float64), torch.randn(2, 4, 30, 30, dtype=torch.float64)
    expected = fit_attention(scores, keys=k, **options)
    monkeypatch.setattr(patterns, "_BLOCK_CELLS", 100)
    found = fit_attention(scores, keys=k, **options)
    for name in ("distance", "key", "direction", "sinks", "kl", "explained"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sinks", [0, 1])
def test_distances_without_features_are_those_of_a_generic_solver(sinks: int) -> None:
    """``softmax(d[i - j])``, with a term for the first key or without."""
    scores, mask, d = torch.randn(9, 9, dtype=torch.float64), causal(9), cell_distances(9, 9).clamp_min(0)
    data = mixed(pattern_of(scores, mask), mask, 1e-3)
    first = sinks * torch.eye(9, dtype=torch.float64)[0]

    def objective(values: object) -> tuple[float, object]:
        x = torch.as_tensor(values).requires_grad_()
        logits = (x[d] + x[-1] * first).masked_fill(~mask, -torch.inf)
        loss = (logits.logsumexp(-1) - (data * logits.masked_fill(~mask, 0.0)).sum(-1)).sum()
        return loss.item(), torch.autograd.grad(loss, x)[0].numpy()

    found = minimize(objective, torch.zeros(10).double().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
    x = torch.as_tensor(found.x)
    fit = fit_attention(scores[None], keys=torch.zeros(9, 1, 0, dtype=torch.float64), sinks=sinks)
    torch.testing.assert_close(fit.pattern()[0], pattern_of(x[d] + x[-1] * first, mask), rtol=0, atol=1e-6)


def test_numbers_that_a_rung_fits() -> None:
    inside = torch.ones(5, 5).tril().bool()
    assert [n_parameters(rung, inside, 3) for rung in RUNGS] == [0, 0, 5, 6, 9, 10, 0]
