"""The affine map from the residual stream to the queries and keys of a layer, measured from outside.

A pre-norm layer makes a query of a vector x as ``s(x) · M x + bias``: the norm's gain, its centring and the projection
are in M, its offset and the projection's in the bias, and what the norm divides by in the number s. ``M`` and the bias
are found by putting every unit vector and its negative into the stream, which all have the same s. The s of a vector
of a real text is then the one number that takes ``M x`` to its query. Whether it does, is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.forward import Hook, at_rest, hook_name, run
from tl_posdisent.models.reading.observe import score_tolerance
from tl_posdisent.models.reading.spec import AttentionSpec, Tap

Side = Literal["q", "k"]


@dataclass(frozen=True)
class Reading:
    """How one layer's queries (or keys) come from the residual stream.

    Attributes:
        side: queries or keys.
        source: the hook of the stream that they read.
        tap: where they are read.
        matrix: ``[head, d_head, d_model]``, up to a factor that is the same for all vectors.
        bias: ``[head, d_head]``.
    """

    side: Side
    source: str
    tap: Tap
    matrix: Float64[Tensor, "head d_head d_model"]
    bias: Float64[Tensor, "head d_head"]

    def linear(self, x: Float64[Tensor, "*batch d_model"]) -> Float64[Tensor, "*batch head d_head"]:
        """``M x``."""
        return torch.einsum("...m,hdm->...hd", x, self.matrix)

    def scales(
        self,
        spec: AttentionSpec,
        x: Float64[Tensor, "batch pos d_model"],
        seen: Float[Tensor, "batch pos head d_head"],
        needed: str = "content and position need",
    ) -> Float64[Tensor, "batch pos 1 1"]:
        """The norm's factor for every vector of the stream, from the queries (or keys) that it gave.

        Raises:
            ValueError: no such factor gives them; ``needed`` begins the message.
        """
        linear, wanted = self.linear(x), seen.double() - self.bias
        size = linear.square().sum((-2, -1), keepdim=True)
        scale = torch.where(size > 0, (linear * wanted).sum((-2, -1), keepdim=True) / size, 0.0)
        error, largest = (scale * linear - wanted).abs().amax(), seen.double().abs().amax()
        if not bool(error <= score_tolerance(seen.dtype) * largest):
            name = {"q": "queries", "k": "keys"}[self.side]
            raise ValueError(
                f"{needed} {name} that are an affine function of the residual stream at the norm's "
                f"actual scale, but in layer {spec.layer} of {spec.architecture} such a function misses them by "
                f"{error.item():.1e} of {largest.item():.1e} (QK-norm, latent attention, no pre-norm, or hooks of "
                "your own between them)"
            )
        return scale


def residual_hook(layer: int) -> str:
    """The residual stream before a layer."""
    return f"blocks.{layer}.hook_resid_pre"


def measure_readings(
    model: Any,
    spec: AttentionSpec,
    tokens: Int[Tensor, "batch pos"],
    taps: dict[Side, Tap] | None = None,
    needed: str = "content and position need",
) -> tuple[Reading, Reading]:
    """What queries and keys of a layer read; of the tokens only the length matters.

    Args:
        model, spec, tokens: what is run.
        taps: where queries and keys are read; default after any QK-norm.
        needed: how the message begins.

    Raises:
        ValueError: a layer whose queries or keys do not move with the residual stream.
    """
    found: dict[Side, Reading] = {}
    with at_rest(model):
        for layer in dict.fromkeys((spec.layer, 0)):  # some read their keys from the embedded input
            answers = _responses(model, spec, residual_hook(layer), tokens, taps)
            for reading in answers:
                found.setdefault(reading.side, reading)
            if len(found) == 2:
                return found["q"], found["k"]
    raise ValueError(
        f"{needed} queries and keys that read the residual stream, but those of layer {spec.layer} "
        f"of {spec.architecture} do not change with {residual_hook(spec.layer)}"
    )


def _responses(
    model: Any,
    spec: AttentionSpec,
    source: str,
    tokens: Int[Tensor, "batch pos"],
    taps: dict[Side, Tap] | None,
) -> list[Reading]:
    """Those of queries and keys that move with the stream at ``source``: a pass over all unit vectors, and one over
    their negatives."""
    d_model, length = int(model.cfg.d_model), tokens.shape[1]
    size, texts = d_model**0.5, -(-d_model // length)  # of unit variance, as after a norm
    taps = taps or {side: tap_of(spec, side) for side in ("q", "k")}
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
    readings = []
    for side, tap in taps.items():
        plus, minus = (answer[side] for answer in answers)
        if not torch.equal(plus, minus):
            matrix = ((plus - minus) / (2 * size)).permute(1, 2, 0)
            readings.append(Reading(side, source, tap, matrix, (plus + minus).mean(0) / 2))
    return readings


def watch(
    model: Any, tokens: Int[Tensor, "batch pos"], spec: AttentionSpec, names: list[str]
) -> tuple[dict[str, Tensor], Float[Tensor, "batch head query key"], Bool[Tensor, "query key"]]:
    """One pass: what fired at these hooks, the layer's scores and its mask.

    Hooks that the model has act on all of it. Padded texts are refused.
    """
    seen: dict[str, Tensor] = {}
    scores: list[Tensor] = []
    _require(model, names, spec)
    with applied(model, [keep(name, seen) for name in dict.fromkeys(names)]):
        for_each_scores(model, tokens, [spec], lambda spec, x: scores.append(x))
    return seen, scores[0], spec.mask(tokens.shape[1], tokens.device)


def tap_of(spec: AttentionSpec, side: Side) -> Tap:
    """Where queries or keys are read, also in a layer whose scores they do not explain alone (ALiBi)."""
    return (spec.q if side == "q" else spec.k) or plain_tap(spec, side)


def plain_tap(spec: AttentionSpec, side: Side) -> Tap:
    """Where queries or keys are read before any QK-norm."""
    n_heads = spec.n_heads if side == "q" else spec.n_kv_heads
    return Tap(hook_name(spec.layer, f"hook_{side}"), "pos head", n_heads)


def keep(name: str, seen: dict[str, Tensor]) -> Hook:
    """A hook that keeps what passes."""

    def listen(x: Tensor, hook: Any) -> None:
        seen[name] = x.detach()

    return name, listen


def _require(model: Any, names: list[str], spec: AttentionSpec) -> None:
    missing = [name for name in names if name not in model.hook_dict]
    if missing:
        raise ValueError(f"model must have the hook {missing[0]}, and this {spec.architecture} has not")
