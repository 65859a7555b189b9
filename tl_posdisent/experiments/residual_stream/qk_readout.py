"""Queries and keys of a layer as affine functions of the residual stream, with every norm's scale frozen.

A norm is linear once its scale is frozen: ``norm(x) = t · gain ∘ x`` (for some norms, of ``x`` minus its mean), with
one number t per vector. A pre-norm layer therefore computes the query of a vector x as ``s(x) · M x + bias``, and a
QK-norm makes it ``r · gain ∘ (s(x) · M x + bias)``. ``M`` and the bias are measured by setting the stream to every unit
vector and its negative, which all have the same s. The s and r of a vector of a real text are fitted to its query, and
the fit is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Recorded, running
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.precision import score_tolerance

Side = Literal["q", "k"]
NAMES: dict[Side, str] = {"q": "queries", "k": "keys"}
_LEAST_SQUARES_ROUNDS = 4


@dataclass(frozen=True)
class FrozenNorm:
    """A norm without its scale t: ``v = t · gain ∘ u``, with ``u`` minus its mean if ``centred``."""

    gain: Float64[Tensor, "head size"]
    centred: bool

    def linear(self, u: Float64[Tensor, "*batch head size"]) -> Float64[Tensor, "*batch head size"]:
        """Compute ``gain ∘ u``, with ``u`` minus its mean if ``centred``."""
        return self.gain * (u - u.mean(-1, keepdim=True) if self.centred else u)

    def scales(
        self, u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"]
    ) -> Float64[Tensor, "*batch head"]:
        """Fit t for every vector by least squares."""
        return _factor(self.linear(u), v, -1)

    def makes(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> bool:
        """Say whether ``v`` is this norm of ``u``, up to the rounding of a model of this dtype."""
        error = (self.scales(u, v)[..., None] * self.linear(u) - v).abs().amax()
        return bool(error <= score_tolerance(dtype) * v.abs().amax())


def fit_norm(
    u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"], dtype: torch.dtype
) -> FrozenNorm | None:
    """Fit the norm that maps ``u`` to ``v`` within the rounding of a model of this dtype.

    Returns None if no norm with a gain and one scale per vector does.
    """
    u, v = u.flatten(0, -3), v.flatten(0, -3)
    fits = (_fit(u, v, centred) for centred in (False, True))
    return next((norm for norm in fits if norm.makes(u, v, dtype)), None)


def _fit(u: Tensor, v: Tensor, centred: bool) -> FrozenNorm:
    """Fit gain and scales by alternating least squares.

    ``v / u`` is a matrix of rank one, gains times scales; its medians are starting values for the scales.
    """
    x = u - u.mean(-1, keepdim=True) if centred else u
    t = (v / x).abs().nanmedian(-1).values.nan_to_num(nan=0.0, posinf=0.0)
    for _ in range(_LEAST_SQUARES_ROUNDS):
        gain = _factor(t[..., None] * x, v, 0)
        norm = gain.square().mean(-1, keepdim=True).sqrt()
        gain = torch.where(norm > 0, gain / norm, gain)
        t = _factor(gain * x, v, -1)
    return FrozenNorm(gain, centred)


def _factor(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Compute the number c for which ``c x`` is closest to y, along an axis; 0 where x is 0."""
    size = x.square().sum(dim)
    return torch.where(size > 0, (x * y).sum(dim) / size, 0.0)


@dataclass(frozen=True)
class Readout:
    """The map from the stream at the hook ``source`` to one layer's queries (or keys).

    ``matrix`` is known up to a factor that all vectors share; ``needed`` begins error messages.
    """

    side: Side
    source: str
    tap: Tap
    matrix: Float64[Tensor, "head d_head d_model"]
    bias: Float64[Tensor, "head d_head"]
    needed: str

    def linear(self, x: Float64[Tensor, "*batch d_model"]) -> Float64[Tensor, "*batch head d_head"]:
        """``M x``."""
        return torch.einsum("...m,hdm->...hd", x, self.matrix)

    @property
    def slices(self) -> list[slice]:
        """Coordinates that have a scale of their own: with a shared slice, only the others are behind a second norm."""
        layout = self.tap.latent
        if layout is None or layout.shared is None:
            return [slice(None)]
        return [slice(layout.rotated), slice(layout.rotated, None)]

    def scales(
        self,
        spec: AttentionSpec,
        x: Float64[Tensor, "batch pos d_model"],
        seen: Float[Tensor, "batch pos head d_head"],
    ) -> Float64[Tensor, "batch pos 1 d_head"]:
        """Fit the pre-norm's factor s for every vector of the stream to the queries (or keys) ``seen``, or raise.

        It is that of each coordinate, because with a shared slice the other coordinates have a second norm.
        """
        linear, target = self.linear(x), seen.double() - self.bias
        factors = []
        for coordinates in self.slices:
            a, b = linear[..., coordinates], target[..., coordinates]
            factors.append(_factor(a.flatten(-2), b.flatten(-2), -1)[..., None, None].expand_as(a[..., :1, :]))
        scale = torch.cat(factors, -1)
        error, largest = (scale * linear - target).abs().amax(), seen.double().abs().amax()
        if not bool(error <= score_tolerance(seen.dtype) * largest):
            raise ValueError(
                f"{self.needed} {NAMES[self.side]} that are an affine function of the residual stream at the norm's "
                f"actual scale, but in layer {spec.layer} of {spec.architecture} such a function differs from them by "
                f"{error.item():.1e} of {largest.item():.1e} (QK-norm, a norm of latents, no pre-norm, or "
                "hooks of your own between them)"
            )
        return scale


@dataclass(frozen=True)
class FrozenReadout:
    """The queries (or keys) of some heads in some texts, with the scales of all norms frozen.

    The vector of a token is ``linear(stream_scale · x) + constant(norm_scale)``, ``x`` the stream at ``source``.

    Attributes:
        matrix, bias, norm: the maps of these heads; ``norm`` is that of queries (or keys), None if there is none.
        stream_scale: factor of the stream: the scales of both norms; one for all heads without a QK-norm.
        norm_scale: the scale of the QK-norm; 1 without one.
    """

    source: str
    matrix: Float64[Tensor, "head d_head d_model"]
    bias: Float64[Tensor, "head d_head"]
    norm: FrozenNorm | None
    stream_scale: Float64[Tensor, "batch pos head_or_one"]
    norm_scale: Float64[Tensor, "batch pos head_or_one"]

    def linear(self, x: Float64[Tensor, "*batch head_or_one d_model"]) -> Float64[Tensor, "*batch head d_head"]:
        """Map a part of the stream, or a sum of such parts, to each head's vectors."""
        shape = (*x.shape[:-2], len(self.matrix), x.shape[-1])
        return self._normed(torch.einsum("...hm,hdm->...hd", x.expand(shape), self.matrix))

    def constant(self, scale: Float64[Tensor, "*batch head_or_one"]) -> Float64[Tensor, "*batch head d_head"]:
        """Return the bias times a scale, or a sum of scales."""
        return self._normed(scale[..., None] * self.bias)

    def _normed(self, u: Float64[Tensor, "*batch head d_head"]) -> Float64[Tensor, "*batch head d_head"]:
        return u if self.norm is None else self.norm.linear(u)


def observe(
    model: Any, spec: AttentionSpec, readouts: Iterable[Readout], tokens: Int[Tensor, "batch pos"]
) -> tuple[Recorded, Captured]:
    """Run texts once, and return what their layer reads, at the hooks of its readouts, and what it makes of it."""
    held, captured = Recorded(), list[Captured]()
    names = dict.fromkeys(name for readout in readouts for name in (readout.source, readout.tap.name))
    with applied(model, held.hooks(names)):
        for_each_layer(model, tokens, [spec], captured.append, scores=False)
    return held, captured[0]


def freeze(
    spec: AttentionSpec,
    readout: Readout,
    heads: Sequence[int],
    held: Mapping[str, Tensor],
    vectors: Float[Tensor, "batch pos head d_head"],
) -> FrozenReadout:
    """Fit the scales of all norms to the queries (or keys) of some texts, or raise.

    Args:
        heads: of the queries (or keys).
        held: what the texts have at ``readout.source`` and at its tap.
        vectors: their queries (or keys) before rotation, after any QK-norm, of all heads.
    """
    plain = readout.tap.read(held[readout.tap.name])
    stream = readout.scales(spec, held[readout.source].double(), plain)[..., 0]
    norm_scale, norm = torch.ones_like(stream), None
    if not torch.equal(plain, vectors):
        u, v = plain.double(), vectors.double()
        if u.shape == v.shape:
            u, v = u[:, :, heads], v[:, :, heads]
            norm = fit_norm(u, v, vectors.dtype)
        if u.shape != v.shape or norm is None or not norm.makes(u, v, vectors.dtype):
            raise ValueError(
                f"{readout.needed} {NAMES[readout.side]} that equal those before the QK-norm times a gain and one "
                f"number per token and head, but in layer {spec.layer} of {spec.architecture} they do not"
            )
        norm_scale = norm.scales(u, v)
    matrix, bias = readout.matrix[heads], readout.bias[heads]
    return FrozenReadout(readout.source, matrix, bias, norm, stream * norm_scale, norm_scale)


def measure_readouts(
    model: Any, spec: AttentionSpec, tokens: Int[Tensor, "batch pos"], taps: dict[Side, Tap], needed: str
) -> dict[Side, Readout]:
    """Measure the maps from the stream to a layer's queries and keys, in passes over all unit vectors and negatives.

    Only the length of the tokens matters.
    """
    if spec.taps.q is None and spec.taps.scores is None:
        raise ValueError(
            f"{needed} queries and keys of each head before rotation, and in layer {spec.layer} of {spec.architecture} "
            f"{spec.limits.problem}"
        )
    if spec.taps.q is not None and spec.taps.q.latent is not None and taps["q"].latent is None:
        raise ValueError(
            f"{needed} queries and keys that are an affine function of the residual stream behind one norm, but those "
            f"of layer {spec.layer} of {spec.architecture} are behind the norms of latents (multi-head latent "
            "attention)"
        )
    d_model = int(model.cfg.d_model)
    size = d_model**0.5  # vectors of unit variance, as after a norm
    expansions = [_expansion(model, spec, tokens, tap) for tap in taps.values()]
    measured: dict[Side, Readout] = {}
    for source in dict.fromkeys((residual_hook(spec.layer), residual_hook(0))):  # some read keys from the input
        names = [*dict.fromkeys(name for tap in taps.values() for name in (*tap.names, _latent_hook(tap)) if name)]
        for name in (source, *names):
            if name not in model.hook_dict:
                raise ArgumentError("model", f"must have the hook {name}, which {spec.architecture} does not have")
        answers = []
        for sign in (size, -size):
            seen = _record_unit_vectors(model, spec, tokens, source, d_model, sign, names)
            pairs = zip(taps.values(), expansions, strict=True)
            answers.append([_vectors(tap, expansion, seen).flatten(0, 1)[:d_model] for tap, expansion in pairs])
        for (side, tap), plus, minus in zip(taps.items(), *answers, strict=True):
            if side not in measured and not torch.equal(plus, minus):
                matrix = ((plus - minus) / (2 * size)).permute(1, 2, 0)
                measured[side] = Readout(side, source, tap, matrix, (plus + minus).mean(0) / 2, needed)
        if len(measured) == len(taps):
            return {side: measured[side] for side in taps}
    raise ValueError(
        f"{needed} queries and keys that read the residual stream, but those of layer {spec.layer} "
        f"of {spec.architecture} do not change with {residual_hook(spec.layer)}"
    )


def _record_unit_vectors(
    model: Any, spec: AttentionSpec, tokens: Tensor, source: str, n: int, size: float, names: Sequence[str]
) -> Recorded:
    """Record hooks in a pass with the first n coordinates of the vectors at ``source`` set to unit vectors by size."""
    length = tokens.shape[1]
    texts = -(-n // length)

    def put(x: Tensor, hook: Any) -> Tensor:
        rows = size * torch.eye(n, x.shape[-1], dtype=x.dtype, device=x.device)
        return rows[torch.arange(texts * length, device=x.device) % n].view(texts, length, -1)

    with running(model, bare=True) as p:
        return p.record(tokens[:1].expand(texts, -1), names, [(source, put)], stop=spec.layer + 1)


def _latent_hook(tap: Tap) -> str | None:
    return None if tap.latent is None else tap.latent.latent


def _expansion(
    model: Any, spec: AttentionSpec, tokens: Int[Tensor, "batch pos"], tap: Tap
) -> Float64[Tensor, "latent output"] | None:
    """Measure the map from a latent, through the gain of its norm, to what the tap reads; None without a latent.

    The norm's scale differs between vectors, so that unit vectors of the stream do not show the whole map.
    """
    name = _latent_hook(tap)
    if name is None:
        return None
    assert tap.latent is not None
    with running(model, bare=True) as p:
        (width,) = p.record(tokens[:1], [name], stop=spec.layer + 1)[name].shape[2:]
    n = width - (tap.latent.rotated if name == tap.shared else 0)
    size = sqrt(n)
    seen = _record_unit_vectors(model, spec, tokens, name, n, size, [tap.name])[tap.name]
    return seen.double().flatten(0, 1)[:n] / size


def _vectors(
    tap: Tap, expansion: Float64[Tensor, "latent output"] | None, seen: Recorded
) -> Float64[Tensor, "batch pos head d_head"]:
    """Read queries or keys, those behind a latent as if its norm had the scale 1 for each vector."""
    shared = None if tap.shared is None else seen[tap.shared].double()
    if expansion is None:
        return tap.read(seen[tap.name].double(), shared)
    latent = seen[_latent_hook(tap) or ""].double()[..., : len(expansion)]
    vectors: Tensor = tap.read(latent @ expansion, shared)
    return vectors


def query_key_taps(spec: AttentionSpec, *, before_norm: bool) -> dict[Side, Tap]:
    """Return where a layer's queries and keys are read, before or after any QK-norm.

    This also works for a layer whose scores they do not determine alone (ALiBi).
    """
    sizes = {"q": spec.n_heads, "k": spec.n_kv_heads}
    plain = {side: Tap(hook_name(spec.layer, f"hook_{side}"), "pos head", n) for side, n in sizes.items()}
    normed = {} if before_norm else {"q": spec.taps.q, "k": spec.taps.k}
    return {side: normed.get(side) or plain[side] for side in ("q", "k")}


def residual_hook(layer: int, when: str = "pre") -> str:
    """Return the hook of the residual stream before (or after, ``"post"``) a layer."""
    return f"blocks.{layer}.hook_resid_{when}"
