"""Moments of queries and keys: the means and covariances that the variance decomposition of the scores needs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tl_posdisent.utils.files import whole_file

from .covariance import Spread, chunks, spread_of, total
from .rotary import Rotary, check_rotary, to_complex

_ANGLE_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_ANGLE_DTYPES |= {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False, repr=False)
class Moments:
    """Means and covariances of one layer's queries and keys before rotation.

    They suffice for every share of the scores' variance at controlled distances (``decompose``), however many pairs
    of tokens there were. Moments add: ``a + b`` are the moments of both texts together, a corpus is ``sum(moments)``.

    Coordinates stand in the order of the subspaces, both coordinates of the first, then both of the second, whatever
    the pairing; coordinates that RoPE leaves alone follow.

    Attributes:
        query: ``count``, ``mean`` ``[head, d_head]`` and ``cov`` ``[head, d_head, d_head]`` of the queries, float64,
            in the units of the vectors; covariances are divided by the count.
        key: the same of the keys, per key head; query head h reads key head ``h // (n_heads // n_kv)``.
        rotary: the layer's frequencies, pairing and attention factor.

    Example:
        >>> import torch
        >>> from tl_posdisent.rope import Moments, Rotary
        >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
        >>> q, k = torch.randn(2, 50, 8, 4), torch.randn(2, 50, 8, 4)  # two texts of 50 tokens, 8 heads
        >>> corpus = sum(Moments.from_qk(*text, rotary) for text in zip(q, k))
        >>> corpus.query.count, bool(torch.allclose(corpus.query.mean, q.double().mean((0, 1))[:, [0, 2, 1, 3]]))
        (100.0, True)
    """

    query: Spread
    key: Spread
    rotary: Rotary

    @classmethod
    @torch.no_grad()
    def from_qk(
        cls, q: Float[Tensor, "*n_q head d_head"], k: Float[Tensor, "*n_k kv_head d_head"], rotary: Rotary
    ) -> Moments:
        """Read queries and keys once, a chunk at a time.

        Sums run in float64 about each chunk's own mean, so means that are large against the spread cost no digits.
        Extra memory is a few copies of one chunk and of the result, whatever the layout of ``q`` and ``k``.

        Args:
            q: queries before rotation and after any QK-norm, ``[*n_q, head, d_head]``; all leading axes are counted
                as one set of queries. To leave some out (padding), index: ``q[keep]``.
            k: keys likewise, ``[*n_k, kv_head, d_head]``. Heads may share them: ``kv_head`` divides ``head``.
            rotary: the layer's rotation. Without any frequencies, every coordinate is un-rotated.

        Raises:
            ValueError: queries or keys that are no floating-point tensors of at least three axes, are empty or not
                finite, differ in ``d_head`` or device, or have head counts that do not divide; a head smaller than
                the rotary dimension.

        Example:
            >>> import torch
            >>> from tl_posdisent.rope import Moments, Rotary
            >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
            >>> Moments.from_qk(torch.randn(2, 50, 8, 4), torch.randn(2, 50, 2, 4), rotary)
            Moments of 100 queries and 100 keys: 8 heads on 2 key heads, d_head 4
              2 subspaces, wavelengths 6.28…62.8
        """
        _check_vectors(q, k, rotary)
        order = _subspace_order(q.shape[-1], rotary).to(q.device)
        query, key = (_measured(name, x.detach(), order) for name, x in (("q", q), ("k", k)))
        return cls(query, key, rotary.to(q.device))

    def __post_init__(self) -> None:
        (n_heads, d_head), (n_kv, d_key) = self.query.mean.shape, self.key.mean.shape
        _check_fit(n_heads, n_kv, d_head, d_key, self.rotary)

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of queries and of both sets of keys together.

        Raises:
            ValueError: moments of another shape or another rotation.
        """
        if not isinstance(other, Moments):
            return NotImplemented
        if _differences(self.rotary, other.rotary):
            raise ValueError(
                "moments to be added must have the same rotary, got rotations that differ in "
                f"{', '.join(_differences(self.rotary, other.rotary))}"
            )
        return Moments(self.query + other.query, self.key + other.key, self.rotary)

    def __radd__(self, other: Literal[0]) -> Moments:
        """``sum`` begins with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def to(self, device: torch.device | str) -> Moments:
        """The same on another device."""
        return Moments(self.query.to(device), self.key.to(device), self.rotary.to(device))

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Save in safetensors, whole or not at all; ``from_file`` gives the same numbers back to the last bit.

        Raises:
            OSError: it cannot be written.
        """
        about = {
            "kind": "Moments",
            "version": 1,
            "queries": self.query.count,
            "keys": self.key.count,
            "pairing": self.rotary.pairing,
            "attention_factor": self.rotary.attention_factor,
            "angle_dtype": str(self.rotary.angle_dtype).removeprefix("torch."),
        }
        tensors = {
            "q_mean": self.query.mean,
            "q_cov": self.query.cov,
            "k_mean": self.key.mean,
            "k_cov": self.key.cov,
            "frequencies": self.rotary.frequencies,
        }
        contiguous = {name: x.cpu().contiguous() for name, x in tensors.items()}
        with whole_file(path) as file:
            file.write(save(contiguous, {"tl_posdisent": json.dumps(about)}))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Moments:
        """Moments that ``to_file`` saved, on the CPU.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a file that is no safetensors file, is truncated, or holds something else than moments.
        """
        name = os.fspath(path)
        if os.path.isdir(path):
            raise ValueError(f"{name} is no safetensors file, but a folder")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("tl_posdisent", "{}"))
                # Clones: the file may be written anew while its numbers are in use.
                tensors = {x: file.get_tensor(x).clone() for x in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"{name} is no safetensors file, or is truncated: {error}") from error
        if not isinstance(about, dict) or (about.get("kind"), about.get("version")) != ("Moments", 1):
            raise ValueError(f"{name} does not hold Moments of version 1")
        try:
            return cls._from_parts(about, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name} holds damaged Moments: {error}") from error

    @classmethod
    def _from_parts(cls, about: dict[str, Any], tensors: dict[str, Tensor]) -> Moments:
        angle_dtype = _ANGLE_DTYPES[about["angle_dtype"]]
        rotary = Rotary(tensors["frequencies"], about["pairing"], float(about["attention_factor"]), angle_dtype)
        query = Spread(float(about["queries"]), tensors["q_mean"], tensors["q_cov"])
        key = Spread(float(about["keys"]), tensors["k_mean"], tensors["k_cov"])
        return cls(query, key, rotary)

    def __repr__(self) -> str:
        (n_heads, d_head), n_kv = self.query.mean.shape, len(self.key.mean)
        heads = f"{n_heads} heads" + (f" on {n_kv} key heads" if n_kv != n_heads else "")
        waves, rest = self.rotary.wavelengths, d_head - self.rotary.dim
        span = f", wavelengths {waves.min().item():.3g}…{waves.max().item():.3g}" if len(waves) else ""
        return (
            f"Moments of {self.query.count:.0f} queries and {self.key.count:.0f} keys: {heads}, d_head {d_head}\n"
            f"  {len(waves)} subspaces{span}" + (f", {rest} coordinates un-rotated" if rest else "")
        )


def _measured(name: str, x: Tensor, order: Int64[Tensor, "d_head"]) -> Spread:
    try:
        spread = total(map(spread_of, chunks(x)))
    except ValueError:  # NaN and infinity survive into the covariance: no second pass to look for them
        raise ValueError(f"{name} must be finite, and small enough to be squared") from None
    return Spread(spread.count, spread.mean[:, order], spread.cov[:, order][:, :, order])


def _subspace_order(d_head: int, rotary: Rotary) -> Int64[Tensor, "d_head"]:
    """Which coordinate of a head comes first, second …, subspace by subspace."""
    planes, rest = to_complex(torch.arange(d_head).double(), rotary)
    return torch.cat([torch.view_as_real(planes).flatten(), rest]).long()


def _check_vectors(q: Tensor, k: Tensor, rotary: Rotary) -> None:
    for name, x, axes in (("q", q, "(*n_q, head, d_head)"), ("k", k, "(*n_k, kv_head, d_head)")):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating-point torch.Tensor, got {got}")
        if x.ndim < 3 or x.numel() == 0:
            raise ValueError(f"{name} must have shape {axes} and not be empty, got {tuple(x.shape)}")
    check_rotary(rotary)
    if q.device != k.device:
        raise ValueError(f"q and k must be on the same device, got {q.device} and {k.device}")
    _check_fit(q.shape[-2], k.shape[-2], q.shape[-1], k.shape[-1], rotary)


def _check_fit(n_heads: int, n_kv: int, d_head: int, d_key: int, rotary: Rotary) -> None:
    if d_head != d_key:
        raise ValueError(f"queries and keys must have the same d_head, got {d_head} and {d_key}")
    if n_heads % n_kv:
        raise ValueError(f"the number of key heads must divide that of heads, got {n_kv} and {n_heads}")
    if d_head < rotary.dim:
        raise ValueError(f"d_head must be at least {rotary.dim}, two per frequency, got {d_head}")


def _differences(a: Rotary, b: Rotary) -> list[str]:
    """Names of the attributes in which two rotations differ."""
    names = [x for x in ("pairing", "attention_factor", "angle_dtype") if getattr(a, x) != getattr(b, x)]
    return names + ["frequencies"] * (not torch.equal(a.frequencies.cpu(), b.frequencies.cpu()))
