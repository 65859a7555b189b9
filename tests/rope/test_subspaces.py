"""Distance patterns: against complex numbers written out, and against what symmetry demands."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from support.rotary_layers import all_scores, anova, complex_subspaces
from torch import Tensor

from tl_posdisent.rope import Moments, Rotary, decompose, subspace_patterns_qk

SCALE = 0.3
DISTANCES = range(40)
FREQUENCIES = torch.tensor([1.2, 0.2, 0.003], dtype=torch.float64)
SHARES = ("distance", "semantic", "interaction")

LAYERS: dict[str, tuple[Rotary, int, int, int]] = {  # rotation, heads, key heads, d_head
    "half": (Rotary(FREQUENCIES), 2, 2, 6),
    "adjacent": (Rotary(FREQUENCIES, "adjacent"), 2, 2, 6),
    "grouped": (Rotary(FREQUENCIES), 6, 2, 6),
    "multi-query": (Rotary(FREQUENCIES, "adjacent"), 3, 1, 6),
    "partial": (Rotary(FREQUENCIES), 2, 2, 10),
    "odd rest": (Rotary(FREQUENCIES, "adjacent"), 2, 1, 9),
    "yarn": (Rotary(FREQUENCIES, attention_factor=1.3), 2, 2, 6),
}


def draw(layer: str = "half", n: int = 60) -> tuple[Tensor, Tensor, Rotary]:
    """Two texts of queries and keys, with means of their own and a spread that differs between coordinates."""
    rotary, heads, kv, d = LAYERS[layer]

    def side(h: int) -> Tensor:
        spread = torch.rand(h, d, dtype=torch.float64) + 0.2
        return torch.randn(h, d, dtype=torch.float64) + spread * torch.randn(2, n, h, d, dtype=torch.float64)

    return side(heads), side(kv), rotary


def tensors(table: pd.DataFrame) -> SimpleNamespace:
    """Each column as ``[head, subspace]``."""
    shape = table["head"].nunique(), -1
    return SimpleNamespace(**{name: torch.tensor(table[name]).view(shape) for name in table})


def patterns(q: Tensor, k: Tensor, rotary: Rotary, scale: float = SCALE) -> SimpleNamespace:
    return tensors(subspace_patterns_qk(q, k, rotary, DISTANCES, scale=scale))


def angle_between(a: Tensor, b: Tensor) -> float:
    """Largest difference of angles, whole turns aside."""
    return float(torch.polar(torch.ones_like(a), a - b).angle().abs().max())


# --- what it says it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_sizes_and_phases_are_those_of_the_complex_numbers(layer: str) -> None:
    q, k, rotary = draw(layer)
    found, n = patterns(q, k, rotary), len(FREQUENCIES)
    for side, x, repeats in (("query", q, 1), ("key", k, q.shape[2] // k.shape[2])):
        z = complex_subspaces(x, rotary).flatten(0, 1).repeat_interleave(repeats, 1)
        size = z.abs().mean(0)
        expected = {
            "size": size,
            "variation": z.abs().std(0, correction=0) / size,
            "concentration": z.mean(0).abs() / size,
            "phase": z.mean(0).angle(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(found, f"{side}_{name}")[:, :n], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_relative_phase_is_that_of_all_pairs(layer: str) -> None:
    q, k, rotary = draw(layer, n=20)
    found, n = patterns(q, k, rotary), len(FREQUENCIES)
    zq, zk = (complex_subspaces(x, rotary).flatten(0, 1) for x in (q, k))
    pairs = zq[:, None] * zk.conj().repeat_interleave(q.shape[2] // k.shape[2], 1)[None]
    assert angle_between(found.relative_phase[:, :n], pairs.mean((0, 1)).angle()) < 1e-12
    assert float(found.relative_phase[:, :n].abs().max()) <= math.pi


@pytest.mark.parametrize("layer", LAYERS)
def test_shares_over_subspaces_are_those_of_the_dense_tensor(layer: str) -> None:
    q, k, rotary = draw(layer, n=6)
    found = patterns(q, k, rotary)
    scores = all_scores(q, k, rotary, DISTANCES, SCALE)
    dense, total = anova(scores), scores.var((1, 2, 3), correction=0)
    expected = {
        "distance": dense["distance"],
        "semantic": dense["query"] + dense["key"] + dense["query:key"],
        "interaction": dense["distance:query"] + dense["distance:key"] + dense["distance:query:key"],
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name).sum(-1), value / total, rtol=1e-10, atol=1e-12)
    assert torch.allclose(torch.stack([getattr(found, x) for x in SHARES]).sum((0, -1)), torch.ones(()).double())


# --- the theorem: what turns, and what varies -------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["half", "grouped", "yarn"])
def test_spread_is_made_of_the_patterns(layer: str) -> None:
    """``|E q| · sd(k) · turn``, where ``sd² = size² (1 + variation² - concentration²)``."""
    q, k, rotary = draw(layer)
    found, moments = patterns(q, k, rotary), Moments.from_qk(q, k, rotary)
    mean_query = found.query_size * found.query_concentration
    sd_key = found.key_size * (1 + found.key_variation**2 - found.key_concentration**2).sqrt()
    z = complex_subspaces(k, rotary).flatten(0, 1).repeat_interleave(q.shape[2] // k.shape[2], 1)
    torch.testing.assert_close(sd_key, (z - z.mean(0)).abs().square().mean(0).sqrt())
    total = decompose(moments, DISTANCES, scale=SCALE).total
    size = SCALE * rotary.attention_factor**2 * mean_query * sd_key * found.turn
    torch.testing.assert_close(found.spread, size / total.sqrt()[:, None])


@pytest.mark.parametrize("layer", LAYERS)
def test_spread_bounds_the_interaction_with_the_key(layer: str) -> None:
    q, k, rotary = draw(layer)
    share = decompose(Moments.from_qk(q, k, rotary), DISTANCES, scale=SCALE).share("distance:key")
    assert bool((share <= patterns(q, k, rotary).spread.sum(-1) ** 2).all())


def test_turn_is_how_much_the_rotation_spreads() -> None:
    q, k, _ = draw()
    slow = Rotary(torch.tensor([math.pi, 1e-9, 0.0], dtype=torch.float64))
    found = tensors(subspace_patterns_qk(q, k, slow, DISTANCES, scale=SCALE))
    assert bool((found.turn == found.turn[0]).all())
    found.turn = found.turn[0]
    torch.testing.assert_close(found.turn[0], torch.tensor(1.0, dtype=torch.float64))  # half a turn at each step
    spread = torch.tensor(DISTANCES, dtype=torch.float64).std(correction=0)  # exp(i θ d) ≈ 1 + i θ d
    torch.testing.assert_close(found.turn[1], 1e-9 * spread)
    assert found.turn[2] == 0
    repeated = tensors(subspace_patterns_qk(q, k, slow, [0, 7, 0, 0], scale=SCALE))  # at 1 and at -1
    torch.testing.assert_close(repeated.turn[0, 0], torch.tensor(2 * math.sqrt(3) / 4, dtype=torch.float64))


# --- symmetries -------------------------------------------------------------------------------------------------------


def test_vectors_next_to_zero_have_no_say_in_the_phases() -> None:
    """Weighted phases: a thousand directions of noise do not hide that all keys of any size agree."""
    rotary = Rotary(FREQUENCIES[:1])
    k = torch.cat([torch.ones(10, 1, 2), 1e-6 * torch.randn(1000, 1, 2)]).double()
    found = patterns(k[:10], k, rotary)
    assert found.key_concentration.item() > 0.999
    assert found.key_phase.item() == pytest.approx(math.pi / 4, abs=1e-3)


# --- edges ------------------------------------------------------------------------------------------------------------


def test_many_chunks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, rotary = draw("grouped")
    whole = patterns(q, k, rotary)
    monkeypatch.setattr("tl_posdisent.rope.moments.NUMBERS_AT_ONCE", 100)
    parts = patterns(q, k, rotary)
    for name, x in vars(whole).items():
        torch.testing.assert_close(getattr(parts, name), x)


def test_equal_keys_do_not_vary() -> None:
    """Far from zero, and in float32: exactly 0, and concentrated to rounding."""
    q, _, rotary = draw()
    found = patterns(q, torch.full((2, 70, 2, 6), 1234.567), rotary)
    assert float(found.key_variation.max()) == 0
    assert float((1 - found.key_concentration).abs().max()) < 1e-15
    assert float(found.spread.max()) == 0


def test_what_is_not_there_is_nan() -> None:
    q, k, rotary = draw("odd rest")
    found = patterns(q, k, rotary)
    assert found.frequency[0].tolist() == [*FREQUENCIES.tolist(), 0.0, 0.0]  # three coordinates more: two subspaces
    for name in ("query_phase", "key_phase", "query_concentration", "key_concentration", "relative_phase"):
        assert getattr(found, name).isnan().tolist() == [[False] * 3 + [True] * 2] * 2, name
    assert not found.key_size.isnan().any()
    assert found.turn[0, 3:].tolist() == [0, 0]
    assert not torch.stack([found.distance, found.interaction])[..., 3:].any()  # what is not rotated has none
    silent = patterns(q, torch.zeros_like(k), rotary)  # scores that do not vary have no shares, keys no direction
    for name in (*SHARES, "spread", "key_phase", "key_concentration", "key_variation"):
        assert getattr(silent, name).isnan().all(), name


def test_table() -> None:
    table = subspace_patterns_qk(*draw("partial"), DISTANCES, scale=SCALE)
    assert table.columns[:4].tolist() == ["head", "subspace", "frequency", "turn"]
    assert len(table) == 2 * 5
    assert table["wavelength"].tolist()[3:5] == [math.inf] * 2
    assert not table[table["subspace"] < 3].isna().any().any()
