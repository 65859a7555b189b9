"""Position encodings with a common interface.

An encoding may add to the embedded text (absolute), rotate queries and keys (rotary) or add to the scores (biases).
Fixed tables are made once for ``n_ctx`` positions, and extended where a formula allows it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .config import AlibiSlopes, SinusoidOrder, SyntheticConfig


class Encoding(nn.Module):
    """No position (NoPE); the base class of the other encodings.

    Distances are query position minus key position. Nothing here depends on the text, only on its length.
    """

    rotates = False
    embeds = False
    learns_bias = False
    longest: int | None = None
    """The longest text that the encoding knows positions for; None for any."""

    def embed(self, length: int) -> Float[Tensor, "pos d_model"] | None:
        """What is added to the embedded text."""
        return None

    def rotate(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        """Queries or keys, turned to their positions."""
        return x

    def bias(self, length: int) -> Float[Tensor, "layer_or_1 head query key"] | None:
        """What is added to the scores: of each layer, or of all alike."""
        return None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw what is learned."""


def make_encoding(config: SyntheticConfig) -> Encoding:
    """The encoding that a configuration names."""
    match config.encoding:
        case "none":
            return Encoding()
        case "sinusoidal":
            return Sinusoidal(config.d_model, config.n_ctx, config.sinusoids)
        case "learned":
            return Learned(config.d_model, config.n_ctx)
        case "t5":
            return T5Bias(config.n_heads, config.n_ctx, config.t5_buckets, config.t5_max_distance, config.causal)
        case "relative":
            return RelativeBias(config.n_layers, config.n_heads, config.n_ctx)
        case "alibi":
            return ALiBi(config.n_heads, config.n_ctx, config.alibi_slopes)
        case "random":
            return RandomAbsolute(config.d_model, config.n_ctx)
        case "absolute_rope" | "absolute_mla":
            return AbsoluteRope(config)
        case "sinusoidal_rope":
            return SinusoidalRope(config)
        case _:  # MLA rotates a part of each head, RoPE the whole
            return Rope(config)


# --- added to the embedded text ---------------------------------------------------------------------------------


class Sinusoidal(Encoding):
    """``sin(p / 10000^(2c/d))`` and ``cos`` of the same, in turns (arXiv 1706.03762) or in two halves."""

    embeds = True
    table: Tensor

    def __init__(self, d_model: int, n_ctx: int, order: SinusoidOrder = "alternating") -> None:
        super().__init__()
        self.d_model, self.order = d_model, order
        self.register_buffer("table", self._table(n_ctx), persistent=False)

    def _table(self, length: int) -> Float[Tensor, "pos d_model"]:
        angle = _angles(length, 10000.0, self.d_model)
        if self.order == "halves":
            return torch.cat([angle.sin(), angle.cos()], -1).float()
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.table[:length] if length <= len(self.table) else self._table(length).to(self.table)


class Learned(Encoding):
    """A learned vector for every position."""

    embeds = True

    def __init__(self, d_model: int, n_ctx: int) -> None:
        super().__init__()
        self.longest = n_ctx
        self.W_pos = nn.Parameter(torch.empty(n_ctx, d_model))

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.W_pos[:length]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.W_pos.copy_(torch.randn(self.W_pos.shape, generator=generator))


class RandomAbsolute(Encoding):
    """A fixed random vector N(0, 1) for every position, drawn with the weights and not trained."""

    embeds = True
    W_pos: Tensor

    def __init__(self, d_model: int, n_ctx: int) -> None:
        super().__init__()
        self.longest = n_ctx
        self.register_buffer("W_pos", torch.empty(n_ctx, d_model))

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.W_pos[:length]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.W_pos.copy_(torch.randn(self.W_pos.shape, generator=generator))


# --- added to the scores ----------------------------------------------------------------------------------------


class ALiBi(Encoding):
    """``-slope_h · |distance|`` (arXiv 2108.12409), with the published slopes, also for 6 or 12 heads, or exponential
    ones."""

    slopes: Tensor
    table: Tensor

    def __init__(self, n_heads: int, n_ctx: int, slopes: AlibiSlopes = "powers") -> None:
        super().__init__()
        values = alibi_slopes(n_heads) if slopes == "powers" else [math.exp(-h / n_heads) for h in range(n_heads)]
        self.register_buffer("slopes", torch.tensor(values), persistent=False)
        self.register_buffer("table", self._table(n_ctx), persistent=False)

    def _table(self, length: int) -> Float[Tensor, "head query key"]:
        distance = torch.arange(1 - length, length, device=self.slopes.device)
        return toeplitz(-self.slopes[:, None] * distance.abs())

    def bias(self, length: int) -> Float[Tensor, "1 head query key"]:
        table = self.table if length <= self.table.shape[-1] else self._table(length)
        return table[None, :, :length, :length]


class RelativeBias(Encoding):
    """A learned number for every layer, head and distance."""

    learns_bias = True

    def __init__(self, n_layers: int, n_heads: int, n_ctx: int) -> None:
        super().__init__()
        self.longest = n_ctx
        self.table = nn.Parameter(torch.empty(n_layers, n_heads, 2 * n_ctx - 1))
        """``[layer, head, distance + n_ctx - 1]``"""

    def bias(self, length: int) -> Float[Tensor, "layer head query key"]:
        middle = self.table.shape[-1] // 2
        return toeplitz(self.table[..., middle - length + 1 : middle + length])

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.table.copy_(0.02 * torch.randn(self.table.shape, generator=generator))


class T5Bias(Encoding):
    """A learned number for every head and bucket of distances, shared by all layers (arXiv 1910.10683).

    Scores keep their factor ``1/√d_head``, which T5 leaves out, so that encodings compare.
    """

    learns_bias = True
    bucket: Tensor

    def __init__(self, n_heads: int, n_ctx: int, n_buckets: int, max_distance: int, causal: bool) -> None:
        super().__init__()
        self.n_buckets, self.max_distance, self.causal = n_buckets, max_distance, causal
        self.table = nn.Parameter(torch.empty(n_heads, n_buckets))
        self.register_buffer("bucket", self._buckets(n_ctx), persistent=False)

    def _buckets(self, length: int) -> Int[Tensor, "distance"]:
        distance = torch.arange(1 - length, length)
        return t5_bucket(distance, self.n_buckets, self.max_distance, causal=self.causal)

    def bias(self, length: int) -> Float[Tensor, "1 head query key"]:
        middle = len(self.bucket) // 2
        bucket = self.bucket[middle - length + 1 : middle + length] if length <= middle + 1 else self._buckets(length)
        return toeplitz(self.table[None, :, bucket.to(self.table.device)])

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.table.copy_(0.02 * torch.randn(self.table.shape, generator=generator))


def alibi_slopes(n_heads: int) -> list[float]:
    """``2^(-8h/n)`` for h = 1 … n; if n is no power of two, the rest is every other one for twice the power below.

    >>> alibi_slopes(4), [round(x, 3) for x in alibi_slopes(3)]
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.062, 0.004, 0.25])
    """
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


def t5_bucket(
    distance: Int[Tensor, "*cells"], n_buckets: int, max_distance: int, *, causal: bool
) -> Int[Tensor, "*cells"]:
    """T5's bucket of a distance: small distances have one each, larger ones share them on a logarithmic scale.

    Bidirectional models give half of the buckets to keys after the query.

    >>> t5_bucket(torch.tensor([0, 3, 15, 16, 40, 127, 500]), 32, 128, causal=True).tolist()
    [0, 3, 15, 16, 23, 31, 31]
    """
    offset = torch.zeros_like(distance)
    if causal:
        distance = distance.clamp_min(0)
    else:
        n_buckets //= 2
        offset, distance = (distance < 0) * n_buckets, distance.abs()
    exact = n_buckets // 2
    steps = (distance.clamp_min(1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (steps * (n_buckets - exact)).long()).clamp(max=n_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def toeplitz(values: Float[Tensor, "*head distances"]) -> Float[Tensor, "*head query key"]:
    """From values at distances ``1 - L … L - 1`` to cells ``[i, j]`` with the value at ``i - j``.

    >>> toeplitz(torch.tensor([-1.0, 0.0, 1.0])).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    length = (values.shape[-1] + 1) // 2
    return values.flip(-1).unfold(-1, length, 1).flip(-2)


# --- turning queries and keys -----------------------------------------------------------------------------------


class Rope(Encoding):
    """Coordinates c and c + n of each head's first 2n turn by ``position · base^(-c/n)`` (arXiv 2104.09864).

    The coordinates after them, and heads from ``rotary_heads`` on, stay as they are.
    """

    rotates = True
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.dim, self.base, self.heads = config.rotary_dim, float(config.rope_base), config.rotary_heads
        cos, sin = self._tables(config.n_ctx)
        self.register_buffer("rotary_cos", cos, persistent=False)  # [pos, 2n], the n columns twice
        self.register_buffer("rotary_sin", sin, persistent=False)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        angle = _angles(length, self.base, self.dim).repeat(1, 2)
        return angle.cos().float(), angle.sin().float()

    def tables(self, length: int) -> tuple[Float[Tensor, "pos columns"], Float[Tensor, "pos columns"]]:
        """Cosines and sines of positions 0 … length - 1."""
        if length <= len(self.rotary_cos):
            return self.rotary_cos[:length], self.rotary_sin[:length]
        cos, sin = self._tables(length)
        return cos.to(self.rotary_cos), sin.to(self.rotary_sin)

    def rotate(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        if self.heads is not None and self.heads < x.shape[2]:
            return torch.cat([self._rotated(x[:, :, : self.heads]), x[:, :, self.heads :]], 2)
        return self._rotated(x)

    def _rotated(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        n = self.dim // 2
        cos, sin = (table[:, None, :n].to(x.dtype) for table in self.tables(x.shape[1]))
        first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
        return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


class AbsoluteRope(Rope):
    """A learned vector for every position, and rotation in every layer (RoPE, or MLA's rotary part)."""

    embeds = True

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.absolute = Learned(config.d_model, config.n_ctx)
        self.longest = config.n_ctx

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.absolute.embed(length)

    def initialise(self, generator: torch.Generator) -> None:
        self.absolute.initialise(generator)


class SinusoidalRope(Rope):
    """Sinusoidal positions added to the embedded text, and RoPE in every layer."""

    embeds = True

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.absolute = Sinusoidal(config.d_model, config.n_ctx, config.sinusoids)

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.absolute.embed(length)


def _angles(length: int, base: float, dim: int) -> Float[Tensor, "pos half"]:
    """``position · base^(-2c/dim)`` in float64."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency
