"""Additive attention: compared with Poisson fixed effects and torch's L-BFGS."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import device, medians, report, seconds

from tl_posdisent import fit_attention

HEADS = 8


def scores_like_a_model(length: int, heads: int = HEADS, sharpness: float = 1.0) -> torch.Tensor:
    """A slope, loud keys, a sink, and noise."""
    generator = torch.Generator().manual_seed(0)
    i = torch.arange(length)
    distance = -2 * torch.log1p((i[:, None] - i).clamp_min(0).float())
    keys = torch.randn(heads, 1, length, generator=generator)
    keys[..., 0] += 4
    noise = torch.randn(heads, length, length, generator=generator)
    return sharpness * (distance + keys + noise).to(device())


def pattern_of(scores: torch.Tensor) -> torch.Tensor:
    """What is fitted, with the pseudo-count."""
    inside = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    pattern = scores.double().masked_fill(~inside, -torch.inf).softmax(-1)
    return 0.999 * pattern + 0.001 * inside / inside.sum(-1, keepdim=True)


def divergence(pattern: torch.Tensor, fitted: torch.Tensor) -> float:
    """Mean over heads of the sum over queries."""
    return float((torch.special.xlogy(pattern, pattern) - torch.special.xlogy(pattern, fitted)).sum() / len(pattern))


def lbfgs(pattern: torch.Tensor, goal: float) -> float:
    """Of the dense logits, until the divergence is the goal."""
    length = pattern.shape[-1]
    i = torch.arange(length, device=pattern.device)
    distance, inside = (i[:, None] - i).clamp_min(0), i[:, None] >= i
    d, k = (pattern.new_zeros(len(pattern), length, requires_grad=True) for _ in range(2))
    entropy = torch.special.entr(pattern).sum() / len(pattern)
    optimiser = torch.optim.LBFGS([d, k], max_iter=20, history_size=20, line_search_fn="strong_wolfe")
    last = torch.inf

    def loss() -> torch.Tensor:
        nonlocal last
        optimiser.zero_grad()
        logits = (d[:, distance] + k[:, None]).masked_fill(~inside, -torch.inf)
        x = (logits.logsumexp(-1).sum() - (pattern * logits.masked_fill(~inside, 0.0)).sum()) / len(pattern)
        x.backward()
        last = float(x.detach() - entropy)
        return x

    for _ in range(20):  # 400 evaluations
        optimiser.step(loss)
        if last <= goal:
            break
    return last


def fepois(pattern: torch.Tensor) -> float:
    """Fixed effects of query, distance and key, head by head."""
    import pyfixest

    i, j = np.tril_indices(pattern.shape[-1])
    total = 0.0
    for head in pattern.cpu().numpy():
        y = head[i, j]
        table = pd.DataFrame({"y": y, "i": i, "j": j, "d": i - j})
        fit = pyfixest.fepois("y ~ 1 | i + j + d", table, iwls_tol=1e-8, fixef_rm="none")
        mu = np.asarray(fit.predict(type="response"))
        total += float((y * np.log(y / mu)).sum())
    return total / len(pattern)


def against_others(lengths: Sequence[int] = (512, 2048)) -> None:
    """The others fit one head of eight, as they take heads one after the other; times are those of eight."""
    rows = []
    for length in lengths:
        scores = scores_like_a_model(length)
        pattern = pattern_of(scores[:1])
        ours = divergence(pattern, fit_attention(scores[:1]).pattern().clamp_min(1e-300))
        one = medians({"ours": partial(fit_attention, scores)}, repeats=3)
        for name, rival in {"fepois": fepois, "L-BFGS": lambda p, goal=ours: lbfgs(p, goal * (1 + 1e-6))}.items():
            reached: list[float] = []
            try:
                time = HEADS * seconds(lambda rival=rival, p=pattern, reached=reached: reached.append(rival(p)))
            except ImportError as missing:
                print(f"{name} left out: {missing}")
                continue
            row = {"length": length, "against": name, "ours s": one["ours"], "theirs s": time}
            rows.append(row | {"times faster": time / one["ours"], "KL ours": ours, "KL theirs": reached[0]})
            print(rows[-1], flush=True)
    report("attention_fit", f"Additive attention of {HEADS} heads, by scores", rows)


def multiples_of_a_pass() -> None:
    rows = []
    for length in (512, 2048):
        for sharpness in (0.5, 1.0, 2.0, 3.0)[: 4 if length == 512 else 2]:
            scores = scores_like_a_model(length, sharpness=sharpness)
            fit = partial(fit_attention, scores)
            times = medians({"fit": fit, "pass": lambda s=scores: pattern_of(s)}, repeats=3)
            row = {"length": length, "sharpness": sharpness, "fit s": times["fit"]}
            row |= {"softmax s": times["pass"], "ratio": times["fit"] / times["pass"]}
            row["explained"] = fit_attention(scores).explained.mean().item()
            rows.append(row | steps(fit))
            print(rows[-1], flush=True)
    report("attention_passes", f"Additive attention of {HEADS} heads, as multiples of a softmax in float64", rows)


def steps(fit: Callable[[], object]) -> dict[str, int]:
    """Newton steps and products with the Hessian."""
    from tl_posdisent.additive.attention import newton

    counts = dict.fromkeys(("steps", "products"), 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    step, product = newton._newton_step, newton.AttentionSums.product
    newton._newton_step, newton.AttentionSums.product = counted("steps", step), counted("products", product)
    try:
        fit()
    finally:
        newton._newton_step, newton.AttentionSums.product = step, product
    return counts


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["against_others", "multiples_of_a_pass"]
    for name in chosen:
        globals()[name]()
