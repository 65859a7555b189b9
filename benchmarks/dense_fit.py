"""The dense fit against fixed-effects and sparse least squares, and against one float64 sum over the scores."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from common import device, medians, report

from tl_posdisent import fit_additive

HEADS = 8


def one_hot(length: int) -> tuple[sp.csr_matrix, np.ndarray, np.ndarray]:
    """The design that a user would write down: a column for every distance, query and key."""
    i, j = np.tril_indices(length)
    cell = np.arange(len(i))
    columns = np.concatenate([i - j, length + i, 2 * length + j])
    design = sp.csr_matrix((np.ones(3 * len(i)), (np.tile(cell, 3), columns)), shape=(len(i), 3 * length))
    return design, i, j


def r_of(fitted: np.ndarray, scores: np.ndarray) -> float:
    return float(np.corrcoef(fitted, scores)[0, 1])


def lsqr(design: sp.csr_matrix, ys: np.ndarray) -> list[float]:
    return [r_of(design @ sp.linalg.lsqr(design, y, atol=1e-12, btol=1e-12, iter_lim=20_000)[0], y) for y in ys]


def scikit_learn(design: sp.csr_matrix, ys: np.ndarray) -> list[float]:
    from sklearn.linear_model import LinearRegression

    model = LinearRegression(tol=1e-12).fit(design, ys.T)
    return [r_of(fitted, y) for fitted, y in zip(model.predict(design).T, ys, strict=True)]


def pyfixest(i: np.ndarray, j: np.ndarray, ys: np.ndarray) -> list[float]:
    """Three-way fixed effects as a user would ask for them."""
    import pyfixest

    table = pd.DataFrame({"d": i - j, "i": i, "j": j} | {f"y{n}": y for n, y in enumerate(ys)})
    fits = [pyfixest.feols(f"y{n} ~ 1 | d + i + j", table, fixef_tol=1e-10, fixef_rm="none") for n in range(len(ys))]
    return [float(np.sqrt(1 - fit.resid().var() / y.var())) for fit, y in zip(fits, ys, strict=True)]


def pyfixest_kernel(i: np.ndarray, j: np.ndarray, ys: np.ndarray) -> list[float]:
    """Its compiled kernel alone, all heads at once, without the regression around it."""
    from pyfixest.estimation import demean

    effects = np.column_stack([i - j, i, j]).astype(np.uint64)
    residual, converged = demean(ys.T.copy(), effects, np.ones(len(i)), tol=1e-10, maxiter=100_000)
    assert converged
    return [float(np.sqrt(1 - res.var() / y.var())) for res, y in zip(residual.T, ys, strict=True)]


def scores_like_a_model(length: int) -> torch.Tensor:
    """A slope, loud keys, and noise."""
    generator = torch.Generator().manual_seed(0)
    i = torch.arange(length)
    distance = -torch.log1p((i[:, None] - i).clamp_min(0).float())
    parts = [torch.randn(HEADS, length, 1, generator=generator), torch.randn(HEADS, 1, length, generator=generator)]
    return distance + sum(parts) + torch.randn(HEADS, length, length, generator=generator)


def against_others() -> None:
    rows = []
    for length in (512, 1024):
        scores = scores_like_a_model(length)
        design, i, j = one_hot(length)
        ys = scores.double().numpy()[:, i, j]
        ours = fit_additive(scores).r
        rivals = {
            "pyfixest": lambda i=i, j=j, ys=ys: pyfixest(i, j, ys),
            "pyfixest's kernel": lambda i=i, j=j, ys=ys: pyfixest_kernel(i, j, ys),
            "scipy lsqr": lambda design=design, ys=ys: lsqr(design, ys),
            "scikit-learn": lambda design=design, ys=ys: scikit_learn(design, ys),
        }
        for name, rival in list(rivals.items()):
            try:
                error = max(abs(a - b) for a, b in zip(rival(), ours.tolist(), strict=True))
            except ImportError as missing:
                print(f"{name} left out: {missing}")
                continue
            times = medians({"ours": lambda scores=scores: fit_additive(scores), name: rival}, repeats=3)
            rows.append(
                {
                    "length": length,
                    "against": name,
                    "ours s": times["ours"],
                    "theirs s": times[name],
                    "times faster": times[name] / times["ours"],
                    "largest difference of r": error,
                }
            )
    report("dense_fit", f"Additive fit of {HEADS} heads", rows)


def against_a_sum() -> None:
    """The least that reading the scores can cost."""
    rows = []
    for heads, length in ((32, 512), (32, 1024), (8, 2048)):
        scores = torch.randn(heads, length, length, device=device())
        times = medians({"fit": lambda s=scores: fit_additive(s), "sum": lambda s=scores: s.double().sum()})
        row = {"heads": heads, "length": length, "fit s": times["fit"], "scores.double().sum() s": times["sum"]}
        rows.append(row | {"ratio": times["fit"] / times["sum"]})
    report("dense_limit", "Additive fit against one sum over the scores", rows)


if __name__ == "__main__":
    against_others()
    against_a_sum()
