"""The exact positional–symbolic plane against sampling permutations of the keys."""

from __future__ import annotations

import torch
from common import device, medians, report, seconds

from tl_posdisent.rope import Rotary, positional_symbolic_qk
from tl_posdisent.rope.rotary import to_complex

PERMUTATIONS = 1000


def sampled(q: torch.Tensor, k: torch.Tensor, rotary: Rotary, queries: torch.Tensor) -> torch.Tensor:
    """For these queries of one head: correlations between pairs of shuffles, at places and at keys."""
    zq, zk = (to_complex(x[:, 0].double(), rotary)[0] for x in (q, k))
    points = []
    for i in queries.tolist():
        n = i + 1
        turn = torch.exp(1j * rotary.angles(torch.arange(i, -1, -1, device=q.device).double()))
        table = ((zq[i] * turn) @ zk[:n].conj().T).real
        centred = table - table.mean()
        first, second = (torch.rand(PERMUTATIONS, n, device=q.device).argsort(-1) for _ in range(2))
        places = torch.arange(n, device=q.device)
        stay = (centred[places, first] * centred[places, second]).mean()
        travel = (centred[first.argsort(-1), places] * centred[second.argsort(-1), places]).mean()
        points.append(torch.stack([stay, travel]) / table.var(correction=0))
    return torch.stack(points).mean(0)


def main() -> None:
    rows = []
    for length in (128, 512):
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(length, 1, 64, generator=generator).to(device()) for _ in range(2))
        rotary = Rotary(10000 ** -(torch.arange(32, device=device()).double() / 32))
        exact = medians({"exact": lambda q=q, k=k, rotary=rotary: positional_symbolic_qk(q, k, rotary)})["exact"]
        some = torch.arange(length // 16, length, length // 16)  # evenly spaced, then scaled to all queries
        time = seconds(lambda: sampled(q, k, rotary, some)) * (length - 1) / len(some)  # noqa: B023
        rows.append(
            {
                "length": length,
                "exact s": exact,
                f"{PERMUTATIONS} permutations s": time,
                "sampling": f"extrapolated from {len(some)} queries",
                "times faster": time / exact,
            }
        )
    report("plane", "Positional–symbolic point of one head, all queries, d_head 64", rows)


if __name__ == "__main__":
    main()
