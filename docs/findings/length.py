"""Findings about texts beyond the training length, read in parts against a KV cache. One to two hours of one core."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from rows import Row, row
from texts import Source, whole
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.models import longer_context
from tl_posdisent.models.running.kv_cache import empty_cache

STUDIES = ("beyond", "remedies")
TRAINED, LONGEST, BEYOND = 8192, 12288, 11264  # tokens: of training, of one text in several ways, of three texts
EDGES = [TRAINED - 1024, TRAINED, 9728, 10240, 10752, BEYOND]
PART = 512
WATCHED = (1, 8, 16, 24, 29)  # layers whose outputs are compared


def beyond(model: Any, source: Source) -> Iterator[Row]:
    """Where does the loss begin to rise? Three texts; the loss minus that of the same tokens where the first half of
    the training length is left out, so that no position is beyond it."""
    if not applies(model, source):
        return
    differences = torch.stack([difference(model, text) for text in range(3)])
    for start, stop in pairwise(EDGES):
        some = differences[:, start - TRAINED // 2 : stop - TRAINED // 2].mean(1)
        call = "longer_context(model, length); loss minus that of the same tokens at earlier positions"
        yield row(f"loss added by the position, {start} to {stop}", some, BEYOND, call)


def difference(model: Any, text: int) -> Tensor:
    """``[position - TRAINED / 2]``: loss of a text's tokens minus that at positions which are TRAINED / 2 earlier."""
    ids, half = model.to_tokens(whole("wikitext"), truncate=False)[0], TRAINED // 2
    tokens = torch.cat([ids[:1], ids[1 + text * (BEYOND - 1) :][: BEYOND - 1]])[None]
    shorter = torch.cat([tokens[:, :1], tokens[:, half + 1 :]], 1)
    with longer_context(model, BEYOND):
        longer, part = (in_parts(model, x, [])[0] for x in (tokens, shorter))
    return longer[half:] - part


def remedies(model: Any, source: Source) -> Iterator[Row]:
    """One text of 12 288 tokens, plain and with remedies: loss beyond the training length, and the share of attention
    outputs outside the circle with 99 % of those within it, on their two principal components."""
    if not applies(model, source):
        return
    tokens = model.to_tokens(whole("wikitext"), truncate=False)[:, :LONGEST]
    ways: dict[str, list[Any]] = {
        "plain": [],
        "distances within the training length": tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1)),
        "half of it and 4 sinks": tp.lambda_mask(model, 4, TRAINED // 2, TRAINED // 2),
        "positions divided by 1.5": tp.position_interpolation(model, 1.5),
    }
    planes: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    with longer_context(model, LONGEST):
        for name, hooks in ways.items():
            loss, outputs = in_parts(model, tokens, hooks)
            planes = planes or {layer: plane(z[:, PART:TRAINED]) for layer, z in outputs.items()}
            far = {layer: outside(outputs[layer][:, TRAINED:], planes[layer]) for layer in planes}
            for what, value in (("loss", loss[TRAINED:].mean().item()), ("outputs outside", max(far.values()))):
                yield Row(
                    f"{what} beyond the training length, {name}", value, torch.nan, "1 text", LONGEST, "lambda_mask"
                )


def applies(model: Any, source: Source) -> bool:
    """Only WikiText has texts beyond the training length, and only of models with a short one."""
    return source == "wikitext" and model.cfg.n_ctx <= TRAINED


def in_parts(model: Any, tokens: Tensor, hooks: list[Any]) -> tuple[Tensor, dict[int, Tensor]]:
    """``[pos - 1]`` nats, and ``[head, pos, d_head]`` attention outputs of the watched layers."""
    kept: dict[int, list[Tensor]] = {layer: [] for layer in WATCHED}
    watch = [(f"blocks.{n}.attn.hook_z", lambda z, hook, n=n: kept[n].append(z[0].clone())) for n in WATCHED]
    found, cache = [], empty_cache(model, tokens)
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, *watch]):
        for start in range(0, tokens.shape[1], PART):
            logits = model(tokens[:, start : start + PART], **cache)[0].float()
            targets = tokens[0, start + 1 : start + 1 + PART]
            found.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    return torch.cat(found), {n: torch.cat(z).transpose(0, 1) for n, z in kept.items()}


def plane(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of ``[head, pos, d_head]`` outputs, two principal components in standard deviations, and the radius of
    the circle with 99 % of the outputs."""
    x = z.transpose(0, 1).flatten(1).double()
    mean = x.mean(0)
    _, spread, axes = torch.linalg.svd(x - mean, full_matrices=False)
    scaled = axes[:2].T / spread[:2] * len(x) ** 0.5
    return mean, scaled, ((x - mean) @ scaled).norm(dim=1).quantile(0.99)


def outside(z: Tensor, circle: tuple[Tensor, Tensor, Tensor]) -> float:
    mean, axes, radius = circle
    points = (z.transpose(0, 1).flatten(1).double() - mean) @ axes
    return (points.norm(dim=1) > radius).double().mean().item()
