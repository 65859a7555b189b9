"""Each encoding is the published one, and all agree where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
from tl_posdisent.synthetic.model.encodings import alibi_slopes, t5_bucket, toeplitz

RELATIVE = ("none", "t5", "alibi", "rope", "mla")
ABSOLUTE = ("sinusoidal", "learned", "random", "absolute_rope", "sinusoidal_rope", "absolute_mla")
LIMITED = ("learned", "random", "absolute_rope", "absolute_mla")
TOKENS = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(3))


def config(**changed: Any) -> SyntheticConfig:
    small = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16, "n_out": 5}
    return SyntheticConfig(**(small | changed))


def with_strong_biases(model: SyntheticModel) -> SyntheticModel:
    """Learned biases are small at first; here they shall matter."""
    if model.config.encoding == "t5":
        with torch.no_grad():
            model.encoding.table.copy_(torch.randn(model.encoding.table.shape))
    return model.eval()


def assert_same(a: SyntheticModel, b: SyntheticModel, tokens: Tensor = TOKENS) -> None:
    with torch.no_grad():
        torch.testing.assert_close(a(tokens), b(tokens), rtol=0, atol=1e-5)


# --- as published -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (16, 256)])
def test_t5_buckets_are_those_of_transformers(causal: bool, n_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(-distance, not causal, n_buckets, max_distance)
    ours = t5_bucket(distance, n_buckets, max_distance, causal=causal)
    assert torch.equal(ours, theirs)
    assert set(ours.tolist()) == set(range(n_buckets)) - (set() if causal else {n_buckets // 2})


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(12) == [*(2.0**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(1) == [2.0**-8]


def test_random_positions_are_drawn_with_the_weights_and_not_trained() -> None:
    one, same, other = (SyntheticModel(config(encoding="random", seed=seed)) for seed in (1, 1, 2))
    table = one.encoding.embed(16)
    assert torch.equal(table, same.encoding.embed(16))
    assert not torch.equal(table, other.encoding.embed(16))
    assert abs(table.std().item() - 1) < 0.1
    assert "encoding.W_pos" in one.state_dict()  # a checkpoint keeps it
    assert "encoding.W_pos" not in dict(one.named_parameters())


def test_toeplitz_puts_distances_in_their_place_and_gradients_back() -> None:
    values = torch.randn(2, 9, requires_grad=True)
    cells = toeplitz(values)
    assert all(torch.equal(cells[:, i, j], values[:, i - j + 4]) for i in range(5) for j in range(5))
    cells.sum().backward()
    assert values.grad.tolist() == [[1, 2, 3, 4, 5, 4, 3, 2, 1]] * 2  # as many cells as each distance has


# --- equal where they should be, different where they should not -----------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("encoding", [*RELATIVE, *ABSOLUTE])
def test_relative_encodings_do_not_see_a_shift(encoding: str, causal: bool) -> None:
    """Padding before the text shifts its positions, and nothing else."""
    model = with_strong_biases(SyntheticModel(config(encoding=encoding, causal=causal, pad_id=0)))
    shifted = torch.cat([torch.zeros(3, 4, dtype=torch.int64), TOKENS], 1)
    with torch.no_grad():
        difference = (model(TOKENS) - model(shifted)).abs().max()
    assert difference < 1e-5 if encoding in RELATIVE else difference > 1e-2


@pytest.mark.parametrize("encoding", [*RELATIVE, *ABSOLUTE])
def test_texts_longer_than_the_context(encoding: str) -> None:
    """Either refused, or what a model made for longer texts computes."""
    short, long = (with_strong_biases(SyntheticModel(config(encoding=encoding, n_ctx=n))) for n in (6, 16))
    if short.encoding.longest is None:
        long.load_state_dict(short.state_dict())
        assert_same(short, long)
    else:
        with pytest.raises(
            ValueError, match=rf"tokens must be at most n_ctx = 6 long with encoding='{encoding}', got 9"
        ):
            short(TOKENS)
    assert (short.encoding.longest is None) == (encoding not in LIMITED)
