"""Queries and keys of a layer as an affine function of the residual stream with every norm's scale frozen.

A norm is linear once its scale is frozen: ``norm(x) = t · gain ∘ x`` (``x`` less its mean, for some), with one number t
for every vector. A pre-norm layer therefore makes a query of a vector x as ``s(x) · M x + bias``, and a QK-norm makes
``r · gain ∘ (s(x) · M x + bias)`` of it. ``M`` and the bias are measured by putting every unit vector and its negative
into the stream, which all have the same s. The s and r of a vector of a real text are fitted to its query, and checked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.forward import Hook, at_rest, hook_name, run
from tl_posdisent.models.reading.spec import AttentionSpec, Tap
from tl_posdisent.models.reading.tolerance import score_tolerance

Side = Literal["q", "k"]
_NAMES: dict[Side, str] = {"q": "queries", "k": "keys"}
_ROUNDS = 4


@dataclass(frozen=True)
class FrozenNorm:
    """A norm without its scale: ``v = t · gain ∘ u``, or of ``u`` less its mean.

    Attributes:
        gain: ``[head, size]``, of mean square 1 for every head.
        centred: whether the mean is subtracted first.
    """

    gain: Float64[Tensor, "head size"]
    centred: bool

    def linear(self, u: Float64[Tensor, "*batch head size"]) -> Float64[Tensor, "*batch head size"]:
        """``gain ∘ u``."""
        return self.gain * (u - u.mean(-1, keepdim=True) if self.centred else u)

    def scales(
        self, u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"]
    ) -> Float64[Tensor, "*batch head"]:
        """t of every vector, by least squares."""
        return _factor(self.linear(u), v, -1)

    def error(self, u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"]) -> float:
        """Largest difference of the norm's output from this form of it."""
        return float((self.scales(u, v)[..., None] * self.linear(u) - v).abs().amax())

    def makes(self, u: Tensor, v: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``v`` is this norm of ``u``, to the rounding of a model of this type."""
        return self.error(u, v) <= score_tolerance(dtype) * float(v.abs().amax())


def fit_norm(
    u: Float64[Tensor, "*batch head size"], v: Float64[Tensor, "*batch head size"], dtype: torch.dtype
) -> FrozenNorm | None:
    """Fit the norm that made ``v`` of ``u``; None if there is none with a gain and one scale for each vector.

    ``dtype`` is that of the model, whose rounding is allowed.
    """
    u, v = u.flatten(0, -3), v.flatten(0, -3)
    best = min((_fit(u, v, centred) for centred in (False, True)), key=lambda norm: norm.error(u, v))
    return best if best.makes(u, v, dtype) else None


def _fit(u: Tensor, v: Tensor, centred: bool) -> FrozenNorm:
    """``v / u`` is a table of rank one, gains times scales. Its medians are the scales, up to rounding, from which
    alternating least squares starts."""
    x = u - u.mean(-1, keepdim=True) if centred else u
    t = (v / x).abs().nanmedian(-1).values.nan_to_num(nan=0.0, posinf=0.0)
    for _ in range(_ROUNDS):
        gain = _factor(t[..., None] * x, v, 0)
        norm = gain.square().mean(-1, keepdim=True).sqrt()
        gain = torch.where(norm > 0, gain / norm, gain)
        t = _factor(gain * x, v, -1)
    return FrozenNorm(gain, centred)


def _factor(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """The number c for which ``c x`` is nearest to y, along an axis; 0 where x is 0."""
    size = x.square().sum(dim)
    return torch.where(size > 0, (x * y).sum(dim) / size, 0.0)


@dataclass(frozen=True)
class Readout:
    """How one layer makes its queries (or keys) from the residual stream.

    Attributes:
        side: queries or keys.
        source: the hook of the stream that they read.
        tap: where they are read, before the QK-norm if ``qk_norm`` is given.
        matrix: ``[head, d_head, d_model]``, up to a factor that is the same for all vectors.
        bias: ``[head, d_head]``.
        needed: the beginning of error messages, such as "distance_sources needs".
        qk_norm: the QK-norm; None without one.
    """

    side: Side
    source: str
    tap: Tap
    matrix: Float64[Tensor, "head d_head d_model"]
    bias: Float64[Tensor, "head d_head"]
    needed: str
    qk_norm: FrozenNorm | None = None

    @property
    def n_weights(self) -> int:
        """Weights of a token: one, or one for each head."""
        return 1 if self.qk_norm is None else len(self.qk_norm.gain)

    def linear(self, x: Float64[Tensor, "*batch d_model"]) -> Float64[Tensor, "*batch head d_head"]:
        """``M x``."""
        return torch.einsum("...m,hdm->...hd", x, self.matrix)

    def scales(
        self,
        spec: AttentionSpec,
        x: Float64[Tensor, "batch pos d_model"],
        seen: Float[Tensor, "batch pos head d_head"],
    ) -> Float64[Tensor, "batch pos 1 1"]:
        """The pre-norm's factor s for every vector of the stream, from the queries (or keys) ``seen``.

        Raises:
            ValueError: no factor gives them.
        """
        linear, wanted = self.linear(x), seen.double() - self.bias
        scale = _factor(linear.flatten(-2), wanted.flatten(-2), -1)[..., None, None]
        error, largest = (scale * linear - wanted).abs().amax(), seen.double().abs().amax()
        if not bool(error <= score_tolerance(seen.dtype) * largest):
            raise ValueError(
                f"{self.needed} {_NAMES[self.side]} that are an affine function of the residual stream at the norm's "
                f"actual scale, but in layer {spec.layer} of {spec.architecture} such a function differs from them by "
                f"{error.item():.1e} of {largest.item():.1e} (QK-norm, latent attention, no pre-norm, or hooks of "
                "your own between them)"
            )
        return scale

    def with_qk_norm(
        self,
        spec: AttentionSpec,
        plain: Float[Tensor, "batch pos head d_head"],
        seen: Float[Tensor, "batch pos head d_head"],
    ) -> Readout:
        """The same with the QK-norm, fitted to queries (or keys) before and after it.

        Raises:
            ValueError: ``seen`` is not ``plain`` after a norm with a gain and one scale for each vector.
        """
        if torch.equal(plain, seen):
            return self
        norm = fit_norm(plain.double(), seen.double(), seen.dtype) if plain.shape == seen.shape else None
        if norm is None:
            raise self._no_norm(spec)
        return replace(self, qk_norm=norm)

    def weights(
        self,
        spec: AttentionSpec,
        x: Float[Tensor, "batch pos d_model"],
        plain: Float[Tensor, "batch pos head d_head"],
        seen: Float[Tensor, "batch pos head d_head"],
    ) -> tuple[Float64[Tensor, "batch pos weight"], Float64[Tensor, "batch pos weight"]]:
        """The factors of a vector of the stream and of the bias: one for each token, with a QK-norm one per head.

        Args:
            spec: the layer.
            x: the residual stream.
            plain, seen: its queries or keys before and after any QK-norm, before rotation.

        Raises:
            ValueError: they are no such function of the stream.
        """
        scale = self.scales(spec, x.double(), plain)[..., 0]
        if self.qk_norm is None:
            return scale, torch.ones_like(scale)
        u, v = plain.double(), seen.double()
        if not self.qk_norm.makes(u, v, seen.dtype):
            raise self._no_norm(spec)
        own = self.qk_norm.scales(u, v)
        return scale * own, own

    def of_heads(self, heads: list[int]) -> Readout:
        """The same of some heads, in this order."""
        index = torch.tensor(heads, device=self.bias.device)
        norm = self.qk_norm and replace(self.qk_norm, gain=self.qk_norm.gain[index])
        return replace(self, matrix=self.matrix[index], bias=self.bias[index], qk_norm=norm)

    def vectors(self, sums: Float64[Tensor, "source weight d_model"]) -> Float64[Tensor, "source head d_head"]:
        """Queries or keys of weighted means of the stream, without the bias."""
        by_head = sums.expand(-1, len(self.matrix), -1)
        return self._normed(torch.einsum("shm,hdm->shd", by_head, self.matrix))

    def bias_vectors(self, weight: Float64[Tensor, "weight"]) -> Float64[Tensor, "head d_head"]:
        """Queries or keys of the bias, at its mean weight."""
        return self._normed(weight[:, None] * self.bias)

    def _normed(self, u: Tensor) -> Tensor:
        return u if self.qk_norm is None else self.qk_norm.linear(u)

    def _no_norm(self, spec: AttentionSpec) -> ValueError:
        return ValueError(
            f"{self.needed} {_NAMES[self.side]} that are those before the QK-norm times a gain and one number for each "
            f"token and head, but in layer {spec.layer} of {spec.architecture} they are not"
        )


def measure_readouts(
    model: Any, spec: AttentionSpec, tokens: Int[Tensor, "batch pos"], taps: dict[Side, Tap], needed: str
) -> dict[Side, Readout]:
    """Measure how a layer's queries and keys come from the stream, at these taps.

    Of the tokens only the length matters; ``needed`` begins error messages.

    Raises:
        ValueError: a layer whose queries or keys do not change with the residual stream.
    """
    found: dict[Side, Readout] = {}
    with at_rest(model):
        for layer in dict.fromkeys((spec.layer, 0)):  # some read their keys from the embedded input
            found = _responses(model, spec, residual_hook(layer), tokens, taps, needed) | found
            if len(found) == 2:
                return {side: found[side] for side in taps}
    raise ValueError(
        f"{needed} queries and keys that read the residual stream, but those of layer {spec.layer} "
        f"of {spec.architecture} do not change with {residual_hook(spec.layer)}"
    )


def _responses(
    model: Any,
    spec: AttentionSpec,
    source: str,
    tokens: Int[Tensor, "batch pos"],
    taps: dict[Side, Tap],
    needed: str,
) -> dict[Side, Readout]:
    """Of the queries and keys that change with the stream at ``source``: a pass over all unit vectors, and one over
    their negatives."""
    d_model, length = int(model.cfg.d_model), tokens.shape[1]
    size, texts = d_model**0.5, -(-d_model // length)  # of unit variance, as after a norm
    _require(model, [source, *(tap.name for tap in taps.values())], spec)
    answers = []
    for sign in (size, -size):
        seen: dict[str, Tensor] = {}

        def put(x: Tensor, hook: Any, sign: float = sign) -> Tensor:
            rows = sign * torch.eye(d_model, dtype=x.dtype, device=x.device)
            return rows[torch.arange(texts * length, device=x.device) % d_model].view(texts, length, d_model)

        listeners = [keep(tap.name, seen) for tap in taps.values()]
        run(model, tokens[:1].expand(texts, -1), [(source, put), *listeners], stop=spec.layer + 1)
        answers.append({side: tap.read(seen[tap.name]).double().flatten(0, 1)[:d_model] for side, tap in taps.items()})
    found = {}
    for side, tap in taps.items():
        plus, minus = (answer[side] for answer in answers)
        if not torch.equal(plus, minus):
            matrix = ((plus - minus) / (2 * size)).permute(1, 2, 0)
            found[side] = Readout(side, source, tap, matrix, (plus + minus).mean(0) / 2, needed)
    return found


def watch(
    model: Any, tokens: Int[Tensor, "batch pos"], spec: AttentionSpec, names: list[str]
) -> tuple[dict[str, Tensor], Float[Tensor, "batch head query key"], Bool[Tensor, "query key"]]:
    """Run once, under the model's own hooks, and return what fired at these hooks, the layer's scores and its mask."""
    seen: dict[str, Tensor] = {}
    scores: list[Tensor] = []
    _require(model, names, spec)
    with applied(model, [keep(name, seen) for name in dict.fromkeys(names)]):
        for_each_scores(model, tokens, [spec], lambda spec, x: scores.append(x))
    return seen, scores[0], spec.mask(tokens.shape[1], tokens.device)


def taps_of(spec: AttentionSpec, *, before_norm: bool) -> dict[Side, Tap]:
    """Where queries and keys of a layer are read, before or after any QK-norm; also in a layer whose scores they do
    not explain alone (ALiBi)."""
    sizes = {"q": spec.n_heads, "k": spec.n_kv_heads}
    plain = {side: Tap(hook_name(spec.layer, f"hook_{side}"), "pos head", n) for side, n in sizes.items()}
    normed = {} if before_norm else {"q": spec.q, "k": spec.k}
    return {side: normed.get(side) or plain[side] for side in ("q", "k")}


def residual_hook(layer: int) -> str:
    """The residual stream before a layer."""
    return f"blocks.{layer}.hook_resid_pre"


def keep(name: str, seen: dict[str, Tensor]) -> Hook:
    """A hook that keeps what passes."""

    def listen(x: Tensor, hook: Any) -> None:
        seen[name] = x.detach()

    return name, listen


def _require(model: Any, names: list[str], spec: AttentionSpec) -> None:
    missing = [name for name in names if name not in model.hook_dict]
    if missing:
        raise ValueError(f"model must have the hook {missing[0]}, which {spec.architecture} does not have")
