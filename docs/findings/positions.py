"""Findings about positions: what the loss needs of distances, which layers use them, and two claims of [A], Han and Ji,
arXiv 2503.13305: what a single distance changes in the scores, and the bound of Theorem 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from rows import Row, losses, row
from texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.rope import Moments, interaction_bound, rotate, to_complex

TEXTS, LENGTH = 8, 256
FEWER = 4  # texts of studies that take many passes for each
DISTANCES = (1, 8, 64)  # of ``key_component``
STUDIES = ("fixed_distance", "layers", "key_component", "bound")


def trained_and_random(model: Any) -> dict[str, Any]:
    return {"trained": model, "random": next(tp.random_control(model, [0]))}


def fixed_distance(model: Any, source: Source) -> Iterator[Row]:
    """The loss added where all pairs have one distance, where positions are shuffled, where they are rounded; and where
    all heads have their mean output over other texts."""
    n = how_many(model, source, TEXTS)
    texts, places = parts(model, source, n, LENGTH), torch.arange(LENGTH)
    base, others = losses(model, texts), parts(model, source, FEWER, LENGTH, skip=n)
    yield row("loss", base, LENGTH, "model(texts)")
    added = losses(model, texts, tp.ablate_heads(model, None, mode="mean", reference=others)) - base
    yield row("added loss, mean outputs", added, LENGTH, f"ablate_heads(model, None, reference={len(others)} texts)")
    for d in (0, 1, 5, 50):
        added = losses(model, texts, tp.dummy_distance(model, d)) - base
        yield row(f"added loss, every distance {d}", added, LENGTH, f"dummy_distance(model, {d})")
    orders = [torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    shuffled = torch.stack([losses(model, texts, tp.swap_positions(model, order)) - base for order in orders])
    yield row("added loss, shuffled positions", shuffled.mean(0), LENGTH, "swap_positions", "texts, 3 orders")
    added = losses(model, texts, tp.swap_positions(model, places // 2 * 2)) - base
    yield row("added loss, positions rounded to even numbers", added, LENGTH, "swap_positions(model, places // 2 * 2)")


def layers(model: Any, source: Source) -> Iterator[Row]:
    """Which layers use distances: what is lost where one layer has every distance 5 (alone), and what its own distances
    give back where all others have it (restored); the former for two texts."""
    texts, n = parts(model, source, how_many(model, source, FEWER), LENGTH), model.cfg.n_layers
    base, collapsed = losses(model, texts), losses(model, texts, tp.dummy_distance(model, 5))
    alone, restored = [], []
    for layer in range(n):
        others = [other for other in range(n) if other != layer]
        alone.append(losses(model, texts[:2], tp.dummy_distance(model, 5, layers=[layer])) - base[:2])
        restored.append(collapsed - losses(model, texts, tp.dummy_distance(model, 5, layers=others)))
    cost = collapsed - base
    yield row("added loss, every layer", cost, LENGTH, "dummy_distance(model, 5)")
    sums = torch.stack(alone).sum(0) / cost[:2]
    yield row("costs of single layers over the cost of all", sums, LENGTH, "layers=[layer]")
    for name, found in {"restored": restored, "alone": alone}.items():
        yield from by_third(name, torch.stack(found))


def by_third(name: str, effects: Tensor) -> Iterator[Row]:
    """Shares of the sum of positive ``[layer, text]`` effects: by third of the layers, and of the layer with most."""
    shares = effects.clamp(min=0) / effects.clamp(min=0).sum(0)
    n = len(shares)
    for third, start in (("first", 0), ("second", 1), ("last", 2)):
        some = shares[n * start // 3 : n * (start + 1) // 3]
        yield row(f"share of {name}, {third} third of the layers", some.sum(0), LENGTH, f"{len(some)} of {n} layers")
    most = int(effects.mean(1).argmax())
    yield row(f"share of {name}, layer with most", shares[most], LENGTH, f"layer {most}")
    yield row(f"nats {name}, layer with most", effects[most], LENGTH, f"layer {most}")


def key_component(model: Any, source: Source) -> Iterator[Row]:
    """What stays and what moves where all pairs of a layer have one distance: the key component, and the mean score.

    A layer's own distances do not change its queries and keys, so its scores at a distance follow from one pass.
    """
    texts = parts(model, source, how_many(model, source, FEWER), LENGTH)
    for name, one in trained_and_random(model).items():
        tables = [pd.concat([unchanged(layer) for layer in captured(one, text)]) for text in texts]
        for what, by_text in (("", [t.mean() for t in tables]), ("median head, ", [t.median() for t in tables])):
            for column, values in pd.DataFrame(by_text).items():
                yield row(f"{column}, {what}{name}", torch.tensor(values.to_numpy()), LENGTH, "fit_additive(scores)")


def captured(model: Any, text: Tensor) -> list[Any]:
    with torch.no_grad():
        return tp.capture(model, text[None], scores=False)


def unchanged(layer: Any) -> pd.DataFrame:
    """One row per head: correlations of key components in the layer's run and at distances, and of the mean score at a
    distance with the distance component."""
    near, far = DISTANCES[0], DISTANCES[-1]
    columns = {}
    for sinks, what in ((0, "key component"), (1, "key component without the first token")):
        own = tp.fit_additive(layer.scores, sinks=sinks)
        weights = own.mask.double().sum(-2)
        keys = {d: tp.fit_additive(at_distance(layer, d), sinks=sinks).key[0] for d in DISTANCES}
        for d in DISTANCES:
            columns[f"{what}, own and distance {d}"] = correlation(own.key[0], keys[d], weights)
        columns[f"{what}, distances {near} and {far}"] = correlation(keys[near], keys[far], weights)
        columns[f"{what}, own and distance {far} of another head"] = correlation(
            own.key[0], keys[far].roll(1, 0), weights
        )
        if not sinks:
            columns |= shifts(mean_scores(layer), own.distance[0])
    return pd.DataFrame(columns)


def at_distance(layer: Any, d: int) -> Tensor:
    """``[1, head, query, key]``: the layer's scores where every pair has distance d."""
    places, rotary = torch.zeros(layer.q.shape[1]), layer.spec.rotary
    scores: Tensor = layer.spec.score(rotate(layer.q, places + d, rotary), rotate(layer.k, places, rotary))
    return scores


def mean_scores(layer: Any) -> Tensor:
    """``[head, distance]``: the mean score of each query with the keys it sees, where all have one distance."""
    spec, rotary = layer.spec, layer.spec.rotary
    group = layer.q.shape[2] // layer.k.shape[2]
    (q, q_rest), (k, k_rest) = (to_complex(x[0].double(), rotary) for x in (layer.q, layer.k))
    k, k_rest = (x.repeat_interleave(group, 1).cumsum(0) for x in (k, k_rest))
    n = len(q)
    turns = torch.exp(1j * rotary.angles(torch.arange(n)))
    products = (q * k.conj()).sum(0) * rotary.attention_factor**2
    sums = torch.einsum("hc,dc->hd", products, turns).real + (q_rest * k_rest).sum((0, 2))[:, None]
    return sums * spec.require_scale() / (n * (n + 1) / 2)


def shifts(means: Tensor, component: Tensor) -> dict[str, Tensor]:
    """By range of distances, from 1 (0 is a token with itself) up to half of the text: how the mean score at a distance
    follows the distance component, up to a straight line, which the fit cannot tell from the other components: its
    correlation and slope, and that with another head's."""
    columns, half = {}, means.shape[1] // 2
    near = min(16, half - 3)
    for name, start, stop in (("", 1, half), (" below 16", 1, near), (" from 16 on", near, half)):
        a, b = (without_line(x[:, start:stop]) for x in (means, component))
        weights = torch.ones(stop - start)
        what = f"mean score at a distance and distance component, distances{name}"
        columns[f"{what}, correlation"] = correlation(a, b, weights)
        columns[f"{what}, slope"] = (a * b).sum(-1) / (b * b).sum(-1)
        columns[f"{what}, correlation with another head's"] = correlation(a, b.roll(1, 0), weights)
    return columns


def without_line(x: Tensor) -> Tensor:
    """``[head, distance]`` minus each head's straight line of least squares."""
    line = torch.stack([torch.ones(x.shape[1]), torch.arange(x.shape[1])], 1).to(x)
    return x - (line @ torch.linalg.lstsq(line, x.T).solution).T


def correlation(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """``[head]``: weighted correlations over the last axis."""
    x, y = (v - (v * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True) for v in (x, y))
    return (weights * x * y).sum(-1) / ((weights * x * x).sum(-1) * (weights * y * y).sum(-1)).sqrt()


def bound(model: Any, source: Source) -> Iterator[Row]:
    """Theorem 2 of [A]: the share of interactions with the distance and its two bounds; without the first token."""
    texts = parts(model, source, how_many(model, source, FEWER), LENGTH)
    for name, one in trained_and_random(model).items():
        for component in ("distance:key", "distance:query:key"):
            tables = [pd.concat([bounds(layer, component) for layer in captured(one, text)]) for text in texts]
            means = pd.DataFrame([table.mean() for table in tables])
            for column in ("share", "pairwise", "separate", "share / pairwise", "share / separate", "valid"):
                values = torch.tensor(means[column].to_numpy())
                yield row(f"{component}, {column}, {name}", values, LENGTH, "interaction_bound")


def bounds(layer: Any, component: Any) -> pd.DataFrame:
    """One row per head: bounds of an interaction, their ratios to it, and whether they are bounds, up to rounding."""
    spec = layer.spec
    moments = Moments.from_qk(layer.q[0, 1:], layer.k[0, 1:], spec.rotary)
    table = interaction_bound(moments, range(layer.q.shape[1]), scale=spec.require_scale(), component=component)
    for name in ("pairwise", "separate"):
        table[f"share / {name}"] = table["share"] / table[name]
    in_order = (table["share"] <= table["pairwise"] + 1e-9) & (table["pairwise"] <= table["separate"] + 1e-9)
    return table.assign(valid=in_order.astype(float)).drop(columns="head")
