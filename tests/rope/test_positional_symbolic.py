"""The positional–symbolic plane against tables that are really formed, and keys that are really shuffled."""

from __future__ import annotations

import pytest
import torch

from tl_posdisent.rope import Rotary, positional_symbolic_qk
from tl_posdisent.rope import positional_symbolic as module
from tl_posdisent.rope.rotary import to_complex


def case(*, length: int = 20, heads: int = 4, kv: int = 2, rest: int = 3, pairing="half", shift=0.0, factor=1.0):
    generator = torch.Generator().manual_seed(0)
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64), pairing, factor)
    q, k = (torch.randn(2, length, n, 6 + rest, generator=generator, dtype=torch.float64) for n in (heads, kv))
    return q + shift, k + 3 * shift, rotary


def table(q: torch.Tensor, k: torch.Tensor, rotary: Rotary, only: int | None = None) -> torch.Tensor:
    """``x[p, j]`` of the last query: every key at every place, for one head."""
    (zq, q_rest), (zk, k_rest) = to_complex(q, rotary), to_complex(k, rotary)
    i = len(k) - 1
    distance = i - torch.arange(len(k), dtype=torch.float64)
    turn = torch.exp(1j * distance[:, None] * rotary.frequencies)
    each = rotary.attention_factor**2 * (zq[None, None] * zk.conj()[None] * turn[:, None]).real
    if only is not None:
        return each[..., only]
    return each.sum(-1) + (k_rest @ q_rest)[None]


def brute_force(q, k, rotary, only=None) -> torch.Tensor:
    """[batch, head, 2] from tables, with textbook variances."""
    out = torch.zeros(len(q), q.shape[2], 2, dtype=torch.float64)
    repeats = q.shape[2] // k.shape[2]
    for b in range(len(q)):
        for h in range(q.shape[2]):
            points = []
            for i in range(1, q.shape[1]):
                x = table(q[b, i, h], k[b, : i + 1, h // repeats], rotary, only)
                total = x.var(correction=0)
                points.append(torch.stack([x.mean(1).var(correction=0), x.mean(0).var(correction=0)]) / total)
            out[b, h] = torch.stack(points).mean(0)
    return out


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize(
    ("heads", "kv", "rest", "shift", "factor"),
    [(4, 2, 3, 0.0, 1.0), (2, 2, 0, 0.0, 1.3), (3, 1, 2, 50.0, 1.0), (2, 1, 3, 0.0, 1.5), (2, 1, 2, 1.0, 0.4)],
)
def test_equals_tables(pairing: str, heads: int, kv: int, rest: int, shift: float, factor: float, monkeypatch) -> None:
    """Also where coordinates that are rotated are stretched (YaRN), and others are not."""
    monkeypatch.setattr(module, "_QUERIES_AT_ONCE", 7)  # several blocks
    q, k, rotary = case(heads=heads, kv=kv, rest=rest, pairing=pairing, shift=shift, factor=factor)
    table = positional_symbolic_qk(q, k, rotary)
    expected = brute_force(q, k, rotary)
    assert table["head"].tolist() == [*range(heads)] * 2
    found = torch.tensor(table[["positional", "symbolic"]].values).view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    by_subspace = positional_symbolic_qk(q, k, rotary, by_subspace=True)
    assert by_subspace["frequency"].tolist() == rotary.frequencies.tolist() * 2 * heads
    for c, alone in by_subspace.groupby("subspace"):
        found = torch.tensor(alone[["positional", "symbolic"]].values).view(expected.shape)
        torch.testing.assert_close(found, brute_force(q, k, rotary, int(c)), rtol=1e-8, atol=1e-10)


def test_equals_sampled_permutations() -> None:
    """The definition: shuffle keys among places twice, correlate what stands at a place, and what a key gets."""
    q, k, rotary = case(length=12)
    x = table(q[0, -1, 0], k[0, :, 0], rotary)
    n, generator = len(x), torch.Generator().manual_seed(1)
    first, second = (torch.rand(40_000, n, generator=generator).argsort(-1) for _ in range(2))  # key at each place
    places = torch.arange(n)
    centred = x - x.mean()
    stay = (centred[places, first] * centred[places, second]).mean(-1) / x.var(correction=0)
    travel = (centred[first.argsort(-1), places] * centred[second.argsort(-1), places]).mean(-1) / x.var(correction=0)
    for sampled, exact in ((stay, x.mean(1)), (travel, x.mean(0))):
        error = sampled.mean() - exact.var(correction=0) / x.var(correction=0)
        assert abs(error) < 4 * sampled.std() / len(sampled) ** 0.5


def test_scores_that_do_not_vary_are_nan() -> None:
    q, k, rotary = case()
    assert bool(positional_symbolic_qk(torch.zeros_like(q), k, rotary)["positional"].isna().all())
