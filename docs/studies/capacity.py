"""Which functions of the distance can rotating subspaces represent?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row
from shared.texts import Source

from tl_posdisent.models import read_model
from tl_posdisent.rope import rope_capacity


def rows(model: Any, source: Source) -> Iterator[Row]:
    """r² of the best function of 450 distances that the rotary frequencies of the first layer give, with a ridge."""
    rotary = read_model(model).specs([0])[0].require_rotary("capacity")
    d = torch.arange(450.0, dtype=torch.float64)
    for name, target in {"-log(1 + d)": -torch.log1p(d), "d < 64": d < 64, "d < 8": d < 8, "d = 1": d == 1}.items():
        fit = rope_capacity(rotary, d, target.double(), ridge=1e-3, intercept=True)
        yield Row(
            f"r2 of {name}", fit.r2, torch.nan, "450 distances", 450, "rope_capacity(rotary, d, target, ridge=1e-3)"
        )
