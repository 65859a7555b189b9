"""The term of low rank that depends on the query: no worse than torch's own search, and of each pattern by itself."""

from __future__ import annotations

import pytest
import torch
from support.masks import CASES
from torch import Tensor

from tl_posdisent import capture, demo_tokens, fit_attention, load_demo_model
from tl_posdisent.additive.attention.rungs import fit_query_term

PENALTY = 1e-4


def problem(scores: Tensor, mask: Tensor, bands: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Patterns with a pseudo-count, and logits of the banded fit."""
    base = fit_attention(scores, mask=mask, bands=bands, pool=False).logits()
    pattern = scores.double().masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.lerp(pattern, mask / mask.sum(-1, keepdim=True).clamp_min(1).double(), 1e-3), base


def divergence(p: Tensor, logits: Tensor) -> Tensor:
    """KL of each pattern, summed over queries."""
    q = logits.log_softmax(-1).nan_to_num(0.0, neginf=0.0)
    return (torch.special.xlogy(p, p) - p * q).sum((-2, -1))


def by_torch(p: Tensor, base: Tensor, rank: int) -> Tensor:
    """The term that 100 steps of torch's L-BFGS find for one pattern, by automatic differentiation."""
    rows = (base > -torch.inf).any(-1)
    p, seen = p[rows], base[rows]
    u, s, v = torch.linalg.svd(p - seen.softmax(-1), full_matrices=False)
    starts = (u[:, :rank] * s[:rank].sqrt(), v[:rank].mT * s[:rank].sqrt())
    factors = [start.contiguous().requires_grad_() for start in starts]
    options = {"max_iter": 100, "tolerance_grad": 1e-5, "tolerance_change": 1e-7, "line_search_fn": "strong_wolfe"}
    search = torch.optim.LBFGS(factors, **options)

    def objective() -> Tensor:
        search.zero_grad()
        term = factors[0] @ factors[1].mT
        value = (seen + term).logsumexp(-1).sum() - (p * term).sum()
        value = value + PENALTY / 2 * sum(factor.square().sum() for factor in factors)
        value.backward()
        return value

    search.step(objective)
    term = torch.zeros_like(base)
    term[rows] = (factors[0] @ factors[1].mT).detach()
    return term


def compare(p: Tensor, base: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Divergences of our term and of torch's."""
    p, base = p.flatten(0, -3), base.flatten(0, -3)
    theirs = torch.stack([by_torch(*each, rank) for each in zip(p, base, strict=True)])
    return divergence(p, base + fit_query_term(p, base, rank)), divergence(p, base + theirs)


def check(ours: Tensor, theirs: Tensor) -> None:
    """No worse in the mean. Both minimise the divergence plus a penalty, so one divergence may be slightly higher."""
    assert float(ours.mean()) <= float(theirs.mean()) * (1 + 1e-4) + 1e-6
    assert bool((ours <= theirs * (1 + 1e-2) + 1e-6).all()), (ours / theirs).tolist()


SHAPES = ("causal-40", "window-8", "documents", "random-50")


def compare_on(name: str, sharpness: float, rank: int) -> tuple[Tensor, Tensor]:
    """Divergences of our term and of torch's for random scores; ours is below that of the banded fit alone."""
    case = CASES[name]
    scores = sharpness * case.scores(seed=1)
    p, base = problem(scores, case.mask.expand(scores.shape), (1, 2, 4, 8))
    ours, theirs = compare(p, base, rank)
    assert bool((ours < divergence(p, base).flatten()).all())
    return ours, theirs


@pytest.mark.parametrize(("sharpness", "rank"), [(0.5, 1), (0.5, 2), (2.0, 1), (2.0, 2), (8.0, 1)])
@pytest.mark.parametrize("name", SHAPES)
def test_no_worse_than_torch_on_random_scores(name: str, sharpness: float, rank: int) -> None:
    check(*compare_on(name, sharpness, rank))


def test_no_worse_than_torch_in_the_mean_on_sharp_attention_of_rank_2() -> None:
    """Here are several local optima: each search ends at the better one of some patterns."""
    ours, theirs = map(torch.cat, zip(*(compare_on(name, 8.0, 2) for name in SHAPES), strict=True))
    assert float((ours / theirs).log().mean()) <= 0
    assert float((ours / theirs).max()) < 1.2


@pytest.mark.parametrize("rank", [1, 3])
def test_no_worse_than_torch_on_scores_of_a_model(rank: int) -> None:
    model = load_demo_model()
    of_layers = capture(model, demo_tokens(length=96), lambda layer: layer.scores, layers=[1, 3])
    scores = torch.cat(of_layers, 1)
    mask = torch.ones(scores.shape[-2:]).tril().bool().expand(scores.shape)
    ours, theirs = compare(*problem(scores, mask, (1, 2, 4, 8)), rank)
    check(ours, theirs)


def test_a_planted_term_is_found() -> None:
    """Where attention is additive but for a product of rank one, nothing remains."""
    g = torch.Generator().manual_seed(0)
    u, v, key = torch.randn(3, 24, generator=g, dtype=torch.float64)
    mask = torch.ones(24, 24).tril().bool()
    base = key.expand(24, 24).masked_fill(~mask, -torch.inf)
    p = (base + u[:, None] * v).softmax(-1)
    left = divergence(p, base + fit_query_term(p, base, 1))
    assert float(left) < 1e-2 * float(divergence(p, base))


def test_each_pattern_by_itself_again_and_again() -> None:
    case = CASES["causal-40"]
    p, base = problem(3 * case.scores(), case.mask.expand(case.shape), (1, 3))
    together = fit_query_term(p, base, 2)
    for one in range(len(p)):
        assert torch.equal(fit_query_term(p[one], base[one], 2), together[one])
    assert bool((together[..., ~case.mask] == 0).all())
    with torch.inference_mode():
        assert torch.equal(fit_query_term(p, base, 2), together)


def test_a_rank_above_that_of_the_pattern_is_the_whole_pattern() -> None:
    case = CASES["causal-9"]
    p, base = problem(case.scores(), case.mask.expand(case.shape), (1, 3))
    assert float(divergence(p, base + fit_query_term(p, base, 50)).max()) < 1e-3
