"""Scores of heads under edits of their rotation, from the model's own scores and its queries and keys.

The model's scores are a product of queries and keys and a rest, the mask and rounding. The edits give another product,
to which the rest is added, so masked cells stay masked. A piecewise linear function of the distance (one distance, a
ceiling) selects among products of turned vectors. All other distances are computed subspace by subspace for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float64, Int, Real
from torch import Tensor

from tl_posdisent.hooks.edit import Band, Edit
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary, turn
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

_CELLS_PER_BLOCK = 2**21
_MOST_PIECES = 8  # more would cost more than arbitrary distances
_NOISE_BLOCK = 64  # positions drawn at a time, so that those of a longer text begin with those of a shorter one

Scores = Float[Tensor, "batch head query key"]


class Vectors(NamedTuple):
    """Queries and keys of all heads and key heads, or of some heads, one key head for each query head."""

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]

    def of_heads(self, spec: AttentionSpec, heads: Sequence[int]) -> Vectors:
        if [*heads] == [*range(spec.n_heads)]:
            return self
        return Vectors(self.q[:, :, list(heads)], self.k[:, :, [spec.key_head(head) for head in heads]])

    def wide(self) -> Vectors:
        """Return them in float32 (float64 for float64)."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        return Vectors(self.q.to(wide), self.k.to(wide))

    def rotated(self, spec: AttentionSpec) -> Vectors:
        """Rotate as the model does, to the positions 0, 1, 2 …."""
        both = torch.cat(self, 2)  # angles and tables are computed once
        positions = torch.arange(both.shape[1], device=both.device)
        return Vectors(*spec.rotated(both, positions).split([self.q.shape[2], self.k.shape[2]], 2))

    def add_product(self, spec: AttentionSpec, scores: Scores, sign: int = 1) -> Scores:
        """Add the scores of rotated queries and keys to ``scores``, in place, or subtract them.

        In place because a new tensor of this size takes longer than the product does.
        """
        if spec.soft_cap is not None:
            return scores.add_(spec.score(*self), alpha=sign)
        q, k = self.q.transpose(1, 2), self.k.transpose(1, 2)
        batch, n_kv = k.shape[:2]
        # query heads that share a key head are one longer list of queries
        shared, q_shared = (
            rearrange(x, "batch (kv group) query d -> (batch kv) (group query) d", kv=n_kv) for x in (scores, q)
        )
        shared.baddbmm_(q_shared, k.flatten(0, 1).mT, alpha=sign * spec.require_scale())
        return rearrange(
            shared, "(batch kv) (group query) key -> batch (kv group) query key", batch=batch, kv=n_kv, query=q.shape[2]
        )


def rotated_scores(
    spec: AttentionSpec,
    edit: Edit,
    heads: Sequence[int],
    scores: Scores,
    rest: Scores,
    hidden: Bool[Tensor, "batch head query key"],
    vectors: Vectors,
) -> Scores:
    """Return the scores of some heads under the edits of their rotation.

    Args:
        scores: the model's own.
        rest: these less the product of its queries and keys; overwritten.
        hidden: the keys that a query does not see.
        vectors: of all heads, before rotation.
    """
    rotation = _Rotation(spec, edit, list(heads), vectors)
    if edit.distances is None and edit.ceiling is None:
        return _rounded(rotation.turned(*rotation.own_angles()).add_product(spec, rest), scores)
    ceiling = math.inf if edit.ceiling is None else edit.ceiling
    if isinstance(edit.distances, Tensor):
        cells = _matrix(spec, edit.distances, heads, ~hidden.all(1))
        values, index = cells.clamp(max=ceiling).unique(return_inverse=True)
        return _rounded(rest + rotation.of_pairs(values, index), scores)
    if edit.distances is None or isinstance(edit.distances, float):
        pieces = _pieces_of_ceiling(edit.distances, ceiling)
    else:
        n = scores.shape[-1]
        ahead = not spec.causal or bool((~hidden.all(1)).triu(1).any())  # in the prefix of a prefix LM
        low = 1 - n if ahead else 0  # a function need not have values at distances that do not occur
        real = torch.arange(low, n, device=scores.device)
        values = mapped(edit.distances, real.double(), "distances", "real distances").clamp(max=ceiling)
        straight = straight_pieces(values, low)
        if straight is None:
            slots = torch.arange(n, device=scores.device)
            index = (slots[:, None] - slots - low).clamp(0, len(values) - 1)
            return _rounded(rest + rotation.of_pairs(values, index), scores)
        pieces = straight
    return rotation.selected(scores, rest, pieces)


class _Rotation:
    """The rotation of some heads in one pass, as their record edits it."""

    def __init__(self, spec: AttentionSpec, edit: Edit, heads: list[int], vectors: Vectors) -> None:
        self.spec, self.edit, self.heads, self.vectors = spec, edit, heads, vectors
        self.rotary = spec.require_rotary("an edit of the rotation")
        self.slots = torch.arange(vectors.q.shape[1], device=vectors.q.device)
        self.positions = new_positions(edit, self.slots, len(vectors.q))
        self.noise = phases(edit, self.rotary, self.slots, len(vectors.q))

    def frozen(self) -> Bool[Tensor, " subspace"] | None:
        band = self.edit.band
        return band.removed(self.rotary) if band is not None and band.mode == "freeze" else None

    def exact(self) -> Rotary:
        """Return the rotation that applies to distances: frequencies frozen and divided by the factor, angles exact."""
        frequencies, frozen = self.rotary.frequencies / (self.edit.factor or 1.0), self.frozen()
        if frozen is not None:
            frequencies = frequencies.masked_fill(frozen.to(frequencies.device), 0.0)
        return replace(self.rotary, frequencies=frequencies, angle_dtype=torch.float64)

    def own_angles(self) -> tuple[Tensor, Tensor]:
        """Compute the angles of queries and keys at their positions as the model would, without noise."""
        factor, frozen = self.edit.factor, self.frozen()
        angles = self.rotary.angles(self.positions if factor is None else self.positions.double() / factor)
        if frozen is not None:
            angles = angles.masked_fill(frozen.to(angles.device), 0.0)
        return angles, angles

    def turned(
        self, of_queries: Float64[Tensor, "*pos subspace"], of_keys: Float64[Tensor, "*pos subspace"]
    ) -> Vectors:
        """Turn queries and keys of the heads by these angles and the noise, or put in those of another run."""
        spec, of_heads = self.spec, [self.spec.key_head(head) for head in self.heads]
        shared = sorted(set(of_heads))
        q = self._side("q_rot", self.edit.q_rot, self.vectors.q, self.heads, of_queries)
        k = self._side("k_rot", self.edit.k_rot, self.vectors.k, shared, of_keys)
        every = len(self.heads) == spec.n_heads
        return Vectors(kept(q, self.edit.band, self.rotary), k if every else k[:, :, [*map(shared.index, of_heads)]])

    def _side(self, name: str, patch: Tensor | None, x: Tensor, chosen: Sequence[int], angles: Tensor) -> Tensor:
        if patch is not None:
            wanted = (*x.shape[:2], patch.shape[2], x.shape[3])
            if patch.shape != wanted:
                raise ArgumentError(name, f"must have the shape of the run's own, {wanted}, got {tuple(patch.shape)}")
            return patch[:, :, list(chosen)].to(x)
        x = x if len(chosen) == x.shape[2] else x[:, :, list(chosen)]
        return turn(x, (angles + self.noise)[..., None, :], self.rotary.pairing, self.rotary.attention_factor)

    def selected(self, scores: Scores, rest: Scores, pieces: Sequence[Piece]) -> Scores:
        """Compute scores from vectors turned for each piece, and select for each pair the piece of its distance."""
        exact, positions = self.exact(), self.positions
        alone = set(self.edit.rotation) <= {"distances", "ceiling"}  # scores stay as they are where distances do
        real = positions[..., :, None] - positions[..., None, :] if len(pieces) > 1 else None
        real = real[:, None] if real is not None and real.ndim == 3 else real
        selected = None
        for n, piece in enumerate(pieces):
            here = None if real is None or selected is None else real >= piece.start
            if here is not None and not bool(here.any()):
                continue
            unchanged = piece.slope == 1 and piece.shift == 0
            if unchanged and alone:
                new = scores
            else:
                places = piece.slope * positions.double()
                angles = (exact.angles(places + piece.shift), exact.angles(places))
                after = self.turned(*(self.own_angles() if unchanged else angles))
                new = _rounded(after.add_product(self.spec, rest if n == len(pieces) - 1 else rest.clone()), scores)
            if selected is None or here is None:
                selected = new
            else:
                overwritten = new is not scores and not torch.is_grad_enabled()
                selected = torch.where(here, new, selected, out=new if overwritten else None)
        assert selected is not None
        return selected

    def of_pairs(self, values: Float[Tensor, " distance"], index: Int[Tensor, "*lead query key"]) -> Scores:
        """Compute scores at the distances ``values[index]``."""
        spec, rotary = self.spec, self.rotary
        q, k = (turn(x, self.noise[..., None, :], rotary.pairing, 1.0) for x in self.vectors)
        q = kept(q[:, :, self.heads], self.edit.band, rotary)
        k = k[:, :, [spec.key_head(head) for head in self.heads]]
        return pair_scores(replace(spec, rotary=self.exact()), q, k, values, index)


def kept(q: Float[Tensor, "batch pos head d_head"], band: Band | None, rotary: Rotary) -> Tensor:
    """Zero the dropped coordinates of queries: a term vanishes when its query is 0."""
    if band is not None and band.mode == "drop":
        q = q.masked_fill(_coordinates(rotary, band.removed(rotary), q), 0)
    if band is not None and band.without_rest:
        q = q.masked_fill(~_coordinates(rotary, rotary.frequencies != 0, q), 0)
    return q


def _coordinates(rotary: Rotary, subspaces: Bool[Tensor, " subspace"], x: Tensor) -> Bool[Tensor, " d_head"]:
    """Return a mask of the coordinates of ``x`` that make up these subspaces."""
    twice = torch.cat([subspaces, subspaces]) if rotary.pairing == "half" else subspaces.repeat_interleave(2)
    return torch.nn.functional.pad(twice, (0, x.shape[-1] - len(twice))).to(x.device)


def _rounded(new: Tensor, scores: Tensor) -> Tensor:
    """Return new scores in the model's dtype; in float16, sums with the most negative number would be -inf."""
    if scores.dtype != torch.float16:
        return new.to(scores.dtype)
    return torch.where(scores < torch.finfo(scores.dtype).min / 2, scores, new.to(scores.dtype))


# --- positions, phases and distances of a pass


def new_positions(edit: Edit, slots: Int[Tensor, " pos"], texts: int) -> Real[Tensor, "*batch pos"]:
    """Return the positions to which queries and keys are turned, before they are divided by a factor."""
    given = edit.positions
    if given is None:
        return slots
    if not isinstance(given, Tensor):
        return mapped(given, slots.double(), "positions", "positions").to(slots.device)
    if given.shape[-1] != len(slots):
        raise ArgumentError(
            "positions",
            f"were given for {given.shape[-1]} tokens, and the model runs on {len(slots)} (at once): give a function "
            "of the position for texts of any length",
        )
    if given.ndim == 2 and len(given) not in (1, texts):
        raise ArgumentError("positions", f"were given for {len(given)} texts, and the model runs on {texts}")
    return given.to(slots.device)


def phases(edit: Edit, rotary: Rotary, slots: Int[Tensor, " pos"], texts: int) -> Float64[Tensor, "*batch _ subspace"]:
    """Return the noise of each position's angles."""
    n, noise = len(rotary.frequencies), edit.noise
    if noise is None:
        return torch.zeros(1, n, dtype=torch.float64, device=slots.device)
    if isinstance(noise.angles, float):
        generator = torch.Generator().manual_seed(noise.seed)  # reseeded: all runs and layers get the same angles
        drawn = [
            torch.randn(_NOISE_BLOCK, n, generator=generator, dtype=torch.float64)
            for _ in range(0, len(slots), _NOISE_BLOCK)
        ]
        return (noise.angles * torch.cat(drawn)[: len(slots)]).to(slots.device)
    angles, shape = noise.angles if isinstance(noise.angles, Tensor) else noise.angles(rotary), (len(slots), n)
    if angles.shape[-2:] != shape or (angles.ndim == 3 and len(angles) not in (1, texts)):
        raise ArgumentError(
            "noise",
            f"must have shape (pos, subspace) = {shape} or (batch, pos, subspace) = {(texts, *shape)}, got "
            f"{tuple(angles.shape)}",
        )
    return angles.to(slots.device)


def mapped(function: Callable[[Tensor], Tensor], real: Tensor, name: str, what: str) -> Tensor:
    """Evaluate a user's function at real numbers and check its values."""
    try:
        values = function(real.clone())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            name,
            f"is called with a float64 tensor of {what} at once, and failed: {error}. Use tensor operations, "
            "such as d.clamp(max=16) for min(d, 16)",
        ) from error
    same_shape = isinstance(values, Tensor) and values.shape == real.shape
    if not same_shape or not bool(values.double().isfinite().all()):
        raise ArgumentError(
            name,
            f"must map a tensor of {what} to finite ones of the same shape ({tuple(real.shape)}), got "
            f"{'values that are not finite' if same_shape else shown(values)}",
        )
    return values.double()


class Piece(NamedTuple):
    """The function ``slope * distance + shift`` from the real distance ``start`` on."""

    start: float
    slope: float
    shift: float


def straight_pieces(values: Float[Tensor, " distance"], low: int = 0) -> list[Piece] | None:
    """Split a function, given at ``low``, ``low + 1`` …, into a few linear pieces, or return None if it has many."""
    pieces, start, n = [], 0, len(values)
    steps = values.diff()
    same = (steps[1:] - steps[:-1]).abs() <= 1e-9 * (1 + steps[1:].abs())
    bends = [*(int(x) + 1 for x in (~same).nonzero()[:, 0]), n - 1]  # steps before which the slope changes
    if len(bends) > 2 * _MOST_PIECES:
        return None
    for bend in bends:
        if bend <= start:
            continue
        slope = float(steps[start]) if start < n - 1 else 0.0
        pieces.append(Piece(start + low, slope, float(values[start]) - slope * (start + low)))
        start = bend + 1
    if start < n:
        pieces.append(Piece(start + low, 0.0, float(values[start])))
    return pieces if len(pieces) <= _MOST_PIECES else None


def _pieces_of_ceiling(distance: float | None, ceiling: float) -> list[Piece]:
    """Return one distance for all pairs, or the real ones, below a ceiling."""
    if distance is not None:
        return [Piece(-math.inf, 0.0, min(distance, ceiling))]
    return [Piece(-math.inf, 1.0, 0.0), Piece(ceiling, 0.0, ceiling)]


def _matrix(
    spec: AttentionSpec,
    distances: Float[Tensor, "*lead query key"],
    heads: Sequence[int],
    seen: Bool[Tensor, "batch query key"],
) -> Float[Tensor, "*lead query key"]:
    """Return the given distances of some heads, or raise if they do not fit the running text."""
    shape, batch, device = tuple(seen.shape[1:]), len(seen), seen.device
    allowed = [shape, *((h, *shape) for h in (1, spec.n_heads))]
    allowed += [(b, *by_head) for b in (1, batch) for by_head in allowed[1:]]
    if tuple(distances.shape) not in allowed:
        raise ArgumentError(
            "distances",
            f"must have shape (query, key) = {shape}, (head, query, key) or (batch, head, query, key) with "
            f"{spec.n_heads} heads and {batch} texts (or 1), got {tuple(distances.shape)}",
        )
    distances = distances.to(device)
    if not bool((distances.isfinite() | ~seen[:, None]).all()):
        raise ArgumentError("distances", "must be finite inside the mask")
    if distances.ndim >= 3 and distances.shape[-3] == spec.n_heads > 1:
        distances = distances[..., torch.tensor(list(heads), device=device), :, :]
    return distances.nan_to_num(0.0, 0.0, 0.0)  # masked cells are arbitrary


# --- arbitrary distances


def pair_scores(
    spec: AttentionSpec,
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    values: Float[Tensor, " distance"],
    index: Int[Tensor, "*lead query key"],
) -> Scores:
    """Compute scores of unrotated queries and keys (one key head per query head) at the distances ``values[index]``.

    The soft cap is applied, the mask is not. Computed in float32 (float64 for float64), a few million cells at a time.
    """
    rotary = spec.require_rotary("pair_scores")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    n, (n_query, n_key) = rotary.dim // 2, index.shape[-2:]
    angles = values.double()[:, None] * rotary.frequencies.to(values.device)  # in float64: it may be many turns
    cos, sin = ((rotary.attention_factor**2 * x.T).to(wide).contiguous() for x in (angles.cos(), angles.sin()))
    q_planes, q_rest = _planes(q.to(wide), rotary.pairing, n)
    k_planes, k_rest = _planes(k.to(wide), rotary.pairing, n)
    crossed = torch.stack([k_planes[..., 1], -k_planes[..., 0]], -1)
    blocks = []
    rows = max(1, min(n_query, 64, _CELLS_PER_BLOCK // (q.shape[0] * q.shape[2] * n_key)))
    for start in range(0, n_query, rows):
        some = slice(start, start + rows)
        block, here = q_rest[:, :, some] @ k_rest.mT, index[..., some, :]
        for c in range(n):
            one = q_planes[:, :, some, c]
            block = torch.addcmul(block, one @ k_planes[:, :, :, c].mT, cos[c][here])
            block = torch.addcmul(block, one @ crossed[:, :, :, c].mT, sin[c][here])
        blocks.append(block * spec.require_scale())
    return spec.capped(torch.cat(blocks, -2))


def _planes(
    x: Float[Tensor, "batch pos head d_head"], pairing: str, n: int
) -> tuple[Float[Tensor, "batch head pos subspace 2"], Float[Tensor, "batch head pos rest"]]:
    """Split vectors into the coordinates of each subspace and those that RoPE does not rotate; heads first."""
    x = x.transpose(1, 2)
    rotated = x[..., : 2 * n].unflatten(-1, (2, n) if pairing == "half" else (n, 2))
    return rotated.mT.contiguous() if pairing == "half" else rotated.contiguous(), x[..., 2 * n :].contiguous()
