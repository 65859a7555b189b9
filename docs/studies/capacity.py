"""Which functions of the distance can rotating subspaces represent?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row
from shared.texts import Source
from torch import Tensor

import tl_posdisent as tp

DISTANCES, RIDGE = 450, 1e-3


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r² of the best function of 450 distances that the rotary frequencies of the first layer give, with a ridge."""
    d = torch.arange(float(DISTANCES), dtype=torch.float64)
    angle = tp.read_model(model).specs(0)[0].rotary.angles(d)
    waves = torch.cat([angle.cos(), angle.sin()], 1)
    for name, target in {"-log(1 + d)": -torch.log1p(d), "d < 64": d < 64, "d < 8": d < 8, "d = 1": d == 1}.items():
        over, call = f"{DISTANCES} distances", f"least squares of cosines and sines of the rotation, ridge {RIDGE:g}"
        yield Row(f"r2 of {name}", r2(waves, target.double()), torch.nan, over, DISTANCES, call)


def r2(waves: Tensor, target: Tensor) -> float:
    """Of the waves and a constant: mean square error + ridge · sum of squared coefficients is least."""
    x, y = waves - waves.mean(0), target - target.mean()
    covariance = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    fitted = x @ torch.linalg.solve(covariance, x.T @ y / len(x))
    return 1 - float((y - fitted).square().mean() / y.square().mean())
