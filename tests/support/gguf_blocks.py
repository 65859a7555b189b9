"""Random blocks of llama.cpp's quantised types, and the numbers that they stand for, taken apart one by one.

The package gguf writes few of these types. Each function takes a shape and returns bytes and numbers; the layouts are
those of the structs in llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) / 2


def _drawn(shape: Shape, size: int, bytes_per_block: int) -> np.ndarray:
    n = prod(shape) // size
    return np.random.default_rng(shape[-2] + size).integers(0, 256, (n, bytes_per_block), dtype=np.uint8)


def _scale(blocks: np.ndarray, at: int, value: float) -> np.ndarray:
    """Write a scale in float16, another for every block, and return it."""
    scales = (value * np.linspace(0.5, 1.5, len(blocks))).astype(np.float16)[:, None]
    blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return scales.astype(float)


def _given(shape: Shape, size: int, blocks: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, Tensor]:
    return blocks.reshape(*shape[:-1], -1), torch.tensor(numbers.reshape(shape), dtype=torch.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], 1).astype(int)


def q4_0(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 18)
    d = _scale(blocks, 0, 0.05)
    return _given(shape, 32, blocks, d * (_nibbles(blocks[:, 2:]) - 8))


def q4_1(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 20)
    d, least = _scale(blocks, 0, 0.05), _scale(blocks, 2, -0.3)
    return _given(shape, 32, blocks, d * _nibbles(blocks[:, 4:]) + least)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    word = packed.astype(np.int64) @ (1 << np.arange(0, 32, 8))
    return word[:, None] >> np.arange(32) & 1


def q5_0(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 22)
    d = _scale(blocks, 0, 0.02)
    return _given(shape, 32, blocks, d * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]) << 4) - 16))


def q5_1(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 24)
    d, least = _scale(blocks, 0, 0.02), _scale(blocks, 2, -0.3)
    return _given(shape, 32, blocks, d * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]) << 4) + least)


def q8_0(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 34)
    d = _scale(blocks, 0, 0.003)
    return _given(shape, 32, blocks, d * blocks[:, 2:].copy().view(np.int8))


def q2_k(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 84)
    d, least = _scale(blocks, 80, 0.01), _scale(blocks, 82, 0.005)
    scales, packed = blocks[:, :16].astype(int), blocks[:, 16:80].astype(int)
    numbers = np.zeros((len(blocks), 256))
    for n in range(256):
        half, at = divmod(n, 128)
        plane, place = divmod(at, 32)
        bits = packed[:, 32 * half + place] >> 2 * plane & 3
        of = scales[:, n // 16]
        numbers[:, n] = d[:, 0] * (of & 15) * bits - least[:, 0] * (of >> 4)
    return _given(shape, 256, blocks, numbers)


def q3_k(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 110)
    d, numbers = _scale(blocks, 108, 0.002), np.zeros((len(blocks), 256))
    high, packed, twelve = (blocks[:, a:b].astype(int) for a, b in ((0, 32), (32, 96), (96, 108)))
    for n in range(256):
        half, at = divmod(n, 128)
        plane, place = divmod(at, 32)
        bits = packed[:, 32 * half + place] >> 2 * plane & 3
        top = high[:, place] >> (4 * half + plane) & 1
        j = n // 16
        low = twelve[:, j] & 15 if j < 8 else twelve[:, j - 8] >> 4
        scale = low | (twelve[:, 8 + j % 4] >> 2 * (j // 4) & 3) << 4
        numbers[:, n] = d[:, 0] * (scale - 32) * (bits - 4 * (1 - top))
    return _given(shape, 256, blocks, numbers)


def _k_scale(packed: np.ndarray, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Six bits of scale and of least value of the j-th of eight parts of a block of Q4_K or Q5_K."""
    if j < 4:
        return packed[:, j] & 63, packed[:, j + 4] & 63
    return packed[:, j + 4] & 15 | packed[:, j - 4] >> 6 << 4, packed[:, j + 4] >> 4 | packed[:, j] >> 6 << 4


def q4_k(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 144)
    d, least, numbers = _scale(blocks, 0, 3e-4), _scale(blocks, 2, 2e-3), np.zeros((len(blocks), 256))
    packed, quants = blocks[:, 4:16].astype(int), blocks[:, 16:].astype(int)
    for j in range(8):
        scale, shift = _k_scale(packed, j)
        nibble = quants[:, 32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15
        numbers[:, 32 * j : 32 * j + 32] = d * scale[:, None] * nibble - least * shift[:, None]
    return _given(shape, 256, blocks, numbers)


def q5_k(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 176)
    d, least, numbers = _scale(blocks, 0, 2e-4), _scale(blocks, 2, 2e-3), np.zeros((len(blocks), 256))
    packed, high, quants = (blocks[:, a:b].astype(int) for a, b in ((4, 16), (16, 48), (48, 176)))
    for j in range(8):
        scale, shift = _k_scale(packed, j)
        nibble = quants[:, 32 * (j // 2) : 32 * (j // 2) + 32] >> 4 * (j % 2) & 15
        nibble = nibble | (high >> j & 1) << 4
        numbers[:, 32 * j : 32 * j + 32] = d * scale[:, None] * nibble - least * shift[:, None]
    return _given(shape, 256, blocks, numbers)


def q6_k(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 210)
    d, numbers = _scale(blocks, 208, 2e-5), np.zeros((len(blocks), 256))
    low, high = blocks[:, :128].astype(int), blocks[:, 128:192].astype(int)
    scales = blocks[:, 192:208].copy().view(np.int8)
    for n in range(256):
        half, at = divmod(n, 128)
        quarter, place = divmod(at, 32)
        nibble = low[:, 64 * half + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        top = high[:, 32 * half + place] >> 2 * quarter & 3
        numbers[:, n] = d[:, 0] * scales[:, 8 * half + 2 * quarter + place // 16] * ((nibble | top << 4) - 32)
    return _given(shape, 256, blocks, numbers)


def iq4_nl(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 18)
    d = _scale(blocks, 0, 0.003)
    return _given(shape, 32, blocks, d * _IQ4[_nibbles(blocks[:, 2:])])


def iq4_xs(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 136)
    d, numbers = _scale(blocks, 0, 2e-4), np.zeros((len(blocks), 256))
    high, low = blocks[:, 2].astype(int) | blocks[:, 3].astype(int) << 8, blocks[:, 4:8].astype(int)
    for j in range(8):
        scale = low[:, j // 2] >> 4 * (j % 2) & 15 | (high >> 2 * j & 3) << 4
        part = _nibbles(blocks[:, 8 + 16 * j : 24 + 16 * j])
        numbers[:, 32 * j : 32 * j + 32] = d * (scale - 32)[:, None] * _IQ4[part]
    return _given(shape, 256, blocks, numbers)


def tq1_0(shape: Shape) -> tuple[np.ndarray, Tensor]:
    """Five trits to a byte, in 48 bytes of qs, and four in 4 bytes of qh: a byte is a fraction of 3⁵, from the top."""
    blocks = _drawn(shape, 256, 54)
    d, numbers, at = _scale(blocks, 52, 0.1), np.zeros((len(blocks), 256)), 0
    for begin, width, trits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        part = blocks[:, begin : begin + width].astype(int)
        for n in range(trits):
            trit = (part * 3**n & 255) * 3 >> 8
            numbers[:, at : at + width] = d * (trit - 1)
            at += width
    return _given(shape, 256, blocks, numbers)


def tq2_0(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 256, 66)
    d, numbers = _scale(blocks, 64, 0.1), np.zeros((len(blocks), 256))
    for n in range(256):
        half, at = divmod(n, 128)
        plane, place = divmod(at, 32)
        numbers[:, n] = d[:, 0] * ((blocks[:, 32 * half + place].astype(int) >> 2 * plane & 3) - 1)
    return _given(shape, 256, blocks, numbers)


def mxfp4(shape: Shape) -> tuple[np.ndarray, Tensor]:
    blocks = _drawn(shape, 32, 17)
    blocks[:, 0] = 120 + np.arange(len(blocks)) % 6
    return _given(shape, 32, blocks, 2.0 ** (blocks[:, :1].astype(float) - 127) * _FP4[_nibbles(blocks[:, 1:])])


def nvfp4(shape: Shape) -> tuple[np.ndarray, Tensor]:
    """Four parts of 16 with a scale each: 4 bits of exponent, 3 of fraction, no sign."""
    blocks = _drawn(shape, 64, 36)
    blocks[:, :4] = np.random.default_rng(1).integers(1, 70, (len(blocks), 4), dtype=np.uint8)  # below 8 too: subnormal
    exponent, fraction = blocks[:, :4] >> 3, blocks[:, :4] & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent.astype(float) - 7)
    scale = np.where(exponent == 0, fraction * 2.0**-9, normal)
    numbers = np.zeros((len(blocks), 64))
    for part in range(4):
        values = _FP4[_nibbles(blocks[:, 4 + 8 * part : 12 + 8 * part])]
        numbers[:, 16 * part : 16 * part + 16] = scale[:, part, None] * values
    return _given(shape, 64, blocks, numbers)


BLOCKS: dict[str, Callable[[Shape], tuple[np.ndarray, Tensor]]] = {
    **{"Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "IQ4_NL": iq4_nl, "MXFP4": mxfp4},
    **{"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_XS": iq4_xs},
    **{"TQ1_0": tq1_0, "TQ2_0": tq2_0, "NVFP4": nvfp4},
}
