"""Changes of a model by layers or heads, its losses under them, and rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

EDGES = (1, 64, 256, 512, 1024)  # positions of a long text between which the loss is averaged
BY_LENGTH = ("unchanged", "all layers", "every fourth layer", "global layers")  # longer texts, too
LAST = [("unembed.hook_in", lambda x, hook: x[:, -1:])]  # no logits of other tokens: half of the time of a pass
Head = tuple[int, int]


class Change(NamedTuple):
    """A change of a model: its name, layers or heads, draw if they are drawn, and hooks."""

    name: str
    where: str
    draw: float
    hooks: list[Any]


def losses(model: Any, tokens: Tensor, hooks: Sequence[Any] = ()) -> Tensor:
    """``[text, pos - 1]``: nats per token."""
    by_text = []
    with torch.no_grad(), applied(model, list(hooks)):
        for text in tokens:
            logits = model(text[None])[0, :-1].float()
            by_text.append(torch.nn.functional.cross_entropy(logits, text[1:], reduction="none"))
    return torch.stack(by_text)


def row(change: Change, measure: str, positions: str, values: Tensor) -> dict[str, Any]:
    """The mean of one value per text, with its standard error."""
    error = values.std().item() / len(values) ** 0.5
    place = {"change": change.name, "where": change.where, "draw": change.draw}
    place |= {"measure": measure, "positions": positions}
    return place | {"value": values.mean().item(), "se": error, "texts": len(values)}


def of_layers(model: Any, name: str, layers: Sequence[int], draw: float = torch.nan) -> Change:
    chosen = sorted(layers)
    hooks = tp.dummy_distance(model, 0, layers=chosen) if chosen else []
    return Change(name, " ".join(map(str, chosen)), draw, hooks)


def globals_of(model: Any) -> list[int]:
    """The layers without a window, of a model that has others."""
    kinds = tp.read_model(model).to_frame().set_index("layer")["attention"]
    return kinds.index[kinds == "global"].tolist() if (kinds == "local").any() else []


def by_layers(model: Any, every: int, draws: int, global_layers: Sequence[int]) -> Iterator[Change]:
    """All layers; every fourth layer, as models without positions in some layers have it; global layers alone; and as
    many layers drawn at random, local ones twice as often."""
    n = model.cfg.n_layers
    yield of_layers(model, "all layers", range(n))
    yield of_layers(model, "every fourth layer", range(every - 1, n, every))
    sizes: dict[str, tuple[int, Sequence[int]]] = {"random fourth": (len(range(every - 1, n, every)), range(n))}
    if global_layers:
        local = [layer for layer in range(n) if layer not in global_layers]
        yield of_layers(model, "global layers", global_layers)
        sizes["random local layers"] = (len(global_layers), local)
    for name, (size, among) in sizes.items():
        for seed in range(2 * draws if name == "random local layers" else draws):
            order = torch.randperm(len(among), generator=torch.Generator().manual_seed(seed)).tolist()
            yield of_layers(model, name, [among[x] for x in order[:size]], seed)


def of_heads(model: Any, name: str, heads: Sequence[Head], draw: float = torch.nan) -> Change:
    where = " ".join(f"L{layer}H{head}" for layer, head in sorted(heads))
    return Change(name, where, draw, tp.dummy_distance(model, 0, heads=sorted(heads)))


def last_logits(model: Any, tokens: Tensor, hooks: Any) -> Tensor:
    """``[text, 1, vocab]``: the logits of the next token."""
    with torch.no_grad(), applied(model, hooks):
        logits: Tensor = model.run_with_hooks(tokens, fwd_hooks=LAST)[:, -1:].float()
    return logits
