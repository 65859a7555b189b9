"""Does a tool do its work with a model? One trial for each tool: it passes, or the tool's own ValueError comes out.

A tool that runs and does something else than it says is `Wrong`. What it should do is computed another way here: by
least squares with a column for each parameter, score by score, by silencing the input of the output projection, or by a
law that knows no numbers (positions shifted by a constant change nothing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support import zoo
from torch import Tensor

import tl_posdisent as tp

LENGTH = 12
HEAD = 1  # where one head will do


class Wrong(AssertionError):
    """A tool ran and did not do what it says."""


# --- fit, read and decompose --------------------------------------------------------------------------------------


def _fit(model: Any, tokens: Tensor) -> None:
    table = tp.additivity(model, tokens, progress=False)
    _expect(len(table) == len(tokens) * model.cfg.n_layers * model.cfg.n_heads, "a fit per text, layer and head")
    for layer in range(model.cfg.n_layers):
        scores, pattern = _scores(model, tokens, layer)
        i, j = (pattern[0, 0] > 0).nonzero(as_tuple=True)
        ones = torch.eye(LENGTH, dtype=torch.float64)
        columns = torch.cat([ones[i - j], ones[i], ones[j]], 1)
        y = scores[..., i, j].double().flatten(0, 1).T
        y = y - y.mean(0)
        left = y - columns @ (torch.linalg.pinv(columns) @ y)
        rows = table.query(f"layer == {layer}").sort_values(["batch", "head"])
        _expect(_close(torch.tensor(rows["r2"].to_list()), 1 - left.var(0) / y.var(0)), "least squares")


def _capture(model: Any, tokens: Tensor) -> None:
    places, seen = torch.arange(tokens.shape[1]), []
    for layer in tp.capture(model, tokens):
        scores = layer.spec.score(layer.spec.rotated(layer.q, places), layer.spec.rotated(layer.k, places))
        inside = layer.spec.mask(tokens.shape[1])
        _expect(_same(scores[..., inside], layer.scores[..., inside]), "scores follow from q and k")
        seen.append(layer.layer)
    _expect(seen == list(range(model.cfg.n_layers)), "every layer")


def _controlled_distance(model: Any, tokens: Tensor) -> None:
    table = tp.controlled_distance(model, tokens, progress=False)
    for layer in tp.capture(model, tokens, layers=table["layer"].unique().tolist()):
        spec = replace(layer.spec, soft_cap=None)
        q, k = (x.flatten(0, 1)[None] for x in (layer.q, layer.k))  # every query with every key of both texts
        keys = spec.rotated(k, torch.zeros(k.shape[1]))
        each = [spec.score(spec.rotated(q, d * torch.ones(q.shape[1])), keys) for d in range(LENGTH)]
        variance = torch.stack(each).double().movedim(2, 0).flatten(1).var(1, correction=0)
        _expect(_same(torch.tensor(table.query(f"layer == {layer.layer}")["total"].to_list()), variance), "brute force")


# --- other positions and distances --------------------------------------------------------------------------------


def _swap_positions(model: Any, tokens: Tensor) -> None:
    plain, places = _logits(model, tokens, []), torch.arange(tokens.shape[1])
    _expect(_same(_logits(model, tokens, tp.swap_positions(model, places)), plain), "real positions change nothing")
    _expect(_same(_logits(model, tokens, tp.swap_positions(model, places + 7)), plain), "a shift changes nothing")
    _expect(not _same(_logits(model, tokens, tp.swap_positions(model, places.flip(0))), plain), "the order matters")


def _dummy_distance(model: Any, tokens: Tensor) -> None:
    everywhere = torch.full((model.cfg.n_heads, LENGTH, LENGTH), 3.0)  # given per head, so scores are recomputed
    dummy = _logits(model, tokens, tp.dummy_distance(model, 3))
    _expect(_same(dummy, _logits(model, tokens, tp.remap_distance(model, everywhere))), "two ways to one distance")
    _expect(not _same(dummy, _logits(model, tokens, [])), "the distances matter")


def _remap_distance(model: Any, tokens: Tensor) -> None:
    plain, i = _logits(model, tokens, []), torch.arange(LENGTH)
    real = (i[:, None] - i).expand(model.cfg.n_heads, -1, -1)
    _expect(_same(_logits(model, tokens, tp.remap_distance(model, real)), plain), "real distances change nothing")
    ceiling = tp.remap_distance(model, lambda d: d.clamp(max=3))
    _expect(not _same(_logits(model, tokens, ceiling), plain), "a ceiling matters")


def _one_head(model: Any, tokens: Tensor) -> None:
    layer = next((spec.layer for spec in tp.read_layers(model) if spec.rotary is not None), 0)
    hooks = tp.dummy_distance(model, 3, layers=[layer], heads=[HEAD])
    seen: list[Tensor] = []
    for some in ([], hooks):
        _logits(model, tokens, [*some, (f"blocks.{layer}.attn.hook_z", lambda z, hook: seen.append(z.clone()))])
    others = [h for h in range(model.cfg.n_heads) if h != HEAD]
    _expect(_same(seen[0][:, :, others], seen[1][:, :, others]), "the other heads stay")
    _expect(not _same(seen[0][:, :, HEAD], seen[1][:, :, HEAD]), "the head changes")


# --- ablating and patching ----------------------------------------------------------------------------------------


def _ablate_heads(model: Any, tokens: Tensor) -> None:
    for layer in range(model.cfg.n_layers):
        ablated = _logits(model, tokens, tp.ablate_heads(model, [(layer, HEAD)]))
        silent = _silenced(model, tokens, layer)
        _expect(_same(ablated, silent), "as with zeros for the output projection")
        _expect(not _same(ablated, _logits(model, tokens, [])), "the head matters")
        table = tp.head_ablation(model, tokens, _metric, layers=[layer], heads=[0, HEAD], progress=False)
        _expect(_close(table["value"][1], _metric(silent, tokens).mean()), "the table says the same")


def _patch_heads(model: Any, tokens: Tensor) -> None:
    other, layer = zoo.random_tokens(LENGTH, seed=1), model.cfg.n_layers - 1
    z, pattern = (_held(model, tokens, layer, name) for name in ("z", "pattern"))
    by_hand = {"z": [_put_z(layer, z)], "pattern": _attend(model, layer, pattern)}
    for activation, hooks in by_hand.items():
        table = tp.head_patching(
            model, tokens, other, _metric, activation=activation, layers=[layer], heads=[HEAD], progress=False
        )
        _expect(_close(table["value"][0], _metric(_logits(model, other, hooks), other).mean()), f"{activation} by hand")
        _expect(abs(table["effect"][0]) > 1e-3, f"another text's {activation} matters")
        _expect(_same(_logits(model, tokens, hooks), _logits(model, tokens, [])), f"its own {activation} does not")


def _patch_positions(model: Any, tokens: Tensor) -> None:
    """Before the first layer that rotates, nothing knows a position: to patch the vectors of the real ones in there is
    to leave the layer alone."""
    order, options = torch.arange(LENGTH).flip(0), {"metric": _metric, "progress": False}
    everywhere = tp.swap_positions(model, order)  # refuses what position_patching refuses
    first, *behind = [spec.layer for spec in tp.read_layers(model) if spec.rotary is not None]
    rest = tp.swap_positions(model, order, layers=behind) if behind else []
    table = tp.position_patching(model, tokens, order, what="layer", layers=[first], **options)
    _expect(_close(table["value"][0], _metric(_logits(model, tokens, rest), tokens).mean()), "a layer left alone")
    _expect(
        _close(table["corrupted"][0], _metric(_logits(model, tokens, everywhere), tokens).mean()), "other positions"
    )
    _expect(abs(table["effect"][0]) > 1e-3, "the layer's positions matter")
    heads = [h for h in range(model.cfg.n_heads) if h != HEAD]
    but_one = [*rest, *tp.swap_positions(model, order, layers=[first], heads=heads)]
    table = tp.position_patching(model, tokens, order, keys="head", layers=[first], heads=[HEAD], **options)
    _expect(_close(table["value"][0], _metric(_logits(model, tokens, but_one), tokens).mean()), "a head left alone")
    own = next(tp.capture(model, tokens, layers=[first]))
    hooks = tp.patch_vectors(model, first, own.q_rot, own.k_rot)
    _expect(_same(_logits(model, tokens, hooks), _logits(model, tokens, [])), "its own vectors change nothing")


def _patch_component(model: Any, tokens: Tensor) -> None:
    other, layer = zoo.random_tokens(LENGTH, seed=1), model.cfg.n_layers - 1
    parts = ["mean", "distance", "query", "key", "residual"]
    options = {"from_tokens": other, "metric": _metric, "layers": [layer], "heads": [HEAD, 2], "progress": False}
    whole, distance, query = (
        tp.component_patching(model, tokens, part, **options) for part in (parts, "distance", "query")
    )
    pattern = _held(model, other, layer, "pattern")
    by_hand = _logits(model, tokens, _attend(model, layer, pattern))
    _expect(_close(whole["value"][0], _metric(by_hand, tokens).mean()), "all parts are another text's pattern")
    _expect(distance["effect"].abs().max() > 1e-3, "the distance part matters")
    sink = bool(pattern.sum(-1).min() < 0.99)
    _expect((query["effect"].abs().max() > 1e-3) == sink, "the query part matters beside a sink only")
    hooks = tp.patch_scores(model, layer, _scores(model, tokens, layer)[0])
    _expect(_same(_logits(model, tokens, hooks), _logits(model, tokens, [])), "its own scores change nothing")


TRIALS: dict[str, Callable[[Any, Tensor], None]] = {
    "additivity": _fit,
    "capture": _capture,
    "controlled_distance": _controlled_distance,
    "swap_positions": _swap_positions,
    "dummy_distance": _dummy_distance,
    "remap_distance": _remap_distance,
    "some heads": _one_head,
    "ablate_heads": _ablate_heads,
    "head_patching": _patch_heads,
    "position_patching": _patch_positions,
    "component_patching": _patch_component,
}


# --- what the trials compare with -----------------------------------------------------------------------------------


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


def _logits(model: Any, tokens: Tensor, hooks: list[Any]) -> Tensor:
    """The logits under hooks, all of which must fire."""
    with torch.no_grad(), tp.hooks.applied(model, hooks) as m:
        return m(tokens)


def _metric(logits: Tensor, tokens: Tensor) -> Tensor:
    """A number per text in which every logit counts, each by another weight; about as large as a logit."""
    weights = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(5))
    return (logits.detach() * weights).sum((1, 2)) / weights.numel() ** 0.5


def _held(model: Any, tokens: Tensor, layer: int, name: str) -> Tensor:
    seen: list[Tensor] = []
    _logits(model, tokens, [(f"blocks.{layer}.attn.hook_{name}", lambda x, hook: seen.append(x.clone()))])
    return seen[0]


def _scores(model: Any, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Scores and pattern as the model shows them; scores of some bridges are the pattern, then those of `capture`."""
    scores, pattern = (_held(model, tokens, layer, name) for name in ("attn_scores", "pattern"))
    if torch.equal(scores, pattern):
        scores = next(tp.capture(model, tokens, layers=[layer])).scores
    return scores, pattern


def _put_z(layer: int, new: Tensor) -> tuple[str, Any]:
    def put(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, HEAD] = new[:, :, HEAD]
        return z

    return f"blocks.{layer}.attn.hook_z", put


def _attend(model: Any, layer: int, pattern: Tensor) -> list[Any]:
    """Hooks under which the head gathers its values by this pattern."""
    values: list[Tensor] = []

    def gather(z: Tensor, hook: Any) -> Tensor:
        v = values.pop()
        v = v if v.shape[1] == LENGTH else v.transpose(1, 2)  # by heads first: latent attention
        v = v.repeat_interleave(model.cfg.n_heads // v.shape[2], 2)
        by_head = z.flatten(2).unflatten(2, (model.cfg.n_heads, -1)).clone()  # whose z is cut elsewhere
        by_head[:, :, HEAD] = torch.einsum("bij,bjd->bid", pattern[:, HEAD], v[:, :, HEAD])
        return by_head.reshape(z.shape)

    names = (f"blocks.{layer}.attn.hook_{name}" for name in "vz")
    return list(zip(names, (lambda v, hook: values.append(v), gather), strict=True))


def _silenced(model: Any, tokens: Tensor, layer: int) -> Tensor:
    """The logits where the output projection gets zeros from the head, by torch alone."""
    attention = model.blocks[layer].attn
    weights = dict(attention.named_parameters(recurse=False))
    if "W_O" in weights:  # HookedTransformer: as well no weights for what comes from it
        weight = weights["W_O"].detach().clone()
        weight[HEAD] = 0
        with torch.no_grad():
            return torch.func.functional_call(model, {f"blocks.{layer}.attn.W_O": weight}, (tokens,))

    def silence(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        by_head = args[0].clone().unflatten(-1, (model.cfg.n_heads, -1))
        by_head[..., HEAD, :] = 0
        return by_head.flatten(-2), *args[1:]

    handle = attention.o.original_component.register_forward_pre_hook(silence)
    try:
        return _logits(model, tokens, [])
    finally:
        handle.remove()


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 2e-4 * b.abs().max())


def _close(a: Any, b: Any) -> bool:
    """Numbers that came about in two ways; differences that mean something here are some thousandths or more."""
    return bool((torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max() <= 2e-4)
