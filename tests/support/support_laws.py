"""Laws of every tool, tried on one model: a tool obeys them, or it refuses the model.

``docs/support_table.py`` writes the table of support from what they find.

The laws hold for any model: an intervention with the real positions changes nothing, a fit is that of dense least
squares, an ablation is that of zeros in the attention's output, and a text in a padded batch gives what it gives alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.patching import component_patching, head_patching, position_patching
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.frequencies import limit_frequencies
from tl_posdisent.hooks.knock_out import knock_out
from tl_posdisent.hooks.lambda_mask import lambda_mask
from tl_posdisent.hooks.patch import MovedComponent, patch_vectors
from tl_posdisent.hooks.phase_noise import phase_noise
from tl_posdisent.hooks.positions import dummy_distance, position_interpolation, remap_distance, swap_positions
from tl_posdisent.hooks.score_components import drop_component
from tl_posdisent.hooks.substitute import substitute_additive, substitute_attention
from tl_posdisent.models.capture import capture, for_each_scores
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, Recorded, running
from tl_posdisent.models.running.model_parts import device_of, hook_name
from tl_posdisent.models.running.texts import ordinary_ids, special_id

TOLERANCE = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest relative error that rounding explains, by the dtype of the model. Rotation tables are float32 at best."""

WHOLE, PADDED = "whole", "padded"
"""The texts on which laws are tried: of equal length, and in a batch that is padded on either side."""

Law = tuple[str, float]
"""What must be equal, and its error relative to the largest number that is compared; 1 for an absent effect."""


def try_laws(model: Any, tools: Sequence[str] | None = None, *, length: int = 12) -> pd.DataFrame:
    """Try the laws of these tools (default all) on random texts of ``length`` tokens.

    ``model`` may be a reading of some layers: the laws are then those of these layers.

    Returns:
        One row per tool and text (only one for a tool that refuses the whole text): ``tool``; ``text``, ``"whole"`` or
        ``"padded"``; ``verdict``: ``"works"``, ``"refused"`` (by a ``ValueError``) or ``"wrong"``; ``error``, the
        largest relative error of the laws, NaN where refused; ``reason``: the law that fails, or the refusal.
    """
    reading = read_model(model)
    ids = ordinary_ids(reading.model)
    drawn = torch.randint(0, len(ids), (2, length), generator=torch.Generator().manual_seed(0))
    trial = Trial(reading, ids[drawn].to(device_of(reading.model)))
    rows: list[dict[str, Any]] = []
    for tool in TOOLS if tools is None else tools:
        for text, laws in _laws(tool, trial):
            rows.append({"tool": tool, "text": text, **_verdict(laws, tolerance_of(reading.model))})
            if rows[-1]["verdict"] == "refused":
                break  # padded it would be refused again
    return pd.DataFrame(rows, columns=["tool", "text", "verdict", "error", "reason"])


def tolerance_of(model: Any) -> float:
    """The largest relative error that rounding explains in the narrowest dtype of the model."""
    return max(TOLERANCE[dtype] for dtype in {p.dtype for p in model.parameters()})


def one_layer(reading: ModelReading, layer: int) -> ModelReading:
    """The reading of a model in which only this layer has attention that tools may use."""
    return replace(reading, attention=tuple(spec for spec in reading.attention if spec.layer == layer))


def _laws(tool: str, trial: Trial) -> Iterator[tuple[str, Iterator[Law]]]:
    yield WHOLE, TOOLS[tool](trial)
    if tool == "additivity":
        yield PADDED, _padded_table(trial)
    if tool in INTERVENTIONS:
        yield PADDED, _padded_logits(trial, INTERVENTIONS[tool].changes)


def _verdict(laws: Iterator[Law], tolerance: float) -> dict[str, Any]:
    """Try a tool's laws; a ValueError is its refusal."""
    worst, reason = 0.0, ""
    try:
        for what, error in laws:
            if not error <= worst:  # NaN is worse than anything
                worst, reason = error, what
    except ValueError as error:
        return {"verdict": "refused", "error": float("nan"), "reason": " ".join(str(error).split())}
    wrong = not worst <= tolerance
    return {"verdict": "wrong" if wrong else "works", "error": worst, "reason": reason if wrong else ""}


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, a text that it reads, and what the laws compare."""

    reading: ModelReading
    tokens: Int[Tensor, "batch pos"]
    mask: Int[Tensor, "batch pos"] | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The first layer that rotates, or else the first that attends."""
        return next((spec for spec in self.reading.attention if spec.rotary is not None), self.reading.attention[0])

    @property
    def layer(self) -> int:
        return self.spec.layer

    @property
    def head(self) -> int:
        """The head on which tools for single heads are tried."""
        return min(1, self.spec.n_heads - 1)

    @cached_property
    def plain(self) -> Tensor:
        """The logits without hooks."""
        return self.logits([])

    def logits(self, hooks: Sequence[Hook]) -> Tensor:
        """Compute the logits on the text under hooks, all of which must fire."""
        model = self.reading.model
        options = {} if self.mask is None else {"attention_mask": self.mask}
        with torch.no_grad(), running(model), applied(model, hooks):
            logits: Tensor = model(self.tokens, **options)
        return logits

    @cached_property
    def _last(self) -> dict[Callable[[Trial], list[Hook]], tuple[list[Hook], Tensor]]:
        return {}

    def under(self, make: Callable[[Trial], list[Hook]]) -> tuple[list[Hook], Tensor]:
        """Return the hooks that ``make`` returns and the logits under them.

        They are computed once for consecutive laws, and kept for the last ``make`` only, since logits can be large.
        """
        if make not in self._last:
            self._last.clear()
            hooks = make(self)
            self._last[make] = hooks, self.logits(hooks)
        return self._last[make]

    def metric(self, hooks: list[Hook]) -> Tensor:
        return _metric(self.logits(hooks), self.tokens).mean()

    def held(self, layer: int, name: str, hooks: Sequence[Hook] = ()) -> Tensor:
        """Return the tensor at a hook of a layer's attention, under other hooks."""
        seen = Recorded()
        self.logits([*hooks, *seen.hooks([hook_name(layer, name)])])
        return seen[hook_name(layer, name)]

    @cached_property
    def alone(self) -> list[Trial]:
        """Two texts to be padded: the first, and two thirds of the second."""
        short = self.tokens.shape[1] * 2 // 3
        return [Trial(self.reading, self.tokens[:1]), Trial(self.reading, self.tokens[1:, :short])]

    @cached_property
    def padded(self) -> dict[str, Trial]:
        """By side of the padding: these two as a batch."""
        fill, rows = special_id(self.reading.model, "pad") or 0, [text.tokens[0] for text in self.alone]

        def batch(side: str) -> Trial:
            pad = partial(pad_sequence, batch_first=True, padding_side=side)
            return Trial(self.reading, pad(rows, padding_value=fill), pad([torch.ones_like(x) for x in rows]))

        return {side: batch(side) for side in ("left", "right")}


# --- comparisons ------------------------------------------------------------------------------------------------------


def _gap(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest expected number."""
    a, b = (torch.as_tensor(x, device="cpu").double() for x in (got, expected))
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def _metric(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute a random linear combination of all logits of a text, of the size of one logit."""
    weights = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(5)).to(logits)
    result: Tensor = (logits.detach() * weights).double().flatten(1).sum(1) / weights.numel() ** 0.5
    return result


def _set_z(trial: Trial, layer: int, new: Tensor | None) -> list[Hook]:
    """Hooks that replace the result of one head by that of another tensor, or by zeros.

    The results of all heads lie side by side: a hook may show them split by another head size.
    """

    def replace_head(z: Tensor, hook: Any) -> Tensor:
        beside = z.flatten(2).clone()
        size = beside.shape[2] // trial.spec.n_heads
        of_head = slice(trial.head * size, (trial.head + 1) * size)
        beside[:, :, of_head] = 0 if new is None else new.flatten(2)[:, :, of_head]
        return beside.reshape(z.shape)

    return [(hook_name(layer, "hook_z"), replace_head)]


# --- tables -----------------------------------------------------------------------------------------------------------


def _additivity(trial: Trial) -> Iterator[Law]:
    """r² is that of least squares with a column for every distance, query and key."""
    table = additivity(trial.reading, trial.tokens, progress=False)
    errors: dict[int, float] = {}

    def compare(spec: AttentionSpec, scores: Tensor) -> None:
        i, j = spec.mask(scores.shape[-1], scores.device).nonzero(as_tuple=True)
        y = scores[..., i, j].double().flatten(0, 1).T
        y = y - y.mean(0)
        ones = torch.eye(2 * scores.shape[-1], dtype=torch.float64, device=y.device)
        columns = torch.cat([ones[i - j], ones[i], ones[j]], 1)
        left = y - columns @ (torch.linalg.pinv(columns) @ y)
        rows = table.query(f"layer == {spec.layer}").sort_values(["batch", "head"])
        errors[spec.layer] = _gap(rows["r2"].tolist(), 1 - left.var(0) / y.var(0))

    for_each_scores(trial.reading.model, trial.tokens, trial.reading.attention, compare)
    yield "r2 is that of dense least squares", max(errors.values())


def _padded_table(trial: Trial) -> Iterator[Law]:
    tables = [additivity(trial.reading, text.tokens, progress=False) for text in trial.alone]
    for side, batch in trial.padded.items():
        together = additivity(trial.reading, batch.tokens, attention_mask=batch.mask, progress=False)
        for n, table in enumerate(tables):
            alone = table.select_dtypes("number").drop(columns="batch")
            rows = together.loc[together["batch"] == n, alone.columns]
            error = max(_gap(rows[name].tolist(), alone[name].tolist()) for name in alone)
            yield f"a text in a batch padded on the {side}", error


def _capture(trial: Trial) -> Iterator[Law]:
    for layer in capture(trial.reading, trial.tokens):
        inside = layer.spec.mask(trial.tokens.shape[1], layer.q.device)
        scores = layer.spec.score(layer.q_rot, layer.k_rot)
        yield "scores follow from rotated queries and keys", _gap(scores[..., inside], layer.scores[..., inside])


def _controlled_distance(trial: Trial) -> Iterator[Law]:
    table = controlled_distance(trial.reading, trial.tokens, progress=False)
    for layer in capture(trial.reading, trial.tokens, layers=table["layer"].unique().tolist()):
        spec = replace(layer.spec, soft_cap=None)
        q, k = (x.double().flatten(0, 1)[None] for x in (layer.q, layer.k))  # every query with every key of all texts
        ones = torch.ones(q.shape[1], device=q.device)
        keys = spec.rotated(k, 0 * ones)
        scores = [spec.score(spec.rotated(q, d * ones), keys) for d in range(trial.tokens.shape[1])]
        variance = torch.stack(scores).movedim(2, 0).flatten(1).var(1, correction=0)
        rows = table.query(f"layer == {layer.layer}")
        yield "the variance is that of all scores at all distances", _gap(rows["total"].tolist(), variance)


def _value(trial: Trial, layer: int, tool: Callable[..., pd.DataFrame], *arguments: Any, **options: Any) -> float:
    """Look up the value of one head in a table of single heads."""
    options |= {"metric": _metric, "layers": [layer], "heads": [trial.head], "progress": False}
    return float(tool(trial.reading, trial.tokens, *arguments, **options)["value"][0])


def _head_ablation(trial: Trial) -> Iterator[Law]:
    for spec in trial.reading.attention:
        value = _value(trial, spec.layer, head_ablation)  # first, as it may refuse what hooks by hand cannot do either
        zeros = trial.metric(_set_z(trial, spec.layer, None))
        yield "the value is that without the head", _gap(value, zeros)


def _head_patching(trial: Trial) -> Iterator[Law]:
    layer, source = trial.reading.attention[-1].layer, Trial(trial.reading, trial.tokens.flip(1))
    value = _value(trial, layer, head_patching, source.tokens)
    by_hand = trial.metric(_set_z(trial, layer, source.held(layer, "hook_z")))
    yield "z of another text, put in by hand", _gap(value, by_hand)


def _position_patching(trial: Trial) -> Iterator[Law]:
    """Patching the first rotary layer equals excluding it from the intervention: nothing before it has positions."""
    order = torch.arange(trial.tokens.shape[1]).flip(0)
    everywhere = swap_positions(trial.reading, order)  # refuses what position_patching refuses
    first, *behind = [spec.layer for spec in trial.reading.attention if spec.rotary is not None]
    rest = swap_positions(trial.reading, order, layers=behind) if behind else []
    options: dict[str, Any] = {"what": "layer", "layers": [first], "progress": False}
    table = position_patching(trial.reading, trial.tokens, order, _metric, **options)
    yield "a layer left alone", _gap(table["value"][0], trial.metric(rest))
    yield "other positions", _gap(table["corrupted"][0], trial.metric(everywhere))


def _component_patching(trial: Trial) -> Iterator[Law]:
    layer, source = trial.reading.attention[-1].layer, trial.tokens.flip(1)
    whole = _value(trial, layer, component_patching, get_args(MovedComponent), source=source)
    pattern = _value(trial, layer, head_patching, source, activation="pattern")
    yield "all components are another text's pattern", _gap(whole, pattern)


# --- interventions ----------------------------------------------------------------------------------------------------


def _curved(index: Tensor, n: int) -> Tensor:
    """Positions from 0 to ``n`` with unequal steps, so that they show whether each text begins at 0."""
    return index**2 / n


def _distances(trial: Trial) -> Tensor:
    n = trial.tokens.shape[1]
    at = _curved(torch.arange(n, dtype=torch.float64, device=trial.tokens.device), n)
    return at[:, None] - at


class InterventionLaws(NamedTuple):
    """Hooks on a trial that must change the logits; that must change nothing; that do the first by other means."""

    changes: Callable[[Trial], list[Hook]]
    nothing: Callable[[Trial], list[Hook]] | None = None
    twice: Callable[[Trial], list[Hook]] | None = None


INTERVENTIONS: dict[str, InterventionLaws] = {
    "swap_positions": InterventionLaws(
        lambda t: swap_positions(t.reading, partial(_curved, n=t.tokens.shape[1])),
        lambda t: swap_positions(t.reading, lambda index: index + 7),
        lambda t: remap_distance(t.reading, _distances(t)),
    ),
    "dummy_distance": InterventionLaws(
        lambda t: dummy_distance(t.reading, 3), twice=lambda t: remap_distance(t.reading, lambda d: 0 * d + 3)
    ),
    "remap_distance": InterventionLaws(
        lambda t: remap_distance(t.reading, lambda d: d.clamp(max=3)),
        lambda t: remap_distance(t.reading, lambda d: d, heads=[t.head]),
    ),
    "limit_frequencies": InterventionLaws(
        lambda t: limit_frequencies(t.reading, high=0.0), lambda t: limit_frequencies(t.reading, high=1e9)
    ),
    "phase_noise": InterventionLaws(lambda t: phase_noise(t.reading, 0.5), lambda t: phase_noise(t.reading, 0.0)),
    "position_interpolation": InterventionLaws(
        lambda t: position_interpolation(t.reading, 2),
        lambda t: position_interpolation(t.reading, 1),
        lambda t: swap_positions(t.reading, lambda index: index / 2),
    ),
    "lambda_mask": InterventionLaws(
        lambda t: lambda_mask(t.reading, 1, 4, 4), lambda t: lambda_mask(t.reading, 1, 10**6, 10**6)
    ),
    "ablate_heads": InterventionLaws(
        lambda t: ablate_heads(t.reading, [(t.layer, t.head)]), twice=lambda t: _set_z(t, t.layer, None)
    ),
    "drop_component": InterventionLaws(lambda t: drop_component(t.reading, "distance")),
    "substitute_additive": InterventionLaws(
        lambda t: substitute_additive(t.reading),
        lambda t: substitute_additive(t.reading, ("distance", "query", "key", "residual")),
    ),
    "substitute_attention": InterventionLaws(
        lambda t: substitute_attention(t.reading, "additive", heads=[(t.layer, t.head)]),
        lambda t: substitute_attention(t.reading, "untouched"),
    ),
}


def _intervention(of: InterventionLaws, trial: Trial) -> Iterator[Law]:
    if of.nothing:
        yield "what should change nothing", _gap(trial.logits(of.nothing(trial)), trial.plain)
    _, changed = trial.under(of.changes)
    yield "what should change something", float(torch.equal(changed, trial.plain))
    if of.twice:
        yield "two ways to the same", _gap(trial.logits(of.twice(trial)), changed)


def _padded_logits(trial: Trial, make: Callable[[Trial], list[Hook]]) -> Iterator[Law]:
    edits, _ = trial.under(make)
    parameters = inspect.signature(trial.reading.model.forward).parameters.values()
    if not any(p.name == "attention_mask" or p.kind == p.VAR_KEYWORD for p in parameters):
        raise ValueError(f"{type(trial.reading.model).__name__} takes no attention_mask")
    expected = [text.logits(edits)[0] for text in trial.alone]
    for side, batch in trial.padded.items():
        together, mask = batch.logits(edits), batch.mask
        for n, text in enumerate(trial.alone):
            real = slice(None) if mask is None else mask[n].bool()
            if _gap(batch.plain[n][real], text.plain[0]) > tolerance_of(trial.reading.model):
                raise ValueError(f"the model itself gives other logits in a batch padded on the {side}")
            yield f"a text in a batch padded on the {side}", _gap(together[n][real], expected[n])


def _some_heads(trial: Trial) -> Iterator[Law]:
    hooks = dummy_distance(trial.reading, 3, layers=[trial.layer], heads=[trial.head])
    name, axis = (
        ("hook_pattern", 1) if trial.spec.limits.scores_editable else ("hook_z", 2)
    )  # some norm z over all heads
    before = trial.held(trial.layer, name, []).movedim(axis, 0)
    after = trial.held(trial.layer, name, hooks).movedim(axis, 0)
    others = [h for h in range(trial.spec.n_heads) if h != trial.head]
    if others:
        yield "the other heads stay", _gap(after[others], before[others])
    yield "the head changes", float(torch.equal(after[trial.head], before[trial.head]))


def _patch_vectors(trial: Trial) -> Iterator[Law]:
    layer = capture(trial.reading, trial.tokens, layers=[trial.layer])[0]
    hooks = patch_vectors(trial.reading, trial.layer, layer.q_rot, layer.k_rot)
    yield "its own rotated vectors change nothing", _gap(trial.logits(hooks), trial.plain)


def _knock_out(trial: Trial) -> Iterator[Law]:
    length, key = trial.tokens.shape[1], 3
    nothing = knock_out(trial.reading, cells=torch.zeros(length, length, dtype=torch.bool))
    yield "what should change nothing", _gap(trial.logits(nothing), trial.plain)
    hooks = knock_out(trial.reading, range(key + 1, length), key)
    yield "what should change something", float(torch.equal(trial.logits(hooks), trial.plain))
    first = trial.reading.attention[0].layer
    if first == 0:  # what reaches a later layer may carry the token of the hidden key
        other = trial.tokens.clone()
        other[:, key] = trial.tokens[:, key].flip(0)
        results = [Trial(trial.reading, x).held(first, "hook_z", hooks)[:, key + 1 :] for x in (trial.tokens, other)]
        yield "heads do not see the token of a hidden key", _gap(*results)


TOOLS: dict[str, Callable[[Trial], Iterator[Law]]] = {
    "additivity": _additivity,
    "capture": _capture,
    "controlled_distance": _controlled_distance,
    **{name: partial(_intervention, intervention) for name, intervention in INTERVENTIONS.items()},
    "single heads": _some_heads,
    "patch_vectors": _patch_vectors,
    "knock_out": _knock_out,
    "head_ablation": _head_ablation,
    "head_patching": _head_patching,
    "position_patching": _position_patching,
    "component_patching": _component_patching,
}
"""Every tool, and its laws on a text without padding."""

ACTS: dict[str, tuple[str, ...]] = {
    "fits": ("additivity",),
    "capture": ("capture",),
    "rotation": (
        *("controlled_distance", "swap_positions", "dummy_distance", "remap_distance", "limit_frequencies"),
        *("phase_noise", "position_interpolation", "lambda_mask", "single heads", "patch_vectors", "position_patching"),
    ),
    "score_edits": ("knock_out", "drop_component", "substitute_additive", "substitute_attention", "component_patching"),
    "result_edits": ("ablate_heads", "head_ablation", "head_patching"),
}
"""The tools for which each column of ``read_model(model).to_frame()`` speaks."""
