"""Rows about queries, keys, rotations and what is computed of them."""

from __future__ import annotations

import torch

from tl_posdisent.rope import (
    Moments,
    Rotary,
    decompose,
    flip_probability,
    from_complex,
    interaction_bound,
    interaction_by_subspace,
    positional_symbolic_qk,
    preference_flips_qk,
    rope_capacity,
    rotary_from_table,
    rotate,
    subspace_patterns_qk,
    to_complex,
    unrotate,
)

from .given import INF, NAN, ROTARY, K, Q, moments, numbers, with_one
from .row import Row, gives, refused

F = torch.tensor([1.0, 0.1], dtype=torch.float64)
AT = torch.arange(9)
ANGLES = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1])
COS, SIN = ANGLES.cos(), ANGLES.sin()
PLANES, REST = to_complex(Q, ROTARY)


def _negative_and_repeated() -> bool:
    """Rotations add up, whatever the positions are."""
    positions = torch.tensor([-5.0, -5.0, 0.0, 0.5, 1e3, 7.0, 7.0, -0.25, 3.0])
    return torch.allclose(unrotate(rotate(Q, positions, ROTARY), positions, ROTARY), Q, atol=1e-5)


def _per_text() -> bool:
    positions = torch.stack([AT, AT.flip(0)])
    apart = torch.stack([rotate(x, p, ROTARY) for x, p in zip(Q, positions, strict=True)])
    return torch.equal(rotate(Q, positions, ROTARY), apart)


def _far() -> bool:
    """A position of 2⁵³ is still a number: lengths stay."""
    return torch.allclose(rotate(Q, torch.full((9,), 2.0**53), ROTARY).norm(dim=-1), Q.norm(dim=-1), rtol=1e-5)


def _one_distance() -> bool:
    """At one distance, nothing is due to the distance."""
    shares = decompose(moments(), [3], scale=1.0).variances
    return bool((shares[0].abs() < 1e-12).all()) and torch.isfinite(shares).all().item()


def _nothing_rotated() -> bool:
    plain = Rotary(torch.zeros(0, dtype=torch.float64))
    return torch.equal(rotate(Q, AT, plain), Q)


ROWS: list[Row] = [
    refused("Rotary", "frequencies as a list", lambda at: Rotary([1.0, 0.1]), "frequencies must be", "list"),
    refused("Rotary", "float32", lambda at: Rotary(F.float()), "frequencies must be", "torch.float32"),
    refused("Rotary", "two axes", lambda at: Rotary(F[None]), "frequencies must be", "(1, 2)"),
    refused("Rotary", "NaN", lambda at: Rotary(F * NAN), "frequencies must be finite"),
    refused("Rotary", "an unknown pairing", lambda at: Rotary(F, "interleaved"), "pairing must be", "'interleaved'"),
    refused("Rotary", "factor NaN", lambda at: Rotary(F, attention_factor=NAN), "attention_factor must be"),
    refused("Rotary", "factor 0", lambda at: Rotary(F, attention_factor=0.0), "attention_factor must be"),
    refused("Rotary", "angles in integers", lambda at: Rotary(F, angle_dtype=torch.int64), "angle_dtype must be"),
    refused("rotate", "a head too narrow", lambda at: rotate(Q[..., :3], AT, ROTARY), "x must be", "at least 4"),
    refused("rotate", "other positions", lambda at: rotate(Q, AT[:8], ROTARY), "positions must have shape", "(8,)"),
    refused("rotate", "three axes of positions", lambda at: rotate(Q, AT[None, None], ROTARY), "positions must have"),
    refused("rotate", "positions of another batch", lambda at: rotate(Q, AT.expand(3, 9), ROTARY), "positions must"),
    refused("rotate", "NaN", lambda at: rotate(Q, AT * NAN, ROTARY), "positions must be finite"),
    refused("rotate", "inf", lambda at: rotate(Q, with_one(INF, 9), ROTARY), "positions must be finite"),
    refused("rotate", "complex positions", lambda at: rotate(Q, AT * 1j, ROTARY), "positions must be"),
    refused("rotate", "positions as words", lambda at: rotate(Q, "0123", ROTARY), "positions must be"),
    refused("rotate", "integers", lambda at: rotate(Q.long(), AT, ROTARY), "x must be", "torch.int64"),
    refused("rotate", "no rotation", lambda at: rotate(Q, AT, None), "rotary must be", "NoneType"),
    gives("rotate", "negative, broken and repeated positions", lambda at: _negative_and_repeated()),
    gives("rotate", "positions for each text", lambda at: _per_text()),
    gives("rotate", "a huge position", lambda at: _far()),
    gives("rotate", "no frequency at all", lambda at: _nothing_rotated()),
    refused("unrotate", "a head too narrow", lambda at: unrotate(Q[..., :3], AT, ROTARY), "x must be", "at least 4"),
    refused("unrotate", "NaN", lambda at: unrotate(Q, AT * NAN, ROTARY), "positions must be finite"),
    refused("to_complex", "a head too narrow", lambda at: to_complex(Q[..., :3], ROTARY), "at least 4"),
    refused("to_complex", "integers", lambda at: to_complex(Q.long(), ROTARY), "x must be", "torch.int64"),
    refused("from_complex", "other planes", lambda at: from_complex(PLANES[..., :1], REST, ROTARY), "z must"),
    refused("from_complex", "real planes", lambda at: from_complex(PLANES.real, REST, ROTARY), "z must"),
    refused("from_complex", "another batch", lambda at: from_complex(PLANES, REST[:1], ROTARY), "rest must"),
    refused("rotary_from_table", "unequal shapes", lambda at: rotary_from_table(COS, SIN[:5]), "shape"),
    refused("rotary_from_table", "one row", lambda at: rotary_from_table(COS[:1], SIN[:1]), "cos"),
    refused("rotary_from_table", "NaN", lambda at: rotary_from_table(COS * NAN, SIN), "cos"),
    refused("rotary_from_table", "no rotation", lambda at: rotary_from_table(numbers(9, 2), numbers(9, 2)), "cos"),
    refused("rotary_from_table", "integers", lambda at: rotary_from_table(COS.long(), SIN.long()), "cos"),
    refused("Moments", "two axes", lambda at: Moments.from_qk(Q[0, 0], K, ROTARY), "q must have shape"),
    refused("Moments", "empty", lambda at: Moments.from_qk(Q[:0], K, ROTARY), "q must have shape", "empty"),
    refused("Moments", "NaN", lambda at: Moments.from_qk(Q, K * NAN, ROTARY), "k must be finite"),
    refused("Moments", "other widths", lambda at: Moments.from_qk(Q, K[..., :5], ROTARY), "d_head"),
    refused("Moments", "4 heads on 3", lambda at: Moments.from_qk(Q, numbers(2, 9, 3, 6), ROTARY), "divide"),
    refused("Moments", "too narrow", lambda at: Moments.from_qk(Q[..., :2], K[..., :2], ROTARY), "at least 4"),
    refused("Moments", "integers", lambda at: Moments.from_qk(Q.long(), K, ROTARY), "q must be", "torch.int64"),
    refused("Moments", "no rotation", lambda at: Moments.from_qk(Q, K, "rope"), "rotary must be", "str"),
    refused(
        "Moments",
        "sums over two rotations",
        lambda at: moments() + Moments.from_qk(Q, K, Rotary(F * 2)),
        "must have the same rotary",
    ),
    refused("decompose", "no distance", lambda at: decompose(moments(), [], scale=1.0), "distances must"),
    refused("decompose", "NaN", lambda at: decompose(moments(), [1.0, NAN], scale=1.0), "distances must"),
    refused("decompose", "words", lambda at: decompose(moments(), "near", scale=1.0), "distances must"),
    refused("decompose", "two axes", lambda at: decompose(moments(), [[1, 2]], scale=1.0), "distances must"),
    refused("decompose", "scale inf", lambda at: decompose(moments(), [1, 2], scale=INF), "scale must"),
    refused(
        "decompose",
        "other weights",
        lambda at: decompose(moments(), [1, 2], scale=1.0, weights=[1.0]),
        "weights must",
    ),
    refused(
        "decompose",
        "negative weights",
        lambda at: decompose(moments(), [1, 2], scale=1.0, weights=[1.0, -1.0]),
        "weights must",
    ),
    refused(
        "decompose", "weights of 0", lambda at: decompose(moments(), [1, 2], scale=1.0, weights=[0, 0]), "weights must"
    ),
    refused("decompose", "vectors in place of moments", lambda at: decompose(Q, [1], scale=1.0), "moments must be"),
    gives("decompose", "a single distance", lambda at: _one_distance()),
    refused(
        "interaction_bound",
        "an unknown effect",
        lambda at: interaction_bound(moments(), [1, 2], scale=1.0, effect="key:distance"),
        "effect must",
    ),
    refused("interaction_bound", "no distance", lambda at: interaction_bound(moments(), [], scale=1.0), "distances"),
    refused("interaction_bound", "no moments", lambda at: interaction_bound(None, [1], scale=1.0), "moments must be"),
    refused(
        "interaction_by_subspace",
        "no effect",
        lambda at: interaction_by_subspace(moments(), [1, 2], scale=1.0, effects=()),
        "effects must",
    ),
    refused(
        "interaction_by_subspace",
        "an unknown effect",
        lambda at: interaction_by_subspace(moments(), [1, 2], scale=1.0, effects=("place",)),
        "effects must",
    ),
    refused(
        "interaction_by_subspace",
        "no moments",
        lambda at: interaction_by_subspace(3, [1], scale=1.0),
        "moments must be",
    ),
    refused(
        "positional_symbolic_qk", "one position", lambda at: positional_symbolic_qk(Q[:, :1], K[:, :1], ROTARY), "q"
    ),
    refused(
        "positional_symbolic_qk", "other lengths", lambda at: positional_symbolic_qk(Q, K[:, :5], ROTARY), "q and k"
    ),
    refused("positional_symbolic_qk", "NaN", lambda at: positional_symbolic_qk(Q * NAN, K, ROTARY), "q must be finite"),
    refused("positional_symbolic_qk", "no rotation", lambda at: positional_symbolic_qk(Q, K, None), "rotary must be"),
    refused(
        "subspace_patterns_qk", "NaN", lambda at: subspace_patterns_qk(Q, K * NAN, ROTARY, [1], scale=1.0), "k must be"
    ),
    refused(
        "subspace_patterns_qk",
        "no rotation",
        lambda at: subspace_patterns_qk(Q, K, None, [1], scale=1.0),
        "rotary must be",
    ),
    refused("rope_capacity", "other lengths", lambda at: rope_capacity(ROTARY, [1, 2], [1.0]), "target must"),
    refused("rope_capacity", "NaN", lambda at: rope_capacity(ROTARY, [1, 2], [1.0, NAN]), "target must"),
    refused("rope_capacity", "no distance", lambda at: rope_capacity(ROTARY, [], []), "distances must"),
    refused(
        "rope_capacity", "negative ridge", lambda at: rope_capacity(ROTARY, [1, 2], [0, 1], ridge=-1.0), "ridge must"
    ),
    refused("rope_capacity", "no rotation", lambda at: rope_capacity(None, [1, 2], [0, 1]), "rotary must be"),
    refused(
        "preference_flips_qk", "NaN", lambda at: preference_flips_qk(Q, K * NAN, ROTARY, [1], [5]), "k must be finite"
    ),
    refused(
        "preference_flips_qk",
        "one key",
        lambda at: preference_flips_qk(Q, K[:, :1], ROTARY, [1], [5]),
        "at least two keys",
    ),
    refused(
        "preference_flips_qk", "no rotation", lambda at: preference_flips_qk(Q, K, None, [1], [5]), "rotary must be"
    ),
    refused(
        "preference_flips_qk",
        "a distance both near and far",
        lambda at: preference_flips_qk(Q, K, ROTARY, [1, 2], [2, 5]),
        "near and far must",
    ),
    refused("flip_probability", "one key", lambda at: flip_probability(numbers(3, 4, 1)), "scores must be"),
    refused(
        "flip_probability", "infinite", lambda at: flip_probability(with_one(INF, 3, 4, 5)), "scores must be finite"
    ),
    refused(
        "flip_probability",
        "other keys",
        lambda at: flip_probability(numbers(3, 4, 5), numbers(3, 4, 6)),
        "other must have",
    ),
]
