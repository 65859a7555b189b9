"""The dense fit against the least that reading the scores can cost: one float64 sum over them."""

from __future__ import annotations

import torch
from common import device, medians, report

from tl_posdisent import fit_additive


def main() -> None:
    rows = []
    for heads, length in ((32, 512), (32, 1024), (8, 2048)):
        scores = torch.randn(heads, length, length, device=device())
        times = medians({"fit": lambda s=scores: fit_additive(s), "sum": lambda s=scores: s.double().sum()})
        rows.append(
            {
                "heads": heads,
                "length": length,
                "fit s": times["fit"],
                "scores.double().sum() s": times["sum"],
                "ratio": times["fit"] / times["sum"],
            }
        )
    report("dense_limit", "Additive fit against one sum over the scores", rows)


if __name__ == "__main__":
    main()
