"""Position encodings: added to the embedded text (absolute), added to the scores (biases), or rotations (RoPE).

Fixed tables are computed once for ``n_ctx`` positions, and again for longer texts if a formula gives them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .config import SyntheticConfig


class Encoding(nn.Module):
    """No position encoding (NoPE), and the base class of the others. Distances are query minus key position."""

    rotates = False
    longest: int | None = None  # most positions of a text; None for any number

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()

    def embed(self, length: int) -> Float[Tensor, "pos d_model"] | None:
        """Return the vectors that are added to the embedded text, if any."""
        return None

    def rotate(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        """Rotate queries or keys by their positions."""
        return x

    def bias(self, length: int) -> Float[Tensor, "head query key"] | None:
        """Return the bias that is added to the scores of every layer, if any."""
        return None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw learned and random parameters."""


def make_encoding(config: SyntheticConfig) -> Encoding:
    """Create the encoding that a configuration names."""
    name = config.encoding
    others = {"none": Encoding, "t5": T5Bias, "alibi": ALiBi}
    if name in others:
        return others[name](config)
    absolute: Encoding | None = None
    if name.startswith("sinusoidal"):
        absolute = Sinusoidal(config)
    elif name not in ("rope", "mla"):
        absolute = Learned(config, trained=name != "random")
    return absolute if absolute is not None and not config.rotary_dim else Rope(config, absolute)


# --- added to the embedded text ---------------------------------------------------------------------------------


class Sinusoidal(Encoding):
    """Sinusoids: sine and cosine of ``p / 10000^(2c/d)``, alternating (arXiv 1706.03762) or in two halves."""

    table: Tensor

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.d_model, self.order = config.d_model, config.sinusoids
        self.register_buffer("table", self._table(config.n_ctx), persistent=False)

    def _table(self, length: int) -> Float[Tensor, "pos d_model"]:
        angle = _angles(length, 10000.0, self.d_model)
        if self.order == "halves":
            return torch.cat([angle.sin(), angle.cos()], -1).float()
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.table[:length] if length <= len(self.table) else self._table(length).to(self.table)


class Learned(Encoding):
    """A learned vector per position, N(0, 1) at initialisation; with ``trained=False`` a fixed random vector."""

    W_pos: Tensor

    def __init__(self, config: SyntheticConfig, *, trained: bool = True) -> None:
        super().__init__(config)
        self.longest = config.n_ctx
        vectors = nn.Parameter(torch.empty(config.n_ctx, config.d_model))
        if trained:
            self.W_pos = vectors
        else:
            self.register_buffer("W_pos", vectors.detach())

    def embed(self, length: int) -> Float[Tensor, "pos d_model"]:
        return self.W_pos[:length]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.W_pos.copy_(torch.randn(self.W_pos.shape, generator=generator))


# --- added to the scores ----------------------------------------------------------------------------------------


class ALiBi(Encoding):
    """ALiBi: a bias ``-slope_h · |distance|`` (arXiv 2108.12409), with the published slopes or exponential ones."""

    slopes: Tensor
    table: Tensor

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        n = config.n_heads
        slopes = alibi_slopes(n) if config.alibi_slopes == "powers" else [math.exp(-h / n) for h in range(n)]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)
        self.register_buffer("table", self._table(config.n_ctx), persistent=False)

    def _table(self, length: int) -> Float[Tensor, "head query key"]:
        distance = torch.arange(1 - length, length, device=self.slopes.device)
        return toeplitz(-self.slopes[:, None] * distance.abs())

    def bias(self, length: int) -> Float[Tensor, "head query key"]:
        table = self.table if length <= self.table.shape[-1] else self._table(length)
        return table[:, :length, :length]


class T5Bias(Encoding):
    """A learned bias for every head and bucket of distances, shared by all layers (arXiv 1910.10683).

    Scores keep their factor ``1/√d_head``, which T5 omits, so that encodings are comparable.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.config = config
        self.table = nn.Parameter(torch.empty(config.n_heads, config.t5_buckets))

    def bias(self, length: int) -> Float[Tensor, "head query key"]:
        c, distance = self.config, torch.arange(1 - length, length, device=self.table.device)
        bucket = t5_bucket(distance, c.t5_buckets, c.t5_max_distance, causal=c.causal)
        return toeplitz(self.table[:, bucket])

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        self.table.copy_(0.02 * torch.randn(self.table.shape, generator=generator))


def alibi_slopes(n_heads: int) -> list[float]:
    """Compute ALiBi's slopes: ``2^(-8h/n)`` for h = 1 … n if n is a power of two.

    Otherwise they are the slopes of the power of two below n, then every other slope of twice that power.
    """
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


def t5_bucket(
    distance: Int[Tensor, "*cells"], n_buckets: int, max_distance: int, *, causal: bool
) -> Int[Tensor, "*cells"]:
    """Compute T5's bucket of a distance: small distances have one each, larger ones share them on a logarithmic scale.

    Bidirectional models give half of the buckets to keys after the query.
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
    """Convert values at distances ``1 - L … L - 1`` to a matrix ``[i, j]`` with the value at ``i - j``."""
    length = (values.shape[-1] + 1) // 2
    return values.flip(-1).unfold(-1, length, 1).flip(-2)


# --- rotation of queries and keys -------------------------------------------------------------------------------


class Rope(Encoding):
    """RoPE: coordinates c and c + n of each head's first 2n rotate by ``position · base^(-c/n)`` (arXiv 2104.09864).

    The other coordinates, and heads from ``rotary_heads`` on, are not rotated. ``absolute`` is a second encoding, which
    is added to the embedded text.
    """

    rotates = True
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: SyntheticConfig, absolute: Encoding | None = None) -> None:
        super().__init__(config)
        self.dim, self.base, self.heads = config.rotary_dim, float(config.rope_base), config.rotary_heads
        cos, sin = self._tables(config.n_ctx)
        self.register_buffer("rotary_cos", cos, persistent=False)  # [pos, 2n], the n columns twice
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.absolute, self.longest = absolute, None if absolute is None else absolute.longest

    def embed(self, length: int) -> Float[Tensor, "pos d_model"] | None:
        return None if self.absolute is None else self.absolute.embed(length)

    def initialise(self, generator: torch.Generator) -> None:
        if self.absolute is not None:
            self.absolute.initialise(generator)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        angle = _angles(length, self.base, self.dim).repeat(1, 2)
        return angle.cos().float(), angle.sin().float()

    def tables(self, length: int) -> tuple[Float[Tensor, "pos columns"], Float[Tensor, "pos columns"]]:
        """Compute cosines and sines for positions 0 … length - 1."""
        cos, sin = (self.rotary_cos, self.rotary_sin) if length <= len(self.rotary_cos) else self._tables(length)
        return cos[:length].to(self.rotary_cos), sin[:length].to(self.rotary_cos)

    def rotate(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
        n, heads = self.dim // 2, x.shape[2] if self.heads is None else self.heads
        cos, sin = (table[:, None, :n].to(x.dtype) for table in self.tables(x.shape[1]))
        first, second, rest = x[:, :, :heads].split([n, n, x.shape[-1] - 2 * n], -1)
        rotated = torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)
        return rotated if heads >= x.shape[2] else torch.cat([rotated, x[:, :, heads:]], 2)


def _angles(length: int, base: float, dim: int) -> Float[Tensor, "pos half"]:
    """Compute ``position · base^(-2c/dim)`` in float64."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequency
