"""Rows about scores: fits, correlations, Toeplitz shares."""

from __future__ import annotations

import torch

from tl_posdisent import fit_additive, fit_additive_qk, fit_attention
from tl_posdisent.additive import fit_attention_qk, score_correlation
from tl_posdisent.rope import principal_angles, toeplitz_share

from .given import INF, NAN, SCORES, numbers, with_one
from .row import Row, gives, refused

X = numbers(3, 6, 6)
NOTHING = torch.zeros(6, 6, dtype=torch.bool)
ONE_EMPTY = torch.ones(3, 6, 6, dtype=torch.bool).tril()
ONE_EMPTY[1] = False
ONE_CELL = NOTHING.clone()
ONE_CELL[4, 2] = True
Q, K = numbers(5, 2, 4), numbers(5, 2, 4, seed=1)


def _masked_nan() -> bool:
    spoilt = X.masked_fill(~torch.ones(6, 6).tril().bool(), NAN)
    return torch.equal(fit_additive(spoilt).fitted(), fit_additive(X).fitted())


def _constant() -> bool:
    fit = fit_additive(torch.full((2, 5, 5), 7.0))
    return bool(fit.r2.isnan().all()) and torch.equal(fit.intercept, torch.full((2,), 7.0, dtype=torch.float64))


def _one_cell() -> bool:
    fit = fit_additive(X, mask=ONE_CELL)
    return bool(fit.r2.isnan().all()) and torch.equal(fit.fitted()[:, 4, 2], X[:, 4, 2].double())


def _same_as_plain(x: torch.Tensor) -> bool:
    """However the numbers lie in memory, and whatever follows them in autograd."""
    return torch.equal(fit_additive(x).r2, fit_additive(x.detach().clone().contiguous()).r2)


def _nearly_largest() -> bool:
    """Scores whose squares overflow float32, but not float64."""
    return torch.allclose(fit_additive(X * 1e28).r2, fit_additive(X).r2, rtol=1e-5)


ROWS: list[Row] = [
    refused("fit_additive", "one axis", lambda at: fit_additive(numbers(6)), "scores must have", "(6,)"),
    refused("fit_additive", "no axis", lambda at: fit_additive(torch.tensor(1.0)), "scores must have"),
    refused("fit_additive", "integers", lambda at: fit_additive(torch.ones(6, 6).long()), "scores must", "torch.int64"),
    refused("fit_additive", "booleans", lambda at: fit_additive(torch.ones(6, 6) > 0), "scores must", "torch.bool"),
    refused("fit_additive", "complex", lambda at: fit_additive(X * 1j), "scores must", "torch.complex64"),
    refused("fit_additive", "a list", lambda at: fit_additive(X.tolist()), "scores must", "list"),
    refused("fit_additive", "an array of NumPy", lambda at: fit_additive(X.numpy()), "scores must", "ndarray"),
    refused("fit_additive", "None", lambda at: fit_additive(None), "scores must", "NoneType"),
    refused("fit_additive", "empty", lambda at: fit_additive(numbers(0, 6, 6)), "scores must"),
    refused("fit_additive", "one key", lambda at: fit_additive(numbers(3, 1, 1)), "scores must"),
    refused("fit_additive", "more queries than keys", lambda at: fit_additive(numbers(6, 4)), "6 queries and 4 keys"),
    refused("fit_additive", "NaN", lambda at: fit_additive(with_one(NAN, 3, 6, 6)), "finite", "nan", "(0, 0, 0)"),
    refused("fit_additive", "inf", lambda at: fit_additive(with_one(INF, 3, 6, 6)), "finite", "inf", "(0, 0, 0)"),
    refused("fit_additive", "a masking value", lambda at: fit_additive(with_one(-3.4e38, 3, 6, 6)), "-3.4e+38", "mask"),
    refused("fit_additive", "on no device", lambda at: fit_additive(X.to("meta")), "scores must", "meta"),
    refused("fit_additive", "sparse", lambda at: fit_additive(X[0].to_sparse()), "scores must", "sparse"),
    refused("fit_additive", "a mask that leaves nothing", lambda at: fit_additive(X, mask=NOTHING), "mask must leave"),
    refused(
        "fit_additive",
        "one of the masks leaves nothing",
        lambda at: fit_additive(X, mask=ONE_EMPTY),
        "mask must leave at least one cell",
        "(1,)",
    ),
    refused("fit_additive", "a mask of numbers", lambda at: fit_additive(X, mask=torch.ones(6, 6)), "mask must have"),
    refused(
        "fit_additive", "a mask of another size", lambda at: fit_additive(X, mask=ONE_CELL[:5]), "mask must have shape"
    ),
    refused(
        "fit_additive",
        "masks of another batch",
        lambda at: fit_additive(X, mask=ONE_EMPTY[:2]),
        "mask must broadcast",
    ),
    refused("fit_additive", "an unknown mask", lambda at: fit_additive(X, mask="lower"), "mask must be", "'lower'"),
    refused("fit_additive", "no mask", lambda at: fit_additive(X, mask=None), "mask must be", "None"),
    refused("fit_additive", "window 0", lambda at: fit_additive(X, window=0), "window must be", "0"),
    refused("fit_additive", "half a window", lambda at: fit_additive(X, window=2.5), "window must be", "2.5"),
    refused("fit_additive", "pool by number", lambda at: fit_additive(X, pool=1), "pool must be"),
    refused("fit_additive", "nothing to pool", lambda at: fit_additive(X[0], pool=True), "pool=True needs"),
    gives("fit_additive", "NaN outside the mask", lambda at: _masked_nan()),
    gives("fit_additive", "constant scores have no r", lambda at: _constant()),
    gives("fit_additive", "a single cell is fitted", lambda at: _one_cell()),
    gives("fit_additive", "requires gradients", lambda at: _same_as_plain(X.clone().requires_grad_())),
    gives("fit_additive", "made in inference mode", lambda at: _same_as_plain(_inferred(X))),
    gives("fit_additive", "transposed in memory", lambda at: _same_as_plain(X.mT.contiguous().mT)),
    gives("fit_additive", "expanded, without memory of its own", lambda at: _same_as_plain(X[:1].expand(4, 6, 6))),
    gives("fit_additive", "very great scores", lambda at: _nearly_largest()),
    refused("fit_additive_qk", "no scale", lambda at: fit_additive_qk(Q, K, scale=NAN), "scale must"),
    refused("fit_additive_qk", "scale in words", lambda at: fit_additive_qk(Q, K, scale="1"), "scale must"),
    refused("fit_additive_qk", "another width", lambda at: fit_additive_qk(Q, K[..., :3], scale=1.0), "d_head"),
    refused("fit_additive_qk", "another batch", lambda at: fit_additive_qk(Q[None], K, scale=1.0), "q_rot"),
    refused("fit_additive_qk", "3 heads on 2", lambda at: fit_additive_qk(numbers(5, 3, 4), K, scale=1.0), "multiple"),
    refused("fit_additive_qk", "NaN", lambda at: fit_additive_qk(with_one(NAN, 5, 2, 4), K, scale=1.0), "q_rot must"),
    refused("fit_additive_qk", "inf", lambda at: fit_additive_qk(Q, with_one(INF, 5, 2, 4), scale=1.0), "k_rot must"),
    refused("fit_additive_qk", "integers", lambda at: fit_additive_qk(Q.long(), K, scale=1.0), "q_rot must"),
    refused("fit_additive_qk", "empty", lambda at: fit_additive_qk(Q[:0], K[:0], scale=1.0), "q_rot"),
    refused("fit_additive_qk", "one position", lambda at: fit_additive_qk(Q[:1], K[:1], scale=1.0), "at least"),
    refused(
        "fit_additive_qk", "a boolean mask", lambda at: fit_additive_qk(Q, K, scale=1.0, mask=ONE_CELL), "mask must be"
    ),
    refused("fit_attention", "nothing", lambda at: fit_attention(), "scores or pattern="),
    refused("fit_attention", "a pattern for scores", lambda at: fit_attention(X.softmax(-1)), "pass", "pattern="),
    refused("fit_attention", "scores for a pattern", lambda at: fit_attention(pattern=X), "pattern must be"),
    refused("fit_attention", "another mask", lambda at: fit_attention(pattern=X.softmax(-1)), "pattern must", "mask"),
    refused("fit_attention", "masking values", lambda at: fit_attention(with_one(-INF, 3, 6, 6)), "finite", "-inf"),
    refused("fit_attention", "one axis", lambda at: fit_attention(numbers(6)), "scores must have", "(6,)"),
    refused("fit_attention", "bands descend", lambda at: fit_attention(X, bands=(4, 2)), "bands must", "(4, 2)"),
    refused("fit_attention", "half a band", lambda at: fit_attention(X, bands=(0.5,)), "bands must", "0.5"),
    refused("fit_attention", "pseudo-count", lambda at: fit_attention(X, pseudo_count=1.0), "pseudo_count must"),
    refused("fit_attention", "a needless sink", lambda at: fit_attention(X, sink=True), "sink must be", "keys"),
    refused("fit_attention", "keys elsewhere", lambda at: fit_attention(X, keys=numbers(5, 1, 4)), "keys must have"),
    refused("fit_attention", "keys are NaN", lambda at: fit_attention(X, keys=numbers(6, 1, 4) * NAN), "keys must be"),
    refused("fit_attention", "nothing to pool", lambda at: fit_attention(X[0], pool=True), "pool=True needs"),
    refused(
        "fit_attention",
        "hard zeros",
        lambda at: fit_attention(pattern=torch.eye(6), pseudo_count=0),
        "pseudo_count must be above 0",
    ),
    refused("fit_attention_qk", "no scale", lambda at: fit_attention_qk(Q, K, scale=NAN), "scale must"),
    refused("fit_attention_qk", "another batch", lambda at: fit_attention_qk(Q[None], K, scale=1.0), "q_rot"),
    refused("fit_attention_qk", "a mask", lambda at: fit_attention_qk(Q, K, scale=1.0, mask=ONE_CELL), "mask must be"),
    refused("score_correlation", "unequal shapes", lambda at: score_correlation(X, X[:2]), "shape"),
    refused("score_correlation", "one axis", lambda at: score_correlation(X[0, 0], X[0, 0]), "must have"),
    refused("score_correlation", "NaN", lambda at: score_correlation(X, with_one(NAN, 3, 6, 6)), "finite"),
    refused("score_correlation", "no cells", lambda at: score_correlation(X, X, mask=NOTHING), "mask must leave"),
    gives(
        "score_correlation",
        "constant scores correlate with nothing",
        lambda at: bool(score_correlation(X, torch.ones_like(X)).isnan().all()),
    ),
    refused("toeplitz_share", "integers", lambda at: toeplitz_share(X.long()), "scores must", "torch.int64"),
    refused("toeplitz_share", "NaN", lambda at: toeplitz_share(with_one(NAN, 3, 6, 6)), "finite"),
    refused("toeplitz_share", "nothing to pool", lambda at: toeplitz_share(X[0], pool=True), "pool"),
    gives("toeplitz_share", "constant scores", lambda at: bool(toeplitz_share(torch.ones(5, 5)).isnan())),
    refused("principal_angles", "a vector", lambda at: principal_angles(X[0, 0], X[0]), "a must"),
    refused("principal_angles", "other spaces", lambda at: principal_angles(X[0], X[0, :5]), "b must", "same d"),
    refused("principal_angles", "NaN", lambda at: principal_angles(X[0], X[0] * NAN), "b must"),
    refused("principal_angles", "no direction", lambda at: principal_angles(X[0], X[0] * 0), "b must"),
]
ROWS += [
    refused(function.__name__, "window below 1", lambda at, f=function, a=arguments: f(*a, window=-1), "window must be")
    for function, arguments in ((score_correlation, (SCORES, SCORES)), (toeplitz_share, (SCORES,)))
]


def _inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 1
