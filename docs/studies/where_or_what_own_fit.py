"""Heads that attend by the distance alone by construction: which verdicts do they get?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from shared.texts import demo_texts, parts
from torch import Tensor

from tl_posdisent.experiments.needs.replacements import CONSTANTS
from tl_posdisent.experiments.needs.shares import shares, verdicts
from tl_posdisent.hooks import fitted_attention


def table(model: Any, texts: int = 8, length: int = 96, step: int = 1) -> pd.DataFrame:
    """One row for every ``step``-th head: its attention is its own fit to one set of texts; then its mean output, its
    fit to a second set, uniform attention and every other key at one distance take its place, in runs of a third set.

    Both shares of such a head, and the verdict: *where*, *either* or *neither* are right, *what* and *both* are wrong.
    """
    tokens = (
        demo_texts(3 * texts, length) if model.cfg.d_vocab < 10_000 else parts(model, "speeches", 3 * texts, length)
    )
    first, second, measured = tokens.split(texts)
    places = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)][::step]
    fits = [patterns(model, fitted, measured[:1], places) for fitted in (first, second)]
    found = []
    for place, own, other in zip(places, *fits, strict=True):
        mean = results(model, second, place, own).double().mean((0, 1)).float()
        unmodified = log_p(model, measured, place, own)
        uniform = torch.ones_like(own).tril() / torch.arange(1, length + 1)[:, None]
        replaced = [(own, mean), (other, None), (uniform, None), *((others_at(own, d), None) for d in CONSTANTS)]
        found.append([divergence(unmodified, log_p(model, measured, place, *x)) for x in replaced])
    k = torch.stack([torch.stack(x) for x in found], -1)  # replacement, text, head
    n_predictions = torch.full((texts,), length - 1.0, dtype=torch.float64)
    heads = shares(k[0], k[1], k[2], k[3:], n_predictions, CONSTANTS)
    heads["verdict"] = verdicts(heads, n_predictions, 0.0005)
    return pd.concat([pd.DataFrame(places, columns=["layer", "head"]), heads], axis=1)


def patterns(model: Any, fitted: Tensor, text: Tensor, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """``[query, key]`` for each head: its attention by the distance and the first token, fitted to texts."""
    kept: dict[int, Tensor] = {}
    for layer in {layer for layer, _ in places}:  # in the unmodified model up to this layer
        point = (f"blocks.{layer}.attn.hook_pattern", lambda x, hook: kept.update({hook.layer(): x[0]}))
        with (
            torch.no_grad(),
            model.hooks(fwd_hooks=[*fitted_attention(model, fitted, "distance+sink", layers=layer), point]),
        ):
            model(text)
    return [kept[layer][head] for layer, head in places]


def others_at(pattern: Tensor, place: int) -> Tensor:
    """The same attention with every key but the query's own at one distance."""
    log = pattern.double().log()
    n = len(log)
    # Row n - 1 has d at distances up to n - 2; in row n - 2, the first key has d at n - 2 and its own term.
    distance = log[-1].flip(0) - log[-1, -1]
    term = (log[-2, 0] - log[-2, -2]) - distance[n - 2]
    logits = torch.full_like(log, float(distance[place])).fill_diagonal_(float(distance[0]))
    logits[:, 0] += term
    return logits.masked_fill(~torch.ones_like(log).tril().bool(), -torch.inf).softmax(-1).float()


def hooks(place: tuple[int, int], pattern: Tensor, z: Tensor | None = None) -> list[Any]:
    """Hooks that put a pattern, and a result if given, in the place of a head's."""
    layer, head = place

    def attend(x: Tensor, hook: Any) -> Tensor:
        x[:, head] = pattern
        return x

    def give(x: Tensor, hook: Any) -> Tensor:
        x[:, :, head] = z
        return x

    name = f"blocks.{layer}.attn.hook_"
    return [(name + "pattern", attend)] + ([] if z is None else [(name + "z", give)])


def results(model: Any, tokens: Tensor, place: tuple[int, int], pattern: Tensor) -> Tensor:
    """``[text, pos, d_head]``: z of a head under a pattern."""
    seen: list[Tensor] = []
    keep = (f"blocks.{place[0]}.attn.hook_z", lambda x, hook: seen.append(x[:, :, place[1]]))
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks(place, pattern), keep]):
        model(tokens)
    return seen[0]


def log_p(model: Any, tokens: Tensor, place: tuple[int, int], pattern: Tensor, z: Tensor | None = None) -> Tensor:
    with torch.no_grad(), model.hooks(fwd_hooks=hooks(place, pattern, z)):
        return model(tokens)[:, :-1].double().log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """``[text]``: KL(p ‖ q), nats per prediction."""
    return (p.exp() * (p - q)).sum(-1).mean(1)
