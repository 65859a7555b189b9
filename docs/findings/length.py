"""Findings about texts beyond the training length, read in parts against a KV cache (one to two hours of one core), and
about short texts at positions beyond it (three minutes)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from outputs import compare, outputs, positions
from rows import Row, row
from texts import Source, parts, whole
from torch import Tensor
from transformers import DynamicCache

import tl_posdisent as tp
from tl_posdisent.models import longer_context

STUDIES = ("beyond", "remedies", "far_positions")
TRAINED, LONGEST, BEYOND = 8192, 12288, 11264  # tokens: of training, of one text in several ways, of three texts
EDGES = [TRAINED - 1024, TRAINED, 9728, 10240, 10752, BEYOND]
PART = 512
TEXTS, SHORT, COMPARED = 8, 512, 256  # texts and tokens at far positions


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
        longer, part = (in_parts(model, x) for x in (tokens, shorter))
    return longer[half:] - part


def remedies(model: Any, source: Source) -> Iterator[Row]:
    """The loss beyond the training length of one text of 12 288 tokens, plain and with remedies (40 GiB of memory)."""
    if not applies(model, source):
        return
    tokens = model.to_tokens(whole("wikitext"), truncate=False)[:, :LONGEST]
    ways: dict[str, list[Any]] = {
        "plain": [],
        "distances within the training length": tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1)),
        "half of it and 4 sinks": tp.lambda_mask(model, 4, TRAINED // 2, TRAINED // 2),
        "positions divided by 1.5": tp.position_interpolation(model, 1.5),
    }
    with longer_context(model, LONGEST):
        for name, hooks in ways.items():
            losses = whole_text(model, tokens, hooks) if hooks else in_parts(model, tokens)
            loss = losses[TRAINED:].mean().item()
            yield Row(f"loss beyond the training length, {name}", loss, torch.nan, "1 text", LONGEST, "lambda_mask")


def far_positions(model: Any, source: Source) -> Iterator[Row]:
    """Attention outputs at the same tokens behind the same keys, in three steps of equal size away from these: two end
    within the training length, the last beyond it, there also with a ceiling on distances."""
    if not applies(model, source):
        return
    texts, step = parts(model, source, TEXTS, SHORT), (TRAINED - SHORT) // 2
    first, second, third = (positions(SHORT, COMPARED, n * step) for n in (1, 2, 3))
    ceiling = (third[:, None] - third).clamp(0, TRAINED - 1)
    near, edge, far = (outputs(model, texts, COMPARED, tp.swap_positions(model, p)) for p in (first, second, third))
    limited = outputs(model, texts, COMPARED, tp.remap_distance(model, ceiling))
    yield from compare("within the training length", near, edge, SHORT)
    yield from compare("beyond it", edge, far, SHORT)
    yield from compare("beyond it, ceiling", edge, limited, SHORT)


def applies(model: Any, source: Source) -> bool:
    """Only WikiText has texts beyond the training length, and only of models with a short one."""
    return source == "wikitext" and model.cfg.n_ctx <= TRAINED


def in_parts(model: Any, tokens: Tensor) -> Tensor:
    """``[pos - 1]`` nats, against a KV cache."""
    losses, cache = [], DynamicCache()
    with torch.no_grad():
        for start in range(0, tokens.shape[1], PART):
            logits = model(tokens[:, start : start + PART], use_cache=True, past_key_values=cache)[0].float()
            targets = tokens[0, start + 1 : start + 1 + PART]
            losses.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
    return torch.cat(losses)


def whole_text(model: Any, tokens: Tensor, hooks: list[Any]) -> Tensor:
    """``[pos - 1]`` nats in one pass, as hooks need it."""
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, :-1]
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(x.float(), y, reduction="none")
            for x, y in zip(logits.split(PART), tokens[0, 1:].split(PART), strict=True)
        ]
    )
