"""The oracle of interventions: scores and results of a layer's heads under calls of the tools, by brute force.

It takes the calls as a user writes them (the tool's name and its arguments) and does what the tools' documentation
says, in float64: rotations by complex numbers, fits by tables of ones. Of the package it knows what describes a layer
(frequencies, scale, soft cap, mask) and its queries, keys and values before rotation, and nothing of the hooks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import brentq
from scipy.special import expit
from torch import Tensor

from .dense import dense_attention, dense_components

ADDITIVE = ("distance", "query", "key")
ALL = (*ADDITIVE, "residual")
PSEUDO_COUNT = 1e-3  # of uniform attention, as ``fit_attention`` documents
DRAWN_AT_ONCE = 64  # positions of phase noise


class Call:
    """A call of a tool: its name, the heads on which it acts (None for all) and its other arguments."""

    def __init__(self, tool: str, *, heads: Sequence[int] | None = None, **arguments: Any) -> None:
        self.tool, self.arguments, self.heads = tool, arguments, None if heads is None else tuple(heads)

    def on(self, heads: Sequence[int] | None) -> Call:
        """The same call on other heads."""
        return Call(self.tool, heads=heads, **self.arguments)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def __repr__(self) -> str:
        shown = {
            name: f"{tuple(x.shape)} numbers" if isinstance(x, Tensor) else x for name, x in self.arguments.items()
        }
        where = "" if self.heads is None else f" on {list(self.heads)}"
        return f"{self.tool}({', '.join(f'{name}={x!r}' for name, x in shown.items())}){where}"


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer in a text without padding: queries, keys and values before rotation, ``[batch, pos, head, d_head]``."""

    spec: Any
    q: Tensor
    k: Tensor  # of its key heads
    v: Tensor  # likewise
    sinks: Tensor | None = None  # ``[head]``, scores of attention sinks
    hidden: Tensor | None = None  # ``[query, key]``, cells that the run's own mask hides besides
    seen: Tensor | None = None  # ``[query, key]``, cells that the run's own mask shows, in place of the layer's
    own: Tensor | None = None  # ``[batch, head, query, key]``, scores that are not products of queries and keys
    gate: Tensor | None = None  # ``[batch, pos, head, d_head or 1]``, factors of the results

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def at(self) -> Tensor:
        return torch.arange(self.length)

    def of(self, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of query heads, in float64."""
        keys = [self.key_head(h) for h in heads]
        return self.q[:, :, list(heads)].double(), self.k[:, :, keys].double(), self.v[:, :, keys].double()

    def key_head(self, head: int) -> int:
        return head // (self.q.shape[2] // self.k.shape[2])


def edited_scores(layer: Layer, calls: Sequence[Call]) -> Tensor:
    """Scores of heads under these calls, ``[batch, head, query, key]``, -inf where a key is hidden."""
    out: list[Any] = [None] * layer.q.shape[2]
    for heads, acting in _alike(layer, calls):
        for head, x in zip(heads, _scores(layer, heads, acting).unbind(1), strict=True):
            out[head] = x
    return torch.stack(out, 1)


def edited_results(layer: Layer, calls: Sequence[Call], read: Callable[[Tensor], Layer] | None = None) -> Tensor:
    """What heads gather under these calls, ``[batch, head, pos, d_head]``; ``read`` gives the layer in another text."""
    out: list[Any] = [None] * layer.q.shape[2]
    for heads, acting in _alike(layer, calls):
        for head, x in zip(heads, _results(layer, heads, acting, read).unbind(1), strict=True):
            out[head] = x
    return torch.stack(out, 1)


def _alike(layer: Layer, calls: Sequence[Call]) -> list[tuple[list[int], list[Call]]]:
    """Heads by the calls that act on them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for head in range(layer.q.shape[2]):
        groups.setdefault(tuple(_sides(layer, call, head) for call in calls), []).append(head)
    return [
        (heads, [_of_side(call, side) for call, side in zip(calls, sides, strict=True) if side])
        for sides, heads in groups.items()
    ]


def _sides(layer: Layer, call: Call, head: int) -> str:
    """What a call reaches of a head: all, nothing, or the keys alone, if it patches those that others share."""
    chosen = range(layer.q.shape[2]) if call.heads is None else call.heads
    if head in chosen:
        return "qk"
    grouped = call.get("k_rot") is not None and call.get("keys", "group") == "group"
    return "k" if grouped and layer.key_head(head) in {layer.key_head(h) for h in chosen} else ""


def _of_side(call: Call, side: str) -> Call:
    return call if side == "qk" else Call("patch_vectors", q_rot=None, k_rot=call["k_rot"])


# --- the rotation -------------------------------------------------------------------------------------------------


def _rotated(layer: Layer, heads: list[int], calls: Sequence[Call]) -> Tensor:
    """``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i (θ_c · distance / s + ε_ic - ε_jc)))`` and what does not rotate."""
    spec, at = layer.spec, layer.at
    q, k, _ = layer.of(heads)
    if layer.own is not None:
        return layer.own[:, heads].double()
    if spec.rotary is None:
        return _capped(torch.einsum("bqhd,bkhd->bhqk", q, k) * spec.scale, spec)
    theta, dropped = _frequencies(spec, calls)
    (zq, q_rest), (zk, k_rest) = (_complex(x, spec) for x in (q, k))
    noise = sum((_noise(call, layer) for call in calls if call.tool == "phase_noise"), torch.zeros(1, 1, len(theta)))
    turned = [torch.exp(1j * noise)[:, :, None] * spec.rotary.attention_factor * z for z in (zq, zk)]
    places = [_places(call, at) for call in calls if call.tool in _POSITIONS] or [(at.double()[None],) * 2]
    if any(call.get("unrotated") == "drop" for call in calls):
        q_rest = torch.zeros_like(q_rest)
        dropped = dropped | (theta == 0) & (spec.rotary.frequencies == 0)
    patches = [call for call in calls if call.tool == "patch_vectors"]
    apart = [_distances(call, heads, at) for call in calls if call.tool == "remap_distance"]
    if ceilings := [call["distance_ceiling"] for call in calls if call.get("distance_ceiling") is not None]:
        real = apart[0] if apart else (places[0][0][:, :, None] - places[0][1][:, None])[:, None]
        apart = [real.clamp(max=min(ceilings))]
    if patches or not apart:
        turned = [
            z * torch.exp(1j * (p[..., None] * theta))[:, :, None] for z, p in zip(turned, places[0], strict=True)
        ]
    for n, which in enumerate(("q_rot", "k_rot")):
        for given in (call[which].double() for call in patches if call.get(which) is not None):
            some = heads if n == 0 else [layer.key_head(h) for h in heads]
            turned[n], rest = _complex(given[:, :, some], spec)
            if n == 0 and any(call.get("unrotated") == "drop" for call in calls):
                rest = torch.zeros_like(rest)
            q_rest, k_rest = (rest, k_rest) if n == 0 else (q_rest, rest)
    terms = turned[0].movedim(1, 2)[:, :, :, None] * turned[1].conj().movedim(1, 2)[:, :, None]
    if apart:
        terms = terms * torch.exp(1j * (apart[0][..., None] * theta))
    scores = terms.real[..., ~dropped].sum(-1) + torch.einsum("bqhd,bkhd->bhqk", q_rest, k_rest)
    return _capped(scores * spec.scale, spec)


def _complex(x: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
    """Subspaces as complex numbers, and the coordinates that are not rotated."""
    n = len(spec.rotary.frequencies)
    turned, rest = x[..., : 2 * n], x[..., 2 * n :]
    half = spec.rotary.pairing == "half"
    real, imaginary = (turned[..., :n], turned[..., n:]) if half else (turned[..., ::2], turned[..., 1::2])
    return torch.complex(real, imaginary), rest


def _frequencies(spec: Any, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
    """Frequencies, divided by the factors of interpolation and 0 where frozen; and which subspaces are dropped."""
    theta = spec.rotary.frequencies.double()
    gone = {mode: torch.zeros(len(theta), dtype=torch.bool) for mode in ("drop", "freeze")}
    for call in calls:
        if call.tool == "limit_frequencies":
            low, high = call.get("low") or 0.0, math.inf if call.get("high") is None else call["high"]
            outside = (theta.abs() < low * (1 - 1e-6)) | (theta.abs() > high * (1 + 1e-6))
            gone[call.get("mode", "drop")] |= (~outside if call.get("side") == "inside" else outside) & (theta != 0)
    factor = math.prod(call["factor"] for call in calls if call.tool == "position_interpolation")
    return torch.where(gone["freeze"], 0.0, theta / factor), gone["drop"]


def _noise(call: Call, layer: Layer) -> Tensor:
    """Angles as given, or normal ones, drawn for some positions at a time."""
    noise, n = call["noise"], len(layer.spec.rotary.frequencies)
    if not isinstance(noise, Tensor):
        generator = torch.Generator().manual_seed(call.get("seed", 0))
        blocks = range(layer.length // DRAWN_AT_ONCE + 1)
        drawn = [torch.randn(DRAWN_AT_ONCE, n, generator=generator, dtype=torch.float64) for _ in blocks]
        noise = noise * torch.cat(drawn)[: layer.length]
    return noise.double() if noise.ndim == 3 else noise.double()[None]


_POSITIONS = ("swap_positions", "dummy_distance")


def _places(call: Call, at: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``[batch or 1, pos]`` of queries and keys, of which a dummy distance defines the differences alone."""
    if call.tool == "dummy_distance":
        return torch.full((1, len(at)), float(call["distance"]), dtype=torch.float64), torch.zeros(1, len(at)).double()
    given = call["positions"]
    places = given(at.double()) if callable(given) and not isinstance(given, Tensor) else torch.as_tensor(given)
    places = places.double() if places.ndim == 2 else places.double()[None]
    return places, places


def _distances(call: Call, heads: list[int], at: Tensor) -> Tensor:
    """Distances ``[batch or 1, head or 1, query, key]``."""
    real = (at[:, None] - at).double()
    if isinstance(call["distances"], Tensor):
        cells = call["distances"].double()
    else:
        cells = call["distances"](real.clamp_min(0).flatten()).view(real.shape)
    cells = cells[(None,) * (4 - cells.ndim)].nan_to_num()  # cells outside the mask may hold anything
    return cells if cells.shape[1] == 1 else cells[:, heads]


def _knocked_out(call: Call, at: Tensor) -> Tensor:
    """The hidden cells, ``[query, key]``."""
    if call.get("cells") is not None:
        return call["cells"]
    chosen = (at.tolist() if call.get(side) is None else list(call[side]) for side in ("queries", "keys"))
    rows, columns = (torch.isin(at, torch.tensor(slots) % len(at)) for slots in chosen)
    return rows[:, None] & columns


def _capped(scores: Tensor, spec: Any) -> Tensor:
    return scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()


# --- scores -------------------------------------------------------------------------------------------------------


def _scores(layer: Layer, heads: list[int], calls: Sequence[Call]) -> Tensor:
    """Keys are hidden, then components of another run put in, then scores replaced, then components dropped."""
    scores = _rotated(layer, heads, calls)
    inside = layer.spec.mask(layer.length) if layer.seen is None else layer.seen
    inside = inside if layer.hidden is None else inside & ~layer.hidden
    for call in (x for x in calls if x.tool == "lambda_mask"):
        distance = (layer.at[:, None] - layer.at).abs()
        inside = inside & ((layer.at < call["sinks"]) | (distance < call["window"]))
    for call in (x for x in calls if x.tool == "knock_out"):
        inside = inside & ~_knocked_out(call, layer.at)
    if bool((blind := ~inside.any(-1)).any()):
        raise ValueError(f"query {int(blind.nonzero()[0, -1])} would see no key")
    scores = torch.where(inside, scores, 0.0)
    patches = [call for call in calls if call.tool == "component_patching"]
    if patches:
        own, moved = dense_components(scores, inside), 0.0
        for call in patches:
            names = [call["component"]] if isinstance(call["component"], str) else call["component"]
            theirs = dense_components(torch.where(inside, call["scores"][:, heads].double(), 0.0), inside)
            moved = moved + sum(theirs[name] - own[name] for name in names)
        scores = scores + moved
    for call in calls:
        if call.tool == "substitute_attention":
            scores = _rung(layer, heads, call, scores, inside)
        if call.tool == "substitute_additive" and call.get("axes", "three") == "two":
            scores = _two_axes(layer, heads, calls, call.get("keep", ADDITIVE), scores)
    for call in calls:
        lost = [call["component"]] if call.tool == "drop_component" else []
        if call.tool == "substitute_additive" and call.get("axes", "three") == "three":
            lost = [name for name in ALL if name not in call.get("keep", ADDITIVE)]
        if lost:
            parts = dense_components(torch.where(inside, scores, 0.0), inside)
            scores = scores - sum(parts[name] for name in lost)
    return scores.masked_fill(~inside, -torch.inf)


def _two_axes(layer: Layer, heads: list[int], calls: Sequence[Call], keep: Sequence[str], scores: Tensor) -> Tensor:
    """Means of the table of each query with each key at each distance that the mask allows."""
    if set(keep) == set(ALL):
        return scores
    spec, (q, k, _) = layer.spec, layer.of(heads)
    theta, dropped = _frequencies(spec, calls)
    (zq, q_rest), (zk, k_rest) = (_complex(x, spec) for x in (q, k))
    if any(call.get("unrotated") == "drop" for call in calls):
        q_rest = torch.zeros_like(q_rest)
    ahead = layer.at[:, None] - layer.at
    allowed = ahead[spec.mask(layer.length)].unique()
    pairs = (zq.movedim(1, 2)[:, :, :, None] * zk.conj().movedim(1, 2)[:, :, None])[..., ~dropped]
    turns = torch.exp(1j * allowed[:, None] * theta[~dropped]) * spec.rotary.attention_factor**2
    table = torch.einsum("bhijc,dc->bhdij", pairs, turns).real
    table = (table + torch.einsum("bihd,bjhd->bhij", q_rest, k_rest)[:, :, None]) * spec.scale
    row = torch.searchsorted(allowed, ahead.clamp(allowed.min(), allowed.max()))
    i = layer.at[:, None].expand_as(row)
    at_distance = table.mean(-1)[:, :, row, i]  # W[i - j, i, ·]
    at_key, of_query, mean = table.mean(2), table.mean((2, 4))[..., None], table.mean((2, 3, 4))[..., None, None]
    own = table[:, :, row, i, layer.at.expand_as(row)]
    parts = {"distance": at_distance - of_query, "key": at_key - of_query, "query": of_query - mean}
    parts["residual"] = own - at_distance - at_key + of_query
    return _capped(sum((parts[name] for name in keep), mean).expand(scores.shape), spec)


def _rung(layer: Layer, heads: list[int], call: Call, scores: Tensor, inside: Tensor) -> Tensor:
    """Logits of a rung; beside a learned sink so high that it keeps its total attention over the queries of a text."""
    rung, at = call["by"], layer.at
    if rung == "untouched":
        return scores
    ahead, first = at[:, None] - at, (at == 0).expand(len(at), -1)
    seen = inside & first
    if rung == "uniform":
        logits = torch.zeros_like(scores)
    elif rung == "first_token":
        logits = torch.where(seen.any(-1, keepdim=True) & ~seen, -torch.inf, 0.0).expand(scores.shape)
    else:
        pattern = scores.masked_fill(~inside, -torch.inf).softmax(-1)
        pattern = (1 - PSEUDO_COUNT) * pattern + PSEUDO_COUNT * inside / inside.sum(-1, keepdim=True)
        cells = [torch.nn.functional.one_hot(ahead.clamp_min(0), len(at))]
        cells += [first[..., None]] if rung in ("distance+sink", "static") else []
        cells += [torch.eye(len(at), dtype=torch.bool).expand(len(at), -1, -1)] if rung == "additive" else []
        x = torch.cat([cell.double() for cell in cells], -1)[None]
        if rung == "static":
            keys = layer.of(heads)[1].movedim(2, 1).flatten(0, 1)  # [batch and head, key, feature]
            x = x.expand(len(keys), -1, -1, -1)
            x = torch.cat([x, keys[:, None].expand(-1, len(at), -1, -1)], -1)
        logits = dense_attention(pattern.flatten(0, 1), inside, x).view(scores.shape)
    logits = logits.double()
    if layer.sinks is None:
        return logits
    if rung == "additive":  # what a softmax does not see: importances have no trend over the keys
        counts = inside.sum(0).double()
        places = at - (counts @ at.double()) / counts.sum()
        slope = (logits.diagonal(0, -2, -1) @ (counts * places)) / (counts @ places.square())
        logits = logits - slope[..., None, None] * at[:, None]
    before, after = (x.masked_fill(~inside, -torch.inf).logsumexp(-1).numpy() for x in (scores, logits))
    levels = torch.zeros(*scores.shape[:2], 1, 1, dtype=torch.float64)
    for text, head in itertools.product(range(len(scores)), range(len(heads))):
        sink = layer.sinks[heads[head]].item()
        levels[text, head] = _level(sink - before[text, head], sink - after[text, head])
    return logits + levels


def _level(own: Any, new: Any) -> float:
    """The constant that gives a sink the same total share, from its excess over the sums of all keys of a query."""
    return float(brentq(lambda x: (expit(new - x) - expit(own)).sum(), -200, 200, xtol=1e-13))


# --- results ------------------------------------------------------------------------------------------------------


def _results(layer: Layer, heads: list[int], calls: Sequence[Call], read: Any) -> Tensor:
    scores, (_, _, v) = _scores(layer, heads, calls), layer.of(heads)
    if layer.sinks is not None:
        beside = layer.sinks.double()[heads][None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, beside], -1)
    z = torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1)[..., : layer.length], v)
    z = z if layer.gate is None else z * layer.gate.double()[:, :, heads].transpose(1, 2)
    for call in (x for x in calls if x.tool == "ablate_heads"):
        mode = call.get("mode", "zero")
        if mode == "mean":
            z = _results(read(call["reference"]), heads, (), read).mean((0, 2), keepdim=True).expand_as(z)
        elif mode == "resample":
            assert len(z) == 2, "more than two texts can be exchanged in several ways"
            z = z.flip(0)
        else:
            z = torch.zeros_like(z)
    return z
