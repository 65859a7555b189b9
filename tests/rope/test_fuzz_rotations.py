"""Laws of rotations and of what is computed of queries and keys, for any frequencies, pairing and grouping."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import Heads, drawn_heads, examples, normal
from torch import Tensor

from tl_posdisent.rope import rotate, to_complex
from tl_posdisent.rope.rotary import from_complex


def places(seed: int, n: int) -> Tensor:
    return (40 * normal(seed, n)).round() / 4


@examples(60)
@given(drawn_heads(), st.integers(0, 2**31), st.floats(-1000, 1000))
def test_scores_know_differences_of_positions_only(heads: Heads, seed: int, shift: float) -> None:
    at = places(seed, heads.q.shape[1])

    def scores(positions: Tensor) -> Tensor:
        q, k = (rotate(x, positions, heads.rotary) for x in (heads.q, heads.k))
        return torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))

    size = float(heads.q.abs().max() * heads.k.abs().max()) * heads.q.shape[-1]
    torch.testing.assert_close(scores(at + shift), scores(at), rtol=0, atol=1e-10 * size)


@examples(60)
@given(drawn_heads(), st.integers(0, 2**31))
def test_rotation_and_subspaces_can_be_undone(heads: Heads, seed: int) -> None:
    q, at = heads.q, places(seed, heads.q.shape[1])
    planes, rest = to_complex(q, heads.rotary)
    back = to_complex(rotate(rotate(q, at, heads.rotary), -at, heads.rotary), heads.rotary)[0]
    torch.testing.assert_close(back / heads.rotary.attention_factor**2, planes, rtol=1e-10, atol=1e-10)
    assert torch.equal(from_complex(planes, rest, heads.rotary), q)
    turned = planes * heads.rotary.attention_factor * torch.exp(1j * heads.rotary.angles(at))[:, None]
    expected = from_complex(turned, rest, heads.rotary)
    torch.testing.assert_close(rotate(q, at, heads.rotary), expected, rtol=1e-10, atol=1e-10)
