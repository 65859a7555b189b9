"""Fits of attention patterns as sharp, degenerate and badly scaled as they come: optimal, or marked as not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support.lanes import slow
from torch import Tensor

from tl_posdisent import fit_attention
from tl_posdisent.additive.attention import newton
from tl_posdisent.additive.cells import cell_distances

KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "pooled": {"pool": True},
    "static": {"keys": None},
    "static-by-text": {"keys": None, "pool": False, "sinks": 0},
}


def drawn(kind: str, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Scores of up to three texts and two heads, a mask, and options."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    length, n_text, size = number(4, 11), number(1, 4), (1, 10, 50, 300)[seed % 4]
    scores = size * normal(n_text, 2, length, length).clamp(-1, 1)
    one, other = number(0, length), number(0, length)
    match number(0, 5):
        case 0:  # one key has all attention
            scores[..., one] += 600
        case 1:  # two equal keys have it
            scores[..., one] += 400
            scores[..., other] = scores[..., one]
        case 2:  # a steep slope
            scores -= size * cell_distances(length, length)
        case 3:  # a sink for half of the queries
            scores[..., 0] += 300 * (normal(n_text, 2, length) > 0)
        case _:
            scores = scores.round()
    mask = torch.ones(n_text, 1, length, length, dtype=torch.bool).tril()
    match number(0, 3):
        case 0:  # half of the rows are empty
            mask = mask & (normal(length, 1) > 0)
        case 1:  # half of the cells
            mask = mask & (normal(n_text, 1, length, length) > 0)
    mask[..., -1, :] = True
    options = dict(KINDS[kind])
    if "keys" in options:  # norms over six orders of magnitude, some keys repeated
        options["keys"] = normal(n_text, length, 1, 3) * 10 ** (6 * torch.rand(length, 1, 1, generator=g) - 3)
        options["keys"] = options["keys"][:, torch.randint(length, (length,), generator=g)]
    return scores, mask, options


def smoothed(scores: Tensor, mask: Tensor, pseudo_count: float = 1e-3) -> Tensor:
    pattern = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.lerp(pattern, mask / mask.sum(-1, keepdim=True).clamp_min(1).double(), pseudo_count)


def divergence(pattern: Tensor, logits: Tensor, mask: Tensor) -> Tensor:
    """KL per query, of matrices that are fitted together."""
    rows = mask.any(-1)
    total = logits.masked_fill(~mask, -torch.inf).logsumexp(-1)[rows].sum()
    total = total - (pattern * logits.masked_fill(~mask, 0.0)).sum() - torch.special.entr(pattern).sum()
    return total / rows.sum()


def lowest(pattern: Tensor, mask: Tensor, features: Tensor | None) -> float:
    """The divergence that scipy's L-BFGS reaches, of the texts of one head."""
    n_text, length = pattern.shape[:2]
    d = cell_distances(length, length)
    if features is None:
        features = torch.eye(n_text * length, dtype=torch.float64).reshape(n_text, length, -1)
    else:  # in combinations of one size
        seen = (features * mask.any(-2)[..., None]).flatten(0, 1)
        _, size, combinations = torch.linalg.svd(seen, full_matrices=False)
        features = features @ (combinations[size > 1e-13 * size[0]].mT / size[size > 1e-13 * size[0]])

    def objective(values: Any) -> tuple[float, Any]:
        x = torch.as_tensor(values).requires_grad_()
        logits = x[:length][d.clamp_min(0)] + (features @ x[length:])[:, None]
        loss = divergence(pattern, logits, mask)
        return loss.item(), torch.autograd.grad(loss, x)[0].numpy()

    options = {"maxiter": 3000, "maxfun": 3000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 40}
    start = np.zeros(length + features.shape[-1])
    return float(minimize(objective, start, jac=True, method="L-BFGS-B", options=options).fun)


@pytest.mark.parametrize("seed", [*range(4), *slow([5, 6])])
@pytest.mark.parametrize("kind", KINDS)
def test_no_divergence_is_lower(kind: str, seed: int) -> None:
    scores, mask, options = drawn(kind, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all converge
        warnings.filterwarnings("ignore", "a static head's direction")  # of few keys
        fit = fit_attention(scores, mask=mask, **options)
    pattern, inside, logits = smoothed(scores, mask), mask.expand(scores.shape), fit.logits()
    groups = [list(range(len(scores)))] if fit.pooled else [[text] for text in range(len(scores))]
    for head in range(2):
        for texts in groups:
            features = options["keys"][texts, :, 0] if "keys" in options else None
            if features is not None and options.get("sinks") != 0:
                seen = inside[texts, head].any(-2)
                first = (seen & (seen.cumsum(-1) == 1)).double()
                features = torch.cat([features, first[..., None]], -1)
            best = lowest(pattern[texts, head], inside[texts, head], features)
            assert float(divergence(pattern[texts, head], logits[texts, head], inside[texts, head])) <= best + 1e-6


@pytest.mark.parametrize("seed", [0, 1, *slow([2, 3])])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_pseudo_count_nothing_raises(kind: str, seed: int) -> None:
    """The optimum is often at infinity; what is found is finite and better than uniform attention."""
    scores, mask, options = drawn(kind, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = fit_attention(scores, mask=mask, pseudo_count=0, **options)
    assert bool(fit.kl.isfinite().all())
    assert bool(fit.distance.isfinite().all())
    assert bool((fit.gap >= 0).all())
    assert bool(((fit.explained > 0) | fit.explained.isnan()).all())


@pytest.mark.parametrize("features", [None, 0, *slow([3])])
def test_the_optimum_is_found_from_far_away(features: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is convex. A whole step of Newton's from coefficients that are wrong by 10 nats leads nowhere."""
    g = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(2, 2, 32, 32, generator=g)
    scores[..., 0] += 12
    options = {} if features is None else {"keys": torch.randn(2, 32, 1, features, generator=g), "pool": True}
    expected, begin = fit_attention(scores, **options), newton._begin

    def far_away(problem: newton.Problem) -> Tensor:
        start = begin(problem)
        return start + 10 * torch.randn(start.shape, generator=g, dtype=torch.float64)

    monkeypatch.setattr(newton, "_begin", far_away)
    fit = fit_attention(scores, **options)
    assert bool(fit.converged.all())
    torch.testing.assert_close(fit.kl, expected.kl, rtol=0, atol=1e-8)


def two_easy_and_one_hopeless() -> Tensor:
    scores = torch.randn(3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[1] = 300 * scores[1]
    return scores


def test_one_fit_does_not_change_the_others() -> None:
    scores = two_easy_and_one_hopeless()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = fit_attention(scores, pseudo_count=0)
    alone = [fit_attention(scores[head], pseudo_count=0) for head in (0, 2)]
    for name in ("distance", "key", "kl", "explained"):
        expected = torch.stack([getattr(fit, name) for fit in alone])
        torch.testing.assert_close(getattr(together, name)[[0, 2]], expected, rtol=0, atol=1e-7)


def test_what_does_not_converge_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "_MAX_STEPS", 5)
    with pytest.warns(UserWarning, match=r"1 of 3 fits of attention have not converged, at index \(1,\): ") as caught:
        fit = fit_attention(two_easy_and_one_hopeless(), pseudo_count=1e-6)
    assert len(caught) == 1
    assert fit.converged.tolist() == [True, False, True]
    assert bool(fit.gap[1] > 1e-6 > fit.gap[[0, 2]].max())
    assert fit.explained.isfinite().all()
    assert "1 not converged" in repr(fit)
    assert "not converged" not in repr(fit_attention(torch.randn(4, 4)))
