"""Studies of ``real_models.py``: what a model loses without RoPE's rotation, before any training. By layer and head, on
prose and on the second copy of random tokens; by distance; and how much of the order of words is still used."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pandas as pd
import stories
import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import logit_difference, needle_texts
from tl_posdisent.hooks import applied

Head = tuple[int, int]
SKIPPED, COPY = 256, 48  # tokens of the beginnings of speeches, many of which are alike; tokens of a copy
EDGES = (1, 64, 256, 512, 1024)  # positions of a long text between which the loss is averaged
BY_LENGTH = ("unchanged", "all layers", "every fourth layer", "global layers")  # longer texts, too
LAST = [("unembed.hook_in", lambda x, hook: x[:, -1:])]  # no logits of other tokens: half of the time of a pass


class Change(NamedTuple):
    """A change of a model: its name, layers or heads, draw if they are drawn, and hooks."""

    name: str
    where: str
    draw: float
    hooks: list[Any]


def speeches(model: Any, n: int, length: int, skip: int = 0) -> Tensor:
    """``[n, length]``: parts of n speeches, each behind its BOS."""
    found = []
    texts = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    for text in texts[skip : skip + n]:
        ids = model.to_tokens(text, truncate=False)[0]
        found.append(torch.cat([ids[:1], ids[1 + SKIPPED : SKIPPED + length]]))
    return torch.stack(found)


def copies(model: Any, n: int, size: int | None = None) -> Tensor:
    """``[n, 1 + 2 * size]``: random tokens twice, behind the BOS; by default ``COPY``."""
    shape = (n, COPY if size is None else size)
    drawn = torch.randint(1000, model.cfg.d_vocab, shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([model.to_tokens("")[:, :1].expand(n, 1), drawn, drawn], 1)


def losses(model: Any, tokens: Tensor, hooks: Sequence[Any] = ()) -> Tensor:
    """``[text, pos - 1]``: nats per token."""
    found = []
    with torch.no_grad(), applied(model, list(hooks)):
        for text in tokens:
            found.append(
                torch.nn.functional.cross_entropy(model(text[None])[0, :-1].float(), text[1:], reduction="none")
            )
    return torch.stack(found)


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


def by_heads(model: Any, draws: int, skip: int) -> Iterator[Change]:
    """The heads with most attention to the previous token, on two other speeches, and those with most induction
    attention; and as many others, of the same layers if they have enough."""
    labels = tp.head_labels(model, speeches(model, 2, SKIPPED // 2, skip), seeds=0, progress=False)
    labels = labels.set_index(["layer", "head"])
    size = max(len(labels) // 18, 1)
    for label in ("previous_token", "induction"):
        chosen = labels[label].nlargest(size).index.tolist()
        yield of_heads(model, f"heads, most {label}", chosen)
        layers = {layer for layer, _ in chosen}
        others = [head for head in labels.index if head not in chosen]
        for seed in range(draws):
            order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
            drawn = sorted((others[x] for x in order), key=lambda head: head[0] not in layers)[:size]
            yield of_heads(model, f"random heads of the layers with most {label}", drawn, seed)


def of_heads(model: Any, name: str, heads: Sequence[Head], draw: float = torch.nan) -> Change:
    where = " ".join(f"L{layer}H{head}" for layer, head in sorted(heads))
    return Change(name, where, draw, tp.dummy_distance(model, 0, heads=sorted(heads)))


def without_rotation(
    model: Any,
    texts: int = 4,
    draws: int = 4,
    every: int = 4,
    length: int = SKIPPED,
    edges: Sequence[int] = EDGES,
    single: int = 2,
    global_layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Loss added by each change, in nats per token: of prose, and of the second copy of random tokens. Loss by position
    of the model itself and of some changes. ``single``: texts for single layers."""
    if global_layers is None:
        global_layers = globals_of(model)
    long, twice, rows = speeches(model, texts, edges[-1]), copies(model, texts), list[dict[str, Any]]()
    prose = long[:, :length]
    positions = {"prose": f"1 to {length}", "second copy": f"{COPY + 2} to {2 * COPY + 1}"}

    def measured(hooks: Sequence[Any], n: int) -> dict[str, Tensor]:
        second = losses(model, twice[:n], hooks)[:, COPY + 1 :]
        return {"prose": losses(model, prose[:n], hooks).mean(1), "second copy": second.mean(1)}

    unchanged = Change("unchanged", "", torch.nan, [])
    base = measured([], texts)
    rows += [row(unchanged, measure, positions[measure], values) for measure, values in base.items()]
    changes = [*by_layers(model, every, draws, global_layers), *by_heads(model, draws, texts)]
    changes.append(Change("distances plus 4", "all", torch.nan, tp.remap_distance(model, lambda d: d + 4)))
    changes += [of_layers(model, "one layer", [layer]) for layer in range(model.cfg.n_layers if single else 0)]
    for change in changes:
        n = single if change.name == "one layer" else texts
        for name, values in measured(change.hooks, n).items():
            rows.append(row(change, name, positions[name], values - base[name][:n]))
        print(change[:3], [round(each["value"], 3) for each in rows[-2:]], flush=True)
    base = losses(model, long)
    for change in (unchanged, *(each for each in changes if each.name in BY_LENGTH)):
        values = losses(model, long, change.hooks) - base if change.hooks else base
        for start, stop in pairwise(edges):
            rows.append(row(change, "prose by position", f"{start} to {stop}", values[:, start - 1 : stop - 1].mean(1)))
            print(change[:3], rows[-1]["positions"], round(rows[-1]["value"], 3), flush=True)
    return pd.DataFrame(rows)


def word_order(
    model: Any, texts: int = 4, orders: int = 2, length: int = SKIPPED, kept: Sequence[int] = (1,)
) -> pd.DataFrame:
    """Does the order of words still matter? Loss of a token where those before it, but the last few, are shuffled,
    minus that where they are not; with and without rotation. Eight places in each text."""
    tokens, rows = speeches(model, texts, length), list[dict[str, Any]]()
    places = torch.linspace(length // 4, length - 2, 8).long().tolist()
    positions = f"{places[0] + 1} to {places[-1] + 2}"
    for change in (Change("unchanged", "", torch.nan, []), of_layers(model, "all layers", range(model.cfg.n_layers))):
        base = last_losses(model, [tokens[:, : at + 1] for at in places], tokens[:, [at + 1 for at in places]], change)
        rows.append(row(change, "loss", positions, base.mean(1)))
        for n in kept:
            added = []
            for seed in range(orders):
                some = [shuffled(tokens[:, : at + 1], n, seed) for at in places]
                added.append(last_losses(model, some, tokens[:, [at + 1 for at in places]], change) - base)
            rows.append(
                row(change, f"added by shuffling all but the last {n}", positions, torch.stack(added).mean((0, 2)))
            )
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def last_losses(model: Any, contexts: Sequence[Tensor], targets: Tensor, change: Change) -> Tensor:
    """``[text, place]``: nats of the token after each context."""
    logits = torch.cat([last_logits(model, tokens, change) for tokens in contexts], 1)
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def shuffled(tokens: Tensor, kept: int, seed: int) -> Tensor:
    """``[text, pos]``: the tokens between the BOS and the last few in a random order."""
    stop = tokens.shape[1] - kept
    order = 1 + torch.randperm(stop - 1, generator=torch.Generator().manual_seed(seed))
    return torch.cat([tokens[:, :1], tokens[:, order], tokens[:, stop:]], 1)


def needles(
    model: Any,
    lengths: Sequence[int] = (256, 512),
    pairs: int = 12,
    draws: int = 2,
    every: int = 4,
    global_layers: Sequence[int] | None = None,
) -> pd.DataFrame:
    """A question about one of two needles: logit of the answer minus that of the other needle's word, how often it is
    positive (a half is chance), and minus the mean of those of words that only other texts have. Standard errors are
    over pairs of texts. Longer texts for some changes."""
    rows, changes = list[dict[str, Any]](), [Change("unchanged", "", torch.nan, [])]
    changes += by_layers(model, every, draws, globals_of(model) if global_layers is None else global_layers)
    for length in lengths:
        given = needle_texts(model, length=length, pairs=pairs, seed=2)  # those of ``retrieval_rotation``
        absent = [[x for x in given.words.unique().tolist() if x not in own] for own in given.words.tolist()]
        from_absent = logit_difference(given.words[:, 0], absent)
        for change in changes:
            if change.name not in BY_LENGTH and length > min(lengths):
                continue
            logits = torch.cat([last_logits(model, text[None], change) for text in given.tokens])
            other = given.metric(logits)
            measures = {"answer minus other": other, "answer over other": (other > 0).float()}
            measures["answer minus absent"] = from_absent(logits)
            for measure, values in measures.items():
                rows.append(row(change, measure, f"{length} tokens", values.view(-1, 2).mean(1)))
            print(change[:3], [round(each["value"], 3) for each in rows[-3:]], flush=True)
    return pd.DataFrame(rows).rename(columns={"texts": "pairs"})


def last_logits(model: Any, tokens: Tensor, change: Change) -> Tensor:
    """``[text, 1, vocab]``: the logits of the next token."""
    with torch.no_grad(), applied(model, change.hooks):
        found: Tensor = model.run_with_hooks(tokens, fwd_hooks=LAST)[:, -1:].float()
    return found
