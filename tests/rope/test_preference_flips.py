"""Preference flips: counted by brute force over all pairs, 0 for additive scores, and tied to Kendall's τ."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from scipy.stats import kendalltau
from support.lanes import slow
from torch import Tensor

from tl_posdisent.rope import Rotary, preference_flips_qk
from tl_posdisent.rope import preference_flips as module
from tl_posdisent.rope.rotary import to_complex

NEAR, FAR = (0, 1, 2, 3.5), (7, 12, 30)


def case(*, n_query: int = 5, n_key: int = 9, heads: int = 4, kv: int = 2, factor: float = 1.0, pairing: Any = "half"):
    generator = torch.Generator().manual_seed(0)
    rotary = Rotary(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64), pairing, factor)
    q = torch.randn(2, n_query, heads, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(2, n_key, kv, 8, generator=generator, dtype=torch.float64)
    return q, k, rotary


def scores(q: Tensor, k: Tensor, rotary: Rotary, distances: Any) -> Tensor:
    """``W[d, j]`` of one query with all keys, by complex numbers."""
    (zq, q_rest), (zk, k_rest) = to_complex(q, rotary), to_complex(k, rotary)
    turn = torch.exp(1j * torch.tensor(distances, dtype=torch.float64)[:, None, None] * rotary.frequencies)
    return (rotary.attention_factor**2 * zq * zk.conj() * turn).real.sum(-1) + k_rest @ q_rest


def flips(x: Tensor, pairs: list[tuple[int, int]]) -> float:
    """Of one query: the fraction of pairs of distances and of keys that flip."""
    found = [
        bool((x[d, a] - x[d, b]) * (x[e, a] - x[e, b]) < 0)
        for d, e in pairs
        for a, b in combinations(range(x.shape[1]), 2)
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("options", "at_once"), [({}, 2**20), ({"factor": 1.7, "pairing": "adjacent"}, 150), ({"heads": 3, "kv": 1}, 1)]
)
def test_equals_brute_force_over_all_pairs(options: dict[str, Any], at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_CELLS_AT_ONCE", at_once)
    q, k, rotary = case(**options)
    found = preference_flips_qk(q, k, rotary, NEAR, FAR)
    n, m = len(NEAR), len(FAR)
    kinds = {
        "near": list(combinations(range(n), 2)),
        "far": list(combinations(range(n, n + m), 2)),
        "near_far": [(d, e) for d in range(n) for e in range(n, n + m)],
    }
    group = q.shape[2] // k.shape[2]
    for text in range(2):
        for head in range(q.shape[2]):
            tables = [scores(row, k[text, :, head // group], rotary, NEAR + FAR) for row in q[text, :, head]]
            for name, pairs in kinds.items():
                wanted = sum(flips(x, pairs) for x in tables) / len(tables)
                row = found[(found["batch"] == text) & (found["head"] == head)]
                assert row[name].item() == pytest.approx(wanted, abs=1e-12)
    assert found["near_far"].std() > 0.01


def test_it_is_half_of_one_minus_kendalls_tau() -> None:
    q, k, rotary = case(n_query=1, n_key=12)
    found = preference_flips_qk(q, k, rotary, [0], [7])["near_far"]
    near, far = scores(q[0, 0, 0], k[0, :, 0], rotary, [0, 7])
    assert found[0] == pytest.approx((1 - kendalltau(near, far).statistic) / 2, abs=1e-12)


def test_it_is_zero_for_an_additive_head_to_rounding() -> None:
    """Keys that differ only where nothing turns, far from 0 and nearly equal: rounding must not flip them."""
    q, k, rotary = case(n_key=40)
    rotary = Rotary(torch.tensor([1.0, 0.3], dtype=torch.float64), "adjacent")
    k[..., :4] = torch.tensor([30.0, -20.0, 5.0, 70.0])
    k[..., 4:] = 1 + 1e-9 * k[..., 4:]
    parts = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)  # one sum, rounded by the order of its parts
    orders = torch.stack([parts[torch.randperm(4)] for _ in range(40)])[:, None].expand(2, -1, 2, -1)
    summed = torch.cat([k[..., :4], orders], -1)
    q[..., 4:] = 1
    for keys in (k, k.float(), summed):
        found = preference_flips_qk(q.to(keys.dtype), keys, rotary, range(8), range(8, 40))
        assert found[["near", "far", "near_far"]].abs().max().tolist() == [0, 0, 0]
    k[..., 4:] = k[..., :4]  # ties everywhere: all keys are alike
    assert preference_flips_qk(q, k[:, :, :1].expand(-1, -1, 2, -1), rotary, [0, 1], [2])["near"].max() == 0


def test_one_distance_has_no_pairs() -> None:
    q, k, rotary = case()
    found = preference_flips_qk(q, k, rotary, [0], [5])
    assert found.isna().all().tolist() == [False, False, True, True, False]
    assert list(found.columns) == ["batch", "head", "near", "far", "near_far"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *slow([torch.float16, torch.float64])])
def test_what_is_counted_for_two_keys_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Keys of sizes from 1e-4 to 1e4, in any dtype: the sum of what each pair gives alone, which is that of float64."""
    q, k, rotary = case(n_query=3, n_key=7)
    sizes = torch.tensor([1, 1, 1e-4, 1e4, 1, 30.0, 1e-2])
    q, k = q.to(dtype), (k * sizes[:, None, None]).to(dtype)
    columns = ["near", "far", "near_far"]
    together = preference_flips_qk(q, k, rotary, NEAR, FAR)[columns]
    apart = [preference_flips_qk(q, k[:, list(pair)], rotary, NEAR, FAR)[columns] for pair in combinations(range(7), 2)]
    assert (together - sum(apart) / len(apart)).abs().max().max() < 1e-12
    pairs = [(d, e) for d in range(len(NEAR)) for e in range(len(NEAR), len(NEAR + FAR))]
    tables = [
        [scores(row, k[text, :, head // 2].double(), rotary, NEAR + FAR) for row in q[text, :, head].double()]
        for text in range(2)
        for head in range(4)
    ]
    wanted = [sum(flips(x, pairs) for x in head) / len(head) for head in tables]
    assert together["near_far"].tolist() == pytest.approx(wanted, abs=1e-12)
    assert together["near_far"].min() > 0.1


def test_keys_of_one_token_are_tied_whatever_others_are_there() -> None:
    """Equal to the rounding of float32: never a flip between them, beside a key of any size."""
    q, k, rotary = case(n_key=4)
    twins = torch.cat([k[:, :1], k[:, :1] * (1 + 1e-7 * torch.randn(2, 5, 2, 8).double())], 1).float()
    for size in (0.0, 1e-3, 1e5):
        given = torch.cat([twins, (size * k[:, 1:2]).float()], 1)
        found = preference_flips_qk(q.float(), given, rotary, NEAR, FAR)
        one = preference_flips_qk(q.float(), given[:, [0, 6]], rotary, NEAR, FAR)
        assert (found["near_far"] * 21 - 6 * one["near_far"]).abs().max() < 1e-9
