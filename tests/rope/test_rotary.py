"""Laws of rotation: complex multiplication, a group, the very numbers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tolerance import rounding
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_apply
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tl_posdisent.rope import Rotary, rotary_from_table, rotate, to_complex
from tl_posdisent.rope.rotary import from_complex

PAIRINGS = ("half", "adjacent")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def frequencies(n: int = 4, base: float = 500.0) -> Tensor:
    return base ** (-torch.arange(n).double() / n)


def rotary(pairing: Any = "half", n: int = 4, **more: Any) -> Rotary:
    return Rotary(frequencies(n), pairing, **more)


def vectors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (2, 7, 3, 8)), dtype=torch.float64).to(dtype)


def by_complex_numbers(x: Tensor, positions: Tensor, geometry: Rotary) -> Tensor:
    """One number at a time, in Python."""
    out, n = x.clone(), len(geometry.frequencies)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:-1])).tolist():
        position = positions[index[1]] if positions.ndim == 1 else positions[index[0], index[1]]
        for c in range(n):
            first, second = (c, c + n) if geometry.pairing == "half" else (2 * c, 2 * c + 1)
            at, and_at = (*index, first), (*index, second)
            angle = 1j * float(geometry.frequencies[c]) * float(position)
            turned = complex(x[at], x[and_at]) * torch.e**angle * geometry.attention_factor
            out[at], out[and_at] = turned.real, turned.imag
    return out


POSITIONS = {
    "counted": torch.arange(7),
    "negative": torch.tensor([-5, 3, -1, 0, -200, 7, 1]),
    "not whole": torch.tensor([0.5, -3.25, 7.125, 0.1, 11.9, 0.0, 2.5], dtype=torch.float64),
    "per text": torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 8, 50, 3, 3, -4, 0]]),
    "huge": torch.tensor([100_000, 99_999, 1, 0, 2**20, 65_536, 12_345]),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_multiplication_by_a_complex_number(pairing: str, positions: Tensor) -> None:
    geometry = rotary(pairing, attention_factor=1.3)
    x = vectors()
    torch.testing.assert_close(
        rotate(x, positions, geometry), by_complex_numbers(x, positions, geometry), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_what_is_not_rotated_passes_through_to_the_last_bit(pairing: str, dtype: torch.dtype) -> None:
    x, positions = vectors(2, 7, 3, 11, dtype=dtype), POSITIONS["counted"]
    out = rotate(x, positions, rotary(pairing, attention_factor=1.5))
    assert torch.equal(out[..., 8:], x[..., 8:])
    assert torch.equal(out[..., :8], rotate(x[..., :8].clone(), positions, rotary(pairing, attention_factor=1.5)))
    nothing = rotate(x, positions, Rotary(torch.empty(0, dtype=torch.float64)))
    assert torch.equal(nothing, x)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_complex_round_trip_and_order(pairing: str) -> None:
    x, geometry = vectors(5, 11), rotary(pairing)
    z, rest = to_complex(x, geometry)
    assert torch.equal(from_complex(z, rest, geometry), x)
    assert torch.equal(z.real, x[:, :4] if pairing == "half" else x[:, 0:8:2])
    assert torch.equal(z.imag, x[:, 4:8] if pairing == "half" else x[:, 1:8:2])
    assert to_complex(x.bfloat16(), geometry)[0].dtype == torch.complex64
    assert z.dtype == torch.complex128


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_sixteen_bits_round_once(dtype: torch.dtype, error: float) -> None:
    """Computed wide and rounded at the end: within half a unit in the last place (of the largest there is)."""
    x, positions = vectors(dtype=dtype), POSITIONS["huge"]
    got, exact = rotate(x, positions, rotary()), rotate(x.double(), positions, rotary())
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= error * exact.abs() + 1e-6).all()


# --- transformers itself as the oracle ------------------------------------------------------------------------

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
}


def of_transformers(scaling: str, d_head: int = 64) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * d_head,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500_000.0, **SCALINGS[scaling]},
    )
    return LlamaRotaryEmbedding(config)


def tables(
    module: LlamaRotaryEmbedding, positions: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    cos, sin = module(torch.zeros(1, dtype=dtype), positions[None])
    return cos[0], sin[0]


FAR = torch.tensor([0, 1, 17, 1000, 4097, 33_333, 99_999, 100_000])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotation_is_that_of_transformers_at_any_position(scaling: str) -> None:
    """At position 100 000 a float32 angle is off by up to 0.004, and the model's rounding is what counts."""
    module = of_transformers(scaling)
    x = vectors(1, len(FAR), 2, 64, dtype=torch.float32)
    cos, sin = tables(module, FAR)
    expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None], unsqueeze_dim=2)
    as_model = Rotary(
        module.inv_freq.double(), "half", attention_factor=module.attention_scaling, angle_dtype=torch.float32
    )
    torch.testing.assert_close(rotate(x, FAR, as_model), expected, rtol=0, atol=rounding(x))
    exact = Rotary(module.inv_freq.double(), "half", attention_factor=module.attention_scaling)
    assert (rotate(x, FAR, exact) - expected).abs().max() > 1e-4
    if scaling == "yarn":
        assert as_model.attention_factor != 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 11, 2048])
@pytest.mark.parametrize("layout", ["c0 c1 c0 c1", "c0 c0 c1 c1", "c0 c1"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_read_off_a_table(scaling: str, layout: str, rows: int, dtype: torch.dtype) -> None:
    module = of_transformers(scaling)
    cos, sin = (x[:, :32] for x in tables(module, torch.arange(rows), dtype))
    if layout == "c0 c1 c0 c1":
        cos, sin = (torch.cat([x, x], 1) for x in (cos, sin))
    elif layout == "c0 c0 c1 c1":
        cos, sin = (x.repeat_interleave(2, 1) for x in (cos, sin))
    read = rotary_from_table(cos, sin, pairing="adjacent")
    rounding = 2**-24 if dtype == torch.float32 else 2**-9
    longest = 2 ** ((rows - 1).bit_length() - 1)  # the last power of two among the positions
    assert read.pairing == "adjacent"
    assert read.frequencies.shape == (32,)
    # An angle is off by the rounding of sine and cosine, shared among the positions that it takes to get there;
    # a float32 angle by its own rounding, which grows as it does.
    error = (read.frequencies - module.inv_freq.double()).abs()
    assert (error <= 3 * rounding / longest + 3 * 2**-24 * module.inv_freq).all()
    assert read.attention_factor == pytest.approx(module.attention_scaling, rel=2 * rounding)


def test_a_table_of_gptj() -> None:
    """Sines and cosines one column each, pairs adjacent; checked against its own way to rotate."""
    rows = 64
    theta = frequencies(3, 10_000.0).float()
    angle = torch.arange(rows)[:, None] * theta
    read = rotary_from_table(angle.cos(), angle.sin(), pairing="adjacent")
    x = vectors(1, rows, 2, 6, dtype=torch.float32)
    expected = gptj_apply(x, angle.sin()[None], angle.cos()[None])
    torch.testing.assert_close(rotate(x, torch.arange(rows), read), expected, rtol=0, atol=2e-5)


def test_an_empty_table_rotates_nothing() -> None:
    """NoPE written as RoPE of no dimension, as HookedTransformer allows."""
    read = rotary_from_table(torch.empty(5, 0), torch.empty(5, 0))
    assert (read.dim, read.attention_factor) == (0, 1.0)


def test_wavelengths() -> None:
    geometry = Rotary(torch.tensor([torch.pi / 2, 0.0], dtype=torch.float64))
    assert geometry.wavelengths.tolist() == [4.0, torch.inf]
    assert geometry.dim == 4
