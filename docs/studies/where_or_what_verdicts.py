"""How often are verdicts of ``where_or_what`` wrong, for divergences with known shares?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.rows import TABLES
from torch import Tensor

from tl_posdisent.experiments.needs.shares import shares, verdicts

TEXTS, SPREADS = (4, 6, 8, 12, 16), (0.15, 0.4, 1.0)
CASES = {"where is 1/2": (0.5, 0.98), "what is 1/2": (0.98, 0.5), "what": (0.1, 0.9), "neither": (0.95, 0.95)}
"""The true shares; for content, of each of three constants."""


def main() -> None:
    """Write ``where_or_what_verdicts.csv``."""
    sizes = [(n, torch.full((n,), 95.0)) for n in TEXTS] + [(8, torch.linspace(20, 180, 8).round())]
    rows = [measured(n, lengths.double(), spread) for n, lengths in sizes for spread in SPREADS]
    pd.DataFrame(rows).round(3).to_csv(TABLES / "where_or_what_verdicts.csv", index=False)


def measured(n_texts: int, lengths: Tensor, spread: float, heads: int = 1000) -> dict[str, Any]:
    """Rates of a share of a half taken for more and for less, and of the right and of another verdict at two corners.

    A text multiplies all of its divergences by a lognormal factor (0.6 is the standard deviation of its logarithm), and
    each divergence by one of its own (``spread``), half of whose variance the three constants share.
    """
    row: dict[str, Any] = {"texts": n_texts, "lengths": f"{lengths.min():.0f} to {lengths.max():.0f}", "spread": spread}
    for seed, (name, (where, what)) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        text = 0.01 * factors(generator, (n_texts, heads), 0.6)
        contribution, distance, uniform = (text * factors(generator, text.shape, spread) for _ in range(3))
        common = text * factors(generator, text.shape, spread * 0.5**0.5)
        content = common * factors(generator, (3, *text.shape), spread * 0.5**0.5)
        lost = (1 - where) * distance, 0.02 * uniform, (1 - what) * content
        table = shares(contribution, *lost, lengths, (1, 5, 32))
        found = pd.Series(verdicts(table, lengths, 0.0005))
        if name.endswith("1/2"):
            less = "what" if name.startswith("where") else "where"
            row |= {f"{name}, more": (found == "neither").mean(), f"{name}, less": (found == less).mean()}
        else:
            row |= {f"{name}, right": (found == name).mean()}
            row |= {f"{name}, wrong": (~found.isin([name, "undecided"])).mean()}
    return row


def factors(generator: torch.Generator, shape: tuple[int, ...], spread: float) -> Tensor:
    """Lognormal numbers with mean 1 and this standard deviation of the logarithm."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (spread * normal - spread**2 / 2).exp()
