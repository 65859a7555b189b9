"""Mean and covariance of queries and keys: all that the variance of the scores depends on, and it adds up."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .rotary import Rotary, to_complex
from .spread import Spread, chunks, merge, merge_all, spread_of

_TENSORS = ("q_mean", "q_cov", "k_mean", "k_cov")
_ANGLE_DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Means and covariances of one layer's queries and keys before rotation.

    They suffice for every share of the scores' variance at controlled distances (``decompose``), however many pairs
    there were. Moments add: ``a + b`` are the moments of both texts together, and a corpus is ``sum(moments)``.

    Coordinates stand in the order of the subspaces, both coordinates of the first, then both of the second, whatever
    the pairing; coordinates that RoPE leaves alone follow. All tensors are float64, in the units of the vectors.

    Attributes:
        q_mean: ``[head, d_head]``, mean query of each head.
        q_cov: ``[head, d_head, d_head]``, population covariance (divided by the count) of the queries.
        k_mean: ``[kv_head, d_head]``, mean key of each key head; query head h reads ``h // (n_heads // n_kv)``.
        k_cov: ``[kv_head, d_head, d_head]``, population covariance of the keys.
        n_queries, n_keys: how many there were.
        rotary: the layer's frequencies, pairing and attention factor.
    """

    q_mean: Float64[Tensor, "head d_head"]
    q_cov: Float64[Tensor, "head d_head d_head"]
    k_mean: Float64[Tensor, "kv_head d_head"]
    k_cov: Float64[Tensor, "kv_head d_head d_head"]
    n_queries: int
    n_keys: int
    rotary: Rotary

    @classmethod
    @torch.no_grad()
    def from_qk(
        cls, q: Float[Tensor, "*n_q head d_head"], k: Float[Tensor, "*n_k kv_head d_head"], rotary: Rotary
    ) -> Moments:
        """Read queries and keys once, a chunk at a time.

        Sums run in float64 about the chunk's own mean, so means that are large against the spread cost no digits.
        Extra memory is one chunk and the result, whatever the layout of ``q`` and ``k``.

        Args:
            q: queries before rotation and after any QK-norm, ``[*n_q, head, d_head]``; all leading axes are counted
                as one set of queries. To leave some out (padding), index: ``q[keep]``.
            k: keys likewise, ``[*n_k, kv_head, d_head]``. Heads may share them: ``kv_head`` divides ``head``.
            rotary: the layer's rotation. With no frequencies at all, every coordinate is un-rotated.

        Raises:
            ValueError: queries or keys that are no floating-point tensors of at least three axes, are empty, are not
                finite, differ in ``d_head`` or device, or have head counts that do not divide; a head smaller than the
                rotary dimension.

        Example:
            >>> import torch
            >>> from tl_posdisent import Moments, Rotary
            >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
            >>> one, two = torch.randn(2, 50, 8, 4), torch.randn(2, 50, 2, 4)  # two texts, 8 heads on 2 key heads
            >>> Moments.from_qk(one, two, rotary)
            Moments of 100 queries and 100 keys: 8 heads on 2 key heads, d_head 4
              2 subspaces, wavelengths 6.28…62.8
            >>> parts = [Moments.from_qk(q, k, rotary) for q, k in zip(one, two)]  # text by text
            >>> bool(torch.allclose(sum(parts).q_cov, Moments.from_qk(one, two, rotary).q_cov))
            True
        """
        _check_vectors(q, k, rotary)
        order = _subspace_order(q.shape[-1], rotary).to(q.device)
        sides = []
        for name, x in (("q", q), ("k", k)):
            spread = merge_all(map(spread_of, chunks(x)))
            if not bool(spread.cov.isfinite().all()):
                raise ValueError(f"{name} must be finite, got NaN, infinity or numbers too large to square")
            sides += [spread.mean[:, order], spread.cov[:, order][:, :, order]]
        counts = (x.shape[:-2].numel() for x in (q, k))
        return cls(*sides, *counts, rotary.to(q.device))

    def __post_init__(self) -> None:
        (n_heads, d_head), n_kv = self.q_mean.shape, len(self.k_mean)
        for name, heads in zip(_TENSORS, (n_heads, n_heads, n_kv, n_kv), strict=True):
            x, shape = getattr(self, name), (heads, d_head, d_head) if name.endswith("cov") else (heads, d_head)
            if x.shape != shape or x.dtype != torch.float64 or not bool(x.isfinite().all()):
                got = f"{x.dtype} of shape {tuple(x.shape)}"
                raise ValueError(f"{name} must be finite float64 of shape {shape}, got {got}")
        _check_heads(n_heads, n_kv)
        if d_head < self.rotary.dim:
            raise ValueError(f"d_head must be at least {self.rotary.dim}, two per frequency, got {d_head}")
        if min(self.n_queries, self.n_keys) < 1:
            raise ValueError(f"n_queries and n_keys must be positive, got {self.n_queries} and {self.n_keys}")

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return len(self.q_mean)

    @property
    def n_kv(self) -> int:
        """Number of key heads."""
        return len(self.k_mean)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of queries and of both sets of keys together.

        Raises:
            ValueError: moments of different shape or rotation.
        """
        if not isinstance(other, Moments):
            return NotImplemented
        for name in ("q_mean", "k_mean"):
            a, b = getattr(self, name), getattr(other, name)
            if a.shape != b.shape:
                raise ValueError(
                    f"moments to be added must have the same {name} shape, got {tuple(a.shape)} and {tuple(b.shape)}"
                )
        if not _same(self.rotary, other.rotary):
            raise ValueError(f"moments to be added must have the same rotary, got {self.rotary} and {other.rotary}")
        q = merge(Spread(self.n_queries, self.q_mean, self.q_cov), Spread(other.n_queries, other.q_mean, other.q_cov))
        k = merge(Spread(self.n_keys, self.k_mean, self.k_cov), Spread(other.n_keys, other.k_mean, other.k_cov))
        counts = self.n_queries + other.n_queries, self.n_keys + other.n_keys
        return Moments(q.mean, q.cov, k.mean, k.cov, *counts, self.rotary)

    def __radd__(self, other: Literal[0]) -> Moments:
        """``sum`` begins with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def to(self, device: torch.device | str) -> Moments:
        """The same on another device."""
        return replace(self, **{x: getattr(self, x).to(device) for x in _TENSORS}, rotary=self.rotary.to(device))

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Save in safetensors; ``from_file`` gives the same numbers back to the last bit."""
        about = {
            "kind": "Moments",
            "version": 1,
            "n_queries": self.n_queries,
            "n_keys": self.n_keys,
            "pairing": self.rotary.pairing,
            "attention_factor": self.rotary.attention_factor,
            "angle_dtype": str(self.rotary.angle_dtype).removeprefix("torch."),
        }
        tensors = {name: getattr(self, name) for name in _TENSORS} | {"frequencies": self.rotary.frequencies}
        contiguous = {name: x.cpu().contiguous() for name, x in tensors.items()}
        save_file(contiguous, path, {"tl_posdisent": json.dumps(about)})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Moments:
        """Moments that ``to_file`` saved, on the CPU.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a file that is no safetensors file, is truncated, or holds something else than moments.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("tl_posdisent", "{}"))
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"{os.fspath(path)} is no safetensors file, or is truncated: {error}") from error
        if not isinstance(about, dict) or (about.get("kind"), about.get("version")) != ("Moments", 1):
            raise ValueError(f"{os.fspath(path)} does not hold Moments of version 1")
        try:
            return cls._from_parts(about, tensors)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} holds damaged Moments: {error}") from error

    @classmethod
    def _from_parts(cls, about: dict[str, Any], tensors: dict[str, Tensor]) -> Moments:
        angle_dtype = _ANGLE_DTYPES[about["angle_dtype"]]
        rotary = Rotary(tensors["frequencies"], about["pairing"], float(about["attention_factor"]), angle_dtype)
        return cls(*(tensors[x] for x in _TENSORS), int(about["n_queries"]), int(about["n_keys"]), rotary)

    def __repr__(self) -> str:
        heads = f"{self.n_heads} heads" + (f" on {self.n_kv} key heads" if self.n_kv != self.n_heads else "")
        waves, rest = self.rotary.wavelengths, self.q_mean.shape[-1] - self.rotary.dim
        turning = f"{len(waves)} subspaces"
        if len(waves):
            turning += f", wavelengths {waves.min().item():.3g}…{waves.max().item():.3g}"
        return (
            f"Moments of {self.n_queries} queries and {self.n_keys} keys: {heads}, d_head {self.q_mean.shape[-1]}\n"
            f"  {turning}" + (f", {rest} un-rotated coordinates" if rest else "")
        )
