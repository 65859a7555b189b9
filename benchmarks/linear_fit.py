"""The linear-time fit: against the dense one, and how time and memory grow with the length."""

from __future__ import annotations

import json
import math
import sys

import torch
from common import device, in_a_process, medians, peak, report, seconds

from tl_posdisent import fit_additive, fit_additive_qk


def vectors(length: int, d_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(length, 1, d_head, generator=generator) for _ in range(2))
    return q.to(device()), k.to(device())


def dense(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return fit_additive(torch.einsum("ihd,jhd->hij", q, k)).r


def against_dense() -> None:
    rows = []
    for length in (1024, 2048, 4096, 8192):
        q, k = vectors(length, 64)
        linear = lambda q=q, k=k: fit_additive_qk(q, k, scale=1.0).r  # noqa: E731
        times = medians({"linear": linear, "dense": lambda q=q, k=k: dense(q, k)}, repeats=3)
        rows.append(
            {
                "length": length,
                "linear s": times["linear"],
                "dense s": times["dense"],
                "times faster": times["dense"] / times["linear"],
                "difference of r": float((linear() - dense(q, k)).abs().max()),
            }
        )
    report(
        "linear_against_dense", "One head, d_head 64: from queries and keys, or from scores (formed and fitted)", rows
    )


def one(length: int, d_head: int) -> None:
    """In a process of its own: the time, and the memory above that of the inputs."""
    q, k = vectors(length, d_head)
    fit_additive_qk(q[:256], k[:256], scale=1.0)
    times: list[float] = []
    extra = peak(lambda: times.append(seconds(lambda: fit_additive_qk(q, k, scale=1.0))))
    print(json.dumps([times[0], extra]))


def growth() -> None:
    for d_head in (64, 128):
        rows = []
        for length in (2**n for n in range(13, 21)):
            time, extra = sorted(in_a_process(__file__, length, d_head) for _ in range(3))[1]
            rows.append(
                {
                    "length": length,
                    "seconds": time,
                    "extra MiB": extra,
                    "q and k MiB": 2 * length * d_head * 4 / 2**20,
                    "scores would take GiB": length**2 * 4 / 2**30,
                }
            )
        exponent = math.log(rows[-1]["seconds"] / rows[0]["seconds"]) / math.log(rows[-1]["length"] / rows[0]["length"])
        report(f"linear_growth_{d_head}", f"One head, d_head {d_head}: time grows as length^{exponent:.2f}", rows)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        one(int(sys.argv[1]), int(sys.argv[2]))
    else:
        against_dense()
        growth()
