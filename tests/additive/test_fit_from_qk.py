"""The linear-time fit is the dense fit: same components, same shares, whatever is large, shared or masked."""

from __future__ import annotations

import pytest
import torch

from tl_posdisent import fit_additive, fit_additive_qk
from tl_posdisent.additive import fit_from_qk as linear

MASKS = [
    {"mask": "causal"},
    {"mask": "full"},
    {"window": 1},
    {"window": 37},
    {"window": 256},
    {"window": 300},
    {"mask": "full", "window": 90},
]


def vectors(length: int, *, heads: int = 4, kv: int = 2, batch: tuple[int, ...] = (2,), d: int = 8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*batch, length, heads, d, generator=generator, dtype=torch.float64)
    return q, torch.randn(*batch, length, kv, d, generator=generator, dtype=torch.float64)


def dense(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * torch.einsum("...ihd,...jhd->...hij", q, k.repeat_interleave(q.shape[-2] // k.shape[-2], -2))


def assert_same(found, expected, scale: torch.Tensor) -> None:
    """Components to 1e-8 of the scores' spread, r and shares to 1e-9."""
    for name in ("intercept", "distance", "query", "key"):
        error = (getattr(found, name) - getattr(expected, name)).abs().max()
        assert error <= 1e-8 * scale, f"{name} differs by {error}"
    for name in ("r", "r2", "share_distance", "share_query", "share_key"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-9, equal_nan=True)
    assert torch.equal(found.n_cells, expected.n_cells)
    assert torch.equal(found.n_parameters, expected.n_parameters)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_equals_dense_fit(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """At lengths and windows on both sides of blocks, also with fewer queries than keys; blocks are 8 here."""
    options = {name: max(1, x // 32) if name == "window" else x for name, x in options.items()}
    monkeypatch.setattr(linear, "_BLOCK_SIDE", 8)
    for length, before in ((2, 0), (3, 0), (7, 0), (9, 0), (33, 0), (33, 1), (40, 9), (40, 24)):
        q, k = vectors(length)
        scores = dense(q[:, before:], k, 0.3)
        found = fit_additive_qk(q[:, before:], k, scale=0.3, **options)
        assert_same(found, fit_additive(scores, **options, check=False), scores.std())


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_nearly_additive_scores_do_not_cancel(options: dict) -> None:
    """Vectors that barely vary about a large mean: r above 0.9999, still right to 1e-9."""
    q, k = vectors(400)
    q, k = 30 + 0.01 * q, -60 + k
    scores = dense(q, k, 1.0)
    expected = fit_additive(scores, **options)
    assert float(expected.r.nan_to_num(1.0).min()) > 0.9999
    assert_same(fit_additive_qk(q, k, scale=1.0, **options), expected, scores.std())


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 1), (1, 1)])
def test_shared_keys_and_no_batch(heads: int, kv: int) -> None:
    q, k = vectors(120, heads=heads, kv=kv, batch=())
    scores = dense(q, k, 1.0)
    assert_same(fit_additive_qk(q, k, scale=1.0), fit_additive(scores), scores.std())


def test_no_tensor_has_two_sequence_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the length must not need a hundred times the memory: no intermediate may hold length² elements."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    monkeypatch.setattr(linear, "_BLOCK_SIDE", 64)
    q, k = vectors(4096, heads=1, kv=1, batch=(), d=8)
    with Watch():
        fit_additive_qk(q, k, scale=1.0)
    assert largest <= 4096 * 8 * 12  # O(length · d); length² would be 42 times that


def test_bfloat16_is_read_as_it_is() -> None:
    q, k = (x.bfloat16() for x in vectors(90))
    expected = fit_additive(dense(q.double(), k.double(), 0.5))
    assert_same(fit_additive_qk(q, k, scale=0.5), expected, torch.tensor(1.0))


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_scores_that_vary_by_rounding_alone_have_no_correlation(size: float) -> None:
    """Queries and keys that are all alike, also at a right angle, where scores are 0 but for rounding."""
    one = torch.tensor([0.1, 0.7, -0.3, 0.2], dtype=torch.float64)
    other = torch.tensor([0.7, -0.1, 0.2, 0.3], dtype=torch.float64)
    for key in (one, other, other + 1e-16 * one):
        q, k = size * one.expand(40, 2, 4), size * key.expand(40, 1, 4)
        for options in ({}, {"mask": "full"}, {"window": 3}):
            fit = fit_additive_qk(q, k, scale=0.5, **options)
            assert bool(fit.r.isnan().all())
            assert bool(fit.share_key.isnan().all())
        texts = fit_additive_qk(torch.stack([q, q]), torch.stack([k, k]), scale=0.5, pool=True)
        assert bool(texts.r.isnan().all())
