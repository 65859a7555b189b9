"""Each encoding is the published one, and all agree where they should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent.rope import Rotary, rotate
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
from tl_posdisent.synthetic.model.encodings import alibi_slopes, make_encoding, t5_bucket, toeplitz

RELATIVE = ("none", "t5", "relative", "alibi", "rope", "mla")
ABSOLUTE = ("sinusoidal", "learned", "random", "absolute_rope", "sinusoidal_rope", "absolute_mla")
LIMITED = ("learned", "random", "absolute_rope", "absolute_mla")
TOKENS = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(3))


def config(**changed: Any) -> SyntheticConfig:
    small = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16, "n_out": 5}
    return SyntheticConfig(**(small | changed))


def with_strong_biases(model: SyntheticModel) -> SyntheticModel:
    """Learned biases are small at first; here they shall matter."""
    if model.config.encoding in ("t5", "relative"):
        with torch.no_grad():
            model.encoding.table.copy_(torch.randn(model.encoding.table.shape))
    return model.eval()


def same_weights(a: SyntheticModel, b: SyntheticModel) -> None:
    """Everything but the encoding."""
    state = {name: x for name, x in a.state_dict().items() if not name.startswith("encoding.")}
    missing, unexpected = b.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.startswith("encoding.") for name in missing)


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


@pytest.mark.parametrize("length", [1, 7, 16, 21])
def test_alibi_bias_by_hand(length: int) -> None:
    (bias,) = make_encoding(config(encoding="alibi")).bias(length)
    slopes = [2.0**-4, 2.0**-8, 2.0**-2]
    for h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (3, length, length))).tolist():
        assert bias[h, i, j] == pytest.approx(-slopes[h] * abs(i - j), rel=1e-6)


@pytest.mark.parametrize("length", [1, 7, 16, 21])
def test_sinusoids_by_hand(length: int) -> None:
    table = make_encoding(config(encoding="sinusoidal")).embed(length)
    for p in range(length):
        for c in range(12):
            angle = p / 10000 ** (2 * c / 24)
            wanted = torch.tensor([math.sin(angle), math.cos(angle)])
            torch.testing.assert_close(table[p, 2 * c : 2 * c + 2], wanted, rtol=0, atol=1e-6)


def test_exponential_alibi_slopes_by_hand() -> None:
    (bias,) = make_encoding(config(encoding="alibi", alibi_slopes="exponential", n_heads=4)).bias(5)
    assert bias[:, 4, 1].tolist() == pytest.approx(
        [-3.0, -3 * math.exp(-1 / 4), -3 * math.exp(-1 / 2), -3 * math.exp(-3 / 4)]
    )


def test_sinusoids_in_halves_are_the_same_in_another_order() -> None:
    one, other = (
        make_encoding(config(encoding="sinusoidal", sinusoids=x)).embed(21) for x in ("alternating", "halves")
    )
    assert torch.equal(other, torch.cat([one[:, ::2], one[:, 1::2]], -1))


def test_random_positions_are_drawn_with_the_weights_and_not_trained() -> None:
    one, same, other = (SyntheticModel(config(encoding="random"), seed=seed) for seed in (1, 1, 2))
    table = one.encoding.embed(16)
    assert torch.equal(table, same.encoding.embed(16))
    assert not torch.equal(table, other.encoding.embed(16))
    assert abs(table.std().item() - 1) < 0.1
    assert "encoding.W_pos" in one.state_dict()  # a checkpoint keeps it
    assert "encoding.W_pos" not in dict(one.named_parameters())


def test_relative_bias_by_hand() -> None:
    encoding = make_encoding(config(encoding="relative"))
    torch.nn.init.normal_(encoding.table)  # a model does so; until then it may hold anything, NaN too
    bias, table = encoding.bias(7), encoding.table
    assert table.shape == (2, 3, 31)
    assert all(
        torch.equal(bias[..., i, j], table[..., i - j + 15]) for i in range(7) for j in range(7)
    )  # the middle of the table is distance 0


def test_t5_bias_by_hand() -> None:
    encoding = make_encoding(config(encoding="t5", t5_buckets=8, t5_max_distance=12))
    for length in (7, 21):  # within the context and beyond
        (bias,) = encoding.bias(length)
        for i, j in ((0, 0), (6, 0), (0, 6), (3, 2), (length - 1, 0)):
            bucket = t5_bucket(torch.tensor(i - j), 8, 12, causal=False)
            assert torch.equal(bias[:, i, j], encoding.table[:, bucket])


@pytest.mark.parametrize("length", [7, 21])
@pytest.mark.parametrize("encoding", ["rope", "absolute_rope", "mla"])
def test_rotation_is_that_of_the_mathematics(encoding: str, length: int) -> None:
    c = config(encoding=encoding, rope_base=100.0)
    n = c.rotary_dim // 2
    rotary = Rotary(100.0 ** -(torch.arange(n, dtype=torch.float64) / n))
    x = torch.randn(2, length, 3, c.head_size)
    turned = make_encoding(c).rotate(x)
    torch.testing.assert_close(turned, rotate(x, torch.arange(length), rotary), rtol=0, atol=1e-5)
    assert torch.equal(turned[..., 2 * n :], x[..., 2 * n :])


def test_only_the_first_heads_turn() -> None:
    x = torch.randn(2, 7, 3, 8)
    every, some = (make_encoding(config(rotary_heads=k)).rotate(x) for k in (None, 2))
    assert torch.equal(some[:, :, :2], every[:, :, :2])
    assert torch.equal(some[:, :, 2], x[:, :, 2])
    assert not torch.equal(every[:, 1:, 2], x[:, 1:, 2])


def test_toeplitz_puts_distances_in_their_place_and_gradients_back() -> None:
    values = torch.randn(2, 9, requires_grad=True)
    cells = toeplitz(values)
    assert all(torch.equal(cells[:, i, j], values[:, i - j + 4]) for i in range(5) for j in range(5))
    cells.sum().backward()
    assert values.grad.tolist() == [[1, 2, 3, 4, 5, 4, 3, 2, 1]] * 2  # as many cells as each distance has


# --- equal where they should be, different where they should not -----------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_learned_relative_bias_can_be_alibi(causal: bool) -> None:
    alibi, learned = (SyntheticModel(config(encoding=e, causal=causal)) for e in ("alibi", "relative"))
    same_weights(alibi, learned)
    distance = torch.arange(-15, 16)
    with torch.no_grad():
        learned.encoding.table.copy_(-alibi.encoding.slopes[:, None] * distance.abs())
    assert_same(alibi, learned)


@pytest.mark.parametrize(
    ("encoding", "trivial"),
    [
        ("t5", lambda e: e.table.zero_()),
        ("relative", lambda e: e.table.fill_(3.0)),  # a softmax does not see a constant
        ("alibi", lambda e: e.table.zero_()),
        ("learned", lambda e: e.W_pos.zero_()),
        ("sinusoidal", lambda e: e.table.zero_()),
        ("rope", lambda e: (e.rotary_cos.fill_(1.0), e.rotary_sin.zero_())),  # frequency 0
    ],
)
def test_trivial_encodings_are_none(encoding: str, trivial: Any) -> None:
    none, other = SyntheticModel(config(encoding="none")), SyntheticModel(config(encoding=encoding))
    same_weights(none, other)
    with torch.no_grad():
        assert (none(TOKENS) - with_strong_biases(other)(TOKENS)).abs().max() > 1e-3
        trivial(other.encoding)
    assert_same(none, other)


def test_rope_on_all_heads_is_rope_and_on_none_is_nope() -> None:
    rope, all_heads = SyntheticModel(config()), SyntheticModel(config(rotary_heads=3))
    none, no_heads = SyntheticModel(config(encoding="none")), SyntheticModel(config(rotary_heads=0))
    same_weights(rope, all_heads)
    same_weights(none, no_heads)
    assert_same(rope, all_heads)
    assert_same(none, no_heads)


def test_absolute_rope_without_absolute_is_rope_and_without_rope_is_learned() -> None:
    both, rope, learned = (SyntheticModel(config(encoding=e)) for e in ("absolute_rope", "rope", "learned"))
    same_weights(rope, both)
    same_weights(learned, rope)
    with torch.no_grad():
        learned.encoding.W_pos.copy_(both.encoding.absolute.W_pos)
        tables = both.encoding.rotary_cos.clone(), both.encoding.rotary_sin.clone()
        both.encoding.rotary_cos.fill_(1.0)
        both.encoding.rotary_sin.zero_()
        assert_same(both, learned)
        both.encoding.rotary_cos.copy_(tables[0])
        both.encoding.rotary_sin.copy_(tables[1])
        both.encoding.absolute.W_pos.zero_()
    assert_same(both, rope)


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
def test_without_positions_order_is_nothing(encoding: str) -> None:
    model = with_strong_biases(SyntheticModel(config(encoding=encoding)))
    with torch.no_grad():
        difference = (model(TOKENS) - model(TOKENS.flip(1))).abs().max()
    # ALiBi sees distances alike in both directions, so a reversed text is the same text.
    assert difference < 1e-5 if encoding in ("none", "alibi") else difference > 1e-3
    with torch.no_grad():
        difference = (model(TOKENS) - model(TOKENS.roll(4, 1)[:, [1, 0, *range(2, 9)]])).abs().max()
    assert difference < 1e-5 if encoding == "none" else difference > 1e-3


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
    assert (short.encoding.longest is None) == (encoding not in (*LIMITED, "relative"))
