"""The law of interventions on a layer of a model: what its heads gather is attention summed by hand in float64.

A subject is a layer with the calls of every tool that fit it, and the oracle's results. One pass of the model carries
as many sets of calls as the layer has heads: each head gets a set of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent import capture, hooks, read_model
from tl_posdisent.hooks.hook_list import Hooks, joined
from tl_posdisent.models import ModelReading

from . import zoo
from .edited_scores import Call, Layer, edited_results, edited_scores
from .intervention_cases import BROKEN, TOKENS, UNORDERED, hooks_of
from .intervention_cases import L as LENGTH
from .tolerance import TIMES, rounding

REFERENCE = zoo.random_tokens(9, 3, seed=5)
TABLE = 40 * torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NOISE = torch.randn(LENGTH, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CELLS = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.3
CELLS.fill_diagonal_(False)

NO_HOOKS = Hooks([])

ROTATION = {"positions", "distances", "ceiling", "factor", "band", "noise", "q_rot", "k_rot"}
FIELD = {
    "swap_positions": "positions",
    "dummy_distance": "distances",
    "remap_distance": "distances",
    "position_interpolation": "factor",
    "limit_frequencies": "band",
    "phase_noise": "noise",
    "knock_out": "hide",
    "substitute_additive": "scores",
    "substitute_attention": "scores",
    "drop_component": "scores",
    "component_patching": "scores",
    "ablate_heads": "z",
}


def fields(call: Call) -> set[str]:
    """What a call sets of a head."""
    if call.tool == "patch_vectors":
        return {side for side in ("q_rot", "k_rot") if call[side] is not None}
    if call.tool == "lambda_mask":
        return {"hide"} if call.get("distance_ceiling") is None else {"hide", "ceiling"}
    return {FIELD[call.tool]}


def conflict(a: Call, b: Call) -> bool:
    """Whether two calls on one head are refused: they set one field, or one takes the place of what the other sets.

    Only what is hidden unites. Patched vectors have positions of their own, and logits that replace the scores do not
    depend on the rotation.
    """
    one, other = fields(a), fields(b)
    where = {"positions", "distances"}
    return bool(
        (one & other) - {"hide"}
        or (one & where and other & where)
        or any(
            (x & {"q_rot", "k_rot"} and y & {"distances", "ceiling"}) or (_replaces_scores(call) and y & ROTATION)
            for call, x, y in ((a, one, other), (b, other, one))
        )
    )


def _replaces_scores(call: Call) -> bool:
    return call.get("axes") == "two" or call.get("by") in ("uniform", "first_token")


class Subject:
    """A layer of a model in two texts: what it is, the calls that it can be given, and the oracle's results.

    ``seen`` are the cells ``[query, key]`` of the texts' own mask, in place of the layer's; ``under`` are other hooks,
    on earlier layers or other tensors.
    """

    def __init__(self, model: Any, layer: int, *, seen: Tensor | None = None, under: list[Any] = NO_HOOKS) -> None:
        self.reading: ModelReading = read_model(model)
        self.layer, self.seen, self.under = layer, seen, under
        (self.spec,) = self.reading.specs([layer])
        self.texts = {tokens: self._read(tokens) for tokens in (TOKENS, REFERENCE)}
        self.here = self.texts[TOKENS]
        self.z_is_gated = False
        self.plain = self.results()
        if self.spec.taps.scores is not None:
            self.z_is_gated = bool((self.plain - self.expected([])).abs().max() > self.tolerance)
            self.plain = self.results()

    def _read(self, tokens: Tensor) -> Layer:
        spec, taps = self.spec, self.spec.taps
        assert taps.v is not None
        shown = self._shown(tokens, [], [x for x in (taps.v.name, taps.gate and taps.gate.name, taps.scores) if x])
        v = taps.v.read(shown[taps.v.name])
        v = v if v.shape[1] == tokens.shape[1] else v.transpose(1, 2)
        if spec.scale is None:  # scores that are not products of queries and keys
            assert taps.scores is not None
            q = k = v
            own = shown[taps.scores]
        else:
            with hooks.applied(self.reading.model, self.under):
                captured = capture(self.reading, tokens, layers=[self.layer])[0]
            q, k, own = captured.q, captured.k, None
        part = self.reading.model.blocks[self.layer].attn
        sinks = getattr(getattr(part, "original_component", part), "sinks", None)
        return Layer(
            *(spec, q, k, v),
            sinks=None if sinks is None else sinks.detach(),
            seen=self.seen if tokens is TOKENS else None,
            own=own,
            gate=None if taps.gate is None else taps.gate.read(shown[taps.gate.name]),
        )

    @property
    def _z(self) -> str:
        assert self.spec.taps.z is not None
        return self.spec.taps.z

    def _by_head(self, z: Tensor) -> Tensor:
        return z.flatten(2).unflatten(2, (self.spec.n_heads, -1)).transpose(1, 2)

    def _shown(self, tokens: Tensor, made: list[Any], names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors at hooks of the model in a pass under other hooks."""
        model, options = self.reading.model, {}
        if self.seen is not None and tokens is TOKENS:
            dtype = next(model.parameters()).dtype
            mask = torch.zeros(len(TOKENS), 1, LENGTH, LENGTH, dtype=dtype)
            options["attention_mask"] = mask.masked_fill(~self.seen, torch.finfo(dtype).min)
        with torch.no_grad(), hooks.applied(model, self.under + made):
            return dict(model.run_with_cache(tokens, names_filter=list(names), **options)[1])

    def results(self, made: list[Any] = NO_HOOKS) -> Tensor:
        """What every head gathers under hooks, ``[batch, head, pos, d_head]``, before a gate that has no hook."""
        if not self.z_is_gated:
            return self._by_head(self._shown(TOKENS, made, [self._z])[self._z])
        assert self.spec.taps.pattern is not None
        pattern = self._shown(TOKENS, made, [self.spec.taps.pattern])[self.spec.taps.pattern]
        return pattern @ self.here.of(range(self.spec.n_heads))[2].transpose(1, 2).to(pattern.dtype)

    def expected(self, calls: Sequence[Call]) -> Tensor:
        """The same by the oracle."""
        return edited_results(self.here, calls, self.texts.__getitem__)

    @property
    def tolerance(self) -> float:
        """An error of a score, a sum of ``d_head`` products, is that share of the attention, twice.

        In 16 bits that bound says nothing, since scores err by more than 1; there it is that of the unedited results.
        """
        dtype, values = self.here.v.dtype, self.here.v.abs().max()
        if torch.finfo(dtype).bits == 16:
            return TIMES * float((self.plain - self.expected([])).abs().max())
        largest = edited_scores(self.here, []).nan_to_num(neginf=0).abs().max()
        values = values if self.here.gate is None else values * self.here.gate.abs().max()
        of_score = rounding(largest.clamp_min(1), self.spec.d_head**0.5, dtype)
        return (2 * of_score + rounding(1.0, LENGTH**0.5, dtype)) * float(values)

    def hooks_of(self, call: Call) -> Hooks:
        """What the tool returns for this layer."""
        if "reference" in call.arguments:  # which the model runs on
            with hooks.applied(self.reading.model, self.under):
                return hooks_of(self.reading, call, [self.layer])
        return hooks_of(self.reading, call, [self.layer])

    def calls(self) -> list[Call]:
        """A call of each tool, and of each of its variants, that the layer takes."""
        calls = [*self._on_scores(), *([] if self.z_is_gated else _ON_RESULTS)]
        if self.spec.rotary is not None:
            calls += self._on_rotation(self.spec.rotary)
        return calls

    def _on_scores(self) -> Iterator[Call]:
        cells = CELLS if self.seen is None else CELLS & (self.seen.sum(-1, keepdim=True) > 3)
        yield Call("knock_out", queries=[3, 4, -1], keys=[0, 2])
        yield Call("knock_out", cells=cells)
        yield Call("substitute_attention", by="uniform")
        yield Call("substitute_attention", by="distance+sink")
        yield Call("substitute_additive")
        yield Call("drop_component", component="key")
        if self.spec.scale is not None:
            yield Call("component_patching", scores=self._another().scores, component="distance")

    def _another(self) -> Any:
        with hooks.applied(self.reading.model, self.under):
            return capture(self.reading, TOKENS.flip(1), layers=[self.layer])[0]

    def _on_rotation(self, rotary: Any) -> Iterator[Call]:
        middle, other = float(rotary.frequencies.abs().median()), self._another()
        yield Call("swap_positions", positions=UNORDERED)
        yield Call("swap_positions", positions=BROKEN)
        yield Call("dummy_distance", distance=5)
        yield Call("remap_distance", distances=TABLE)
        yield Call("position_interpolation", factor=3)
        yield Call("limit_frequencies", low=middle)
        yield Call("limit_frequencies", low=middle, mode="freeze")
        yield Call("limit_frequencies", low=middle, mode="freeze", side="inside")
        if rotary.dim < self.spec.d_head:
            yield Call("limit_frequencies", low=middle, unrotated="drop")
        yield Call("phase_noise", noise=0.7)
        yield Call("phase_noise", noise=NOISE[:, : len(rotary.frequencies)])
        yield Call("patch_vectors", q_rot=other.q_rot, k_rot=None, keys="head")
        yield Call("patch_vectors", q_rot=None, k_rot=other.k_rot, keys="head")
        yield Call("lambda_mask", sinks=1, window=4, distance_ceiling=2)
        yield Call("lambda_mask", sinks=2, window=5)
        if self.seen is None:  # these need distances forwards
            yield Call("remap_distance", distances=lambda d: d.clamp(max=2))
            yield Call("remap_distance", distances=torch.log1p)
            yield Call("substitute_additive", axes="two")

    def variants(self) -> Iterator[Call]:
        """Further calls, to be tried alone."""
        for rung in ("distance", "additive", "first_token", *(["static"] if self.spec.scale is not None else [])):
            yield Call("substitute_attention", by=rung)
        for part in ("distance", "query", "residual"):
            yield Call("drop_component", component=part)
        for keep in ((), ("distance",), ("residual", "query")):
            yield Call("substitute_additive", keep=keep)
        if self.spec.rotary is None:
            return
        generator, other, n = torch.Generator().manual_seed(2), self._another(), len(self.spec.rotary.frequencies)
        for scale, shape in ((50_000, (self.spec.n_heads, LENGTH, LENGTH)), (20, (2, 1, LENGTH, LENGTH))):
            table = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            yield Call("remap_distance", distances=table.masked_fill(~self.spec.mask(LENGTH), torch.nan))
        for distance in (0, -2.5, 1e5):
            yield Call("dummy_distance", distance=distance)
        yield Call("remap_distance", distances=lambda d: 3 - d / 2)
        yield Call("swap_positions", positions=torch.stack([BROKEN, BROKEN.flip(0)]))
        yield Call("position_interpolation", factor=0.5)
        yield Call("limit_frequencies", high=float(self.spec.rotary.frequencies.abs().median()))
        yield Call("phase_noise", noise=0.2, seed=3)
        yield Call("phase_noise", noise=torch.stack([NOISE[:, :n], NOISE[:, n : 2 * n]]))
        yield Call("patch_vectors", q_rot=other.q_rot, k_rot=other.k_rot, keys="head")
        yield Call("lambda_mask", sinks=0, window=3, distance_ceiling=5)
        for keep in (("key", "residual"), ("query", "distance", "residual", "key")):
            yield Call("substitute_additive", axes="two", keep=keep)

    def check(self, sets: Iterable[Sequence[Call]]) -> None:
        """Compare the results of heads, each under the calls of another set; those of other heads stay."""
        for n, some in enumerate(_batched(sets, self.spec.n_heads)):
            distinct = {id(call): call for calls in some for call in calls}
            acting = [
                call.on([h for h, calls in enumerate(some) if any(x is call for x in calls)])
                for call in list(distinct.values())[:: -1 if n % 2 else 1]  # lists are added in any order
            ]
            got = self.results(joined(self.hooks_of(call) for call in acting))
            assert torch.equal(got[:, len(some) :], self.plain[:, len(some) :])
            error = (got - self.expected(acting)).abs().amax((0, 2, 3))
            for calls, largest in zip(some, error.tolist(), strict=False):
                assert largest <= self.tolerance, (calls, largest, self.tolerance)


_ON_RESULTS = (
    Call("ablate_heads"),
    Call("ablate_heads", mode="mean", reference=REFERENCE),
    Call("ablate_heads", mode="resample"),
)


def _batched(items: Iterable[Any], n: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while some := list(itertools.islice(iterator, n)):
        yield some


def compatible(calls: Sequence[Call], size: int) -> list[tuple[Call, ...]]:
    """All sets of so many calls of which no two are refused together."""
    fine = {(a, b) for a, b in itertools.combinations(calls, 2) if not conflict(a, b)}
    return [x for x in itertools.combinations(calls, size) if fine.issuperset(itertools.combinations(x, 2))]


def of_all_fields(sets: Iterable[tuple[Call, ...]]) -> list[tuple[Call, ...]]:
    """One set for each set of fields."""
    return list({tuple(frozenset(fields(call)) for call in calls): calls for calls in sets}.values())


ON_ROTATION = {
    "swap_positions": {"positions": UNORDERED},
    "dummy_distance": {"distance": 5},
    "remap_distance": {"distances": TABLE},
    "position_interpolation": {"factor": 3},
    "limit_frequencies": {"low": 0.1},
    "phase_noise": {"noise": 0.7},
    "lambda_mask": {"sinks": 2, "window": 5},
}
TOOLS = ("capture", *ON_ROTATION, "patch_vectors", *(tool for tool in FIELD if tool not in ON_ROTATION))


def tried(model: Any) -> dict[str, str]:
    """Try the law on a model: an empty text for each tool, or why it is refused.

    On the first and on the last layer, which may be of another kind.
    """
    reading = read_model(model)
    specs = reading.specs()
    refused = dict.fromkeys(TOOLS, "")
    for layer in sorted({specs[0].layer, specs[-1].layer}):
        subject = Subject(reading, layer)
        calls = subject.calls()
        subject.check([call] for call in calls)
        if layer == specs[0].layer:
            subject.check(of_all_fields(compatible(calls, 2)))
    rotating = next((spec for spec in specs if spec.rotary is not None), specs[0])
    by_refusal: dict[str, Callable[[], Any]] = {
        "capture": lambda: capture(reading, TOKENS, layers=[rotating.layer]),
        "patch_vectors": lambda: hooks.patch_vectors(reading, rotating.layer, torch.zeros(2, LENGTH, 8, 8), None),
    } | {
        tool: partial(getattr(hooks, tool), reading, layers=[rotating.layer], **given)
        for tool, given in ON_ROTATION.items()
    }
    if rotating.rotary is None:
        for tool, call in by_refusal.items():
            try:
                call()
            except ValueError as error:
                refused[tool] = str(error)
    return refused
