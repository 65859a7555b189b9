"""Scores without an additive part have r = 0: their marginals are rounding, which no model has to the last digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.lanes import slow
from support.masks import CASES
from torch import Tensor

from tl_posdisent import additivity, fit_additive, fit_additive_qk
from tl_posdisent.additive import least_squares
from tl_posdisent.hooks import drop_component, substitute_additive

# Of the additive part, and of the noise.
FLOAT32 = [(1.0, 1.0, torch.float32)]
OTHERS = [(1.0, 1.0, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]
OTHERS += [(100.0, 1.0, torch.float32), (1000.0, 0.5, torch.float64), (1e-20, 1e-20, torch.float32)]
POOLED = [(name, pool) for pool in (False, True) for name, case in CASES.items() if len(case.shape) > 2 or not pool]


def additive_and_noise(shape: tuple[int, ...], level: float, noise: float) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    *_, n_query, n_key = shape
    shapes = (shape, (*shape[:-1], 1), (*shape[:-2], 1, n_key))
    x, y, z = (torch.randn(some, generator=random, dtype=torch.float64) for some in shapes)
    distance = torch.arange(n_query)[:, None] + n_key - n_query - torch.arange(n_key)
    return noise * x + level * (3 + y + z - distance / n_key)


@pytest.mark.parametrize(
    ("name", "pool", "sizes"), [*((*case, FLOAT32) for case in POOLED), *slow((*case, OTHERS) for case in POOLED[::5])]
)
def test_a_residual_has_no_additive_part(name: str, pool: bool, sizes: list[tuple[float, float, torch.dtype]]) -> None:
    case = CASES[name]
    options: dict[str, Any] = {**case.options, "pool": pool, "check": False}
    for level, noise, dtype in sizes:
        scores = additive_and_noise(case.shape, level, noise).to(dtype)
        residual = fit_additive(scores, **options).residual(scores)
        for again in (residual, residual.float()):
            fit = fit_additive(again, **options)
            if bool((fit.n_cells > fit.n_parameters).all()):  # else there is no residual but rounding
                assert bool((fit.r < 1e-6).all())
                assert float(fit.fitted().abs().max()) < 1e-6 * float(residual.abs().max())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1500, 1500), {}),
        ((2, 40, 900), {"sinks": 4}),
        ((2, 3, 400, 400), {"pool": True}),
        *slow([((1, 3000, 3000), {"window": 3})]),
    ],
)
def test_of_any_length(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    scores = additive_and_noise(shape, 10.0, 1.0).float()
    residual = fit_additive(scores, check=False, **options).residual(scores)
    assert bool((fit_additive(residual, check=False, **options).r < 1e-6).all())


def test_a_small_additive_part_is_found() -> None:
    """A ten-millionth of the residual's size, to three digits."""
    scores = additive_and_noise((2, 60, 60), 1.0, 1.0)
    residual = fit_additive(scores).residual(scores)
    planted = fit_additive(additive_and_noise((2, 60, 60), 1.0, 0.0)).fitted() * 1e-7
    fitted = fit_additive(residual + planted).fitted()
    torch.testing.assert_close(fitted, planted, rtol=0, atol=1e-3 * float(planted.abs().max()))


def test_from_queries_and_keys_without_a_common_subspace() -> None:
    """Scores that are the rounding of zero have no correlation, and no error."""
    q, k = torch.randn(2, 50, 3, 8, dtype=torch.float64), torch.randn(2, 50, 3, 8, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    q[..., :4], k[..., 4:] = 0.0, 0.0
    for pool in (False, True):
        assert bool(fit_additive_qk(q @ turn, k @ turn, scale=1.0, pool=pool).r.isnan().all())


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("case", ["residual", "noise", "additive"])
def test_a_solver_that_stops_early_is_refused(case: str, pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the additive part, unless it is rounding."""
    scores = additive_and_noise((3, 50, 50), float(case == "additive"), 1.0)
    if case == "residual":
        scores = fit_additive(scores, pool=pool).residual(scores) + 1e-7 * additive_and_noise((3, 50, 50), 1.0, 0.0)
    solver = least_squares.conjugate_gradients
    monkeypatch.setattr(least_squares, "conjugate_gradients", lambda *args, most, **more: solver(*args, most=3, **more))
    if case == "residual":
        monkeypatch.setattr(
            least_squares, "conjugate_gradients", lambda *args, most, **more: solver(*args, most=0, **more)
        )
    with pytest.raises(RuntimeError, match=r"has not converged: relative residual .* needed"):
        fit_additive(scores, pool=pool)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_a_model_whose_scores_have_lost_their_additive_part(kind: str, name: str, shared_model: Any) -> None:
    """The residual has an r of the model's rounding, and what is left without it an r of nearly 1."""
    model, tokens = shared_model(kind, name), zoo.random_tokens(24)
    with model.hooks(fwd_hooks=substitute_additive(model, keep=["residual"])):
        table = additivity(model, tokens, progress=False)
        assert float(table["r"].max()) < 1e-5
    with model.hooks(fwd_hooks=drop_component(model, "residual")):
        assert float(additivity(model, tokens, progress=False)["r"].min()) > 1 - 1e-5
