"""Controlled distance in closed form against the tensor W[d, i, j] that it replaces."""

from __future__ import annotations

import torch
from common import device, medians, report, seconds

from tl_posdisent.rope import Moments, Rotary, decompose
from tl_posdisent.rope.rotary import to_complex

D_HEAD = 64
BLOCK = 16  # distances of the tensor in memory at a time


def brute_force(q: torch.Tensor, k: torch.Tensor, rotary: Rotary, distances: torch.Tensor) -> torch.Tensor:
    """Shares of the main effects and the total, from the tensor in blocks of distances, in float64."""
    zq, zk = (to_complex(x[:, 0].double(), rotary)[0] for x in (q, k))
    n = len(q)
    by_distance, sums, squares = [], torch.zeros(n, n, dtype=torch.float64, device=q.device), 0.0
    by_query, by_key = [], []
    for start in range(0, len(distances), BLOCK):
        turn = torch.exp(1j * rotary.angles(distances[start : start + BLOCK]))
        w = ((zq * turn[:, None]) @ zk.conj().T).real
        by_distance.append(w.mean((1, 2)))
        by_query.append(w.mean(2))
        by_key.append(w.mean(1))
        sums += w.sum(0)
        squares = squares + w.square().sum()
    pairs = sums / len(distances)
    mean = pairs.mean()
    total = squares / (len(distances) * n * n) - mean**2
    effects = [torch.cat(by_distance), pairs.mean(1), pairs.mean(0)]
    return torch.stack([e.var(correction=0) for e in effects]) / total


def main() -> None:
    rows = []
    for length in (256, 512, 1024):
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(length, 1, D_HEAD, generator=generator).to(device()) for _ in range(2))
        frequencies = 10000 ** -(torch.arange(D_HEAD // 2, device=device()).double() / (D_HEAD // 2))
        rotary, distances = Rotary(frequencies), torch.arange(length, device=device()).double()

        def closed(q: torch.Tensor = q, k: torch.Tensor = k, rotary: Rotary = rotary, n: int = length) -> torch.Tensor:
            return decompose(Moments.from_qk(q, k, rotary), range(n), scale=1.0).shares[:3, 0]

        if length <= 512:
            times = medians({"closed": closed, "brute": lambda a=(q, k, rotary, distances): brute_force(*a)}, repeats=3)
            brute, how = times["brute"], "measured"
            error = float((closed() - brute_force(q, k, rotary, distances)).abs().max())
        else:
            times = medians({"closed": closed})
            some = distances[: 4 * BLOCK]
            brute = seconds(lambda: brute_force(q, k, rotary, some)) * length / len(some)  # noqa: B023
            how, error = f"extrapolated from {4 * BLOCK} distances", float("nan")
        rows.append(
            {
                "length = distances": length,
                "closed form s": times["closed"],
                "tensor s": brute,
                "tensor": how,
                "times faster": brute / times["closed"],
                "largest difference of shares": error,
            }
        )
    report("controlled", f"Variance decomposition at controlled distances, one head, d_head {D_HEAD}", rows)


if __name__ == "__main__":
    main()
