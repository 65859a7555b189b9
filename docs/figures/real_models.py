"""What position does in SmolLM2-135M-Instruct and Gemma 3 270M (4-bit weights, dequantised): the tables behind the
pages, one csv per study, in ``docs/figures/smollm2/`` and ``docs/figures/gemma3/``.

    python docs/figures/real_models.py interventions layers rotation   # of SmolLM2; by default all studies
    python docs/figures/real_models.py gemma3-270m interventions       # minutes of one core each

Texts: the first 256 tokens of speeches of 2001 to 2021 from the folder that ``POSDISENT_DATA`` names.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import downstream
import head_effects
import pandas as pd
import stories
import text_needed
import torch
import trained_and_random
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

import tl_posdisent as tp
from tl_posdisent.experiments.robustness.mahalanobis import fit_reference
from tl_posdisent.hooks import applied
from tl_posdisent.models import longer_context
from tl_posdisent.rope import Moments, interaction_bound, to_complex

FOLDER = Path(__file__).with_name("smollm2")
FOLDERS = {30: "smollm2", 18: "gemma3"}  # by the number of layers
NAMES = {30: "SmolLM2-135M-Instruct", 18: "Gemma 3 270M"}
LENGTH = 256


def texts(model: Any, n: int, length: int | None = None, skip: int = 0) -> Tensor:
    """``[n, pos]``: the beginnings of n speeches, each behind its BOS."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    return torch.stack([model.to_tokens(speech)[0, : length or LENGTH] for speech in speeches[skip : skip + n]])


def losses(model: Any, tokens: Tensor, hooks: list[Any] | None = None) -> Tensor:
    """``[text]``: nats per token."""
    with torch.no_grad(), applied(model, hooks or []):
        return torch.stack([-_log_p(model(row[None])[0, :-1], row[1:]).mean() for row in tokens])


def _log_p(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def interventions(model: Any) -> pd.DataFrame:
    """The loss under interventions on all layers: distance fixed, shuffled, limited, rounded."""
    tokens = texts(model, 6)
    cases: dict[tuple[str, int], list[Any]] = {("none", 0): []}
    for d in (0, 1, 5, 50):
        cases["every distance", d] = tp.dummy_distance(model, d)
    for seed in range(3):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))
        cases["shuffled positions, seed", seed] = tp.swap_positions(model, order)
    for top in (4, 8, 16, 32, 64, 128):
        cases["distances at most", top] = tp.remap_distance(model, lambda d, top=top: d.clamp(max=top))
    for step in (2, 4, 8, 16, 32):
        cases["positions rounded down to multiples of", step] = tp.swap_positions(
            model, torch.arange(LENGTH) // step * step
        )
    base = losses(model, tokens)
    rows = []
    for (name, value), hooks in cases.items():
        added = losses(model, tokens, hooks) - base if hooks else base
        error = added.std() / len(added) ** 0.5
        rows.append({"intervention": name, "value": value, "added_loss": added.mean(), "se": error})
        print(rows[-1], flush=True)
    return pd.DataFrame(rows).astype({"added_loss": float, "se": float})


def table_of(model: Any, study: str) -> pd.DataFrame:
    """What another study has written for the same model."""
    return pd.read_csv(FOLDER.with_name(FOLDERS[model.cfg.n_layers]) / f"{study}.csv")


def heads_of(model: Any) -> list[tuple[int, int]]:
    """All ``(layer, head)``."""
    return [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]


def heads(model: Any) -> pd.DataFrame:
    """Per head, four texts: r with the distance profile of the other texts, shares, and r of a random copy.

    The second parts of speeches: many begin alike, and then random weights have common profiles too.
    """
    tokens = trained_and_random.texts(model)[10:14]
    columns = ["r_held_out", "r", "share_distance", "share_key"]
    trained, chance = (
        tp.additivity(m, tokens, progress=False).groupby(["layer", "head"])[columns].mean()
        for m in (model, next(tp.random_control(model, [0])))
    )
    return trained.assign(random=chance["r_held_out"]).reset_index()


def layers(model: Any) -> pd.DataFrame:
    """Per layer: the loss added by one intervention in this layer alone, and how much less is added by all but this
    than by all; with standard errors over four texts."""
    tokens, places, n = texts(model, 4), torch.arange(LENGTH), model.cfg.n_layers
    tools: dict[str, Callable[..., list[Any]]] = {
        "every distance 5": partial(tp.dummy_distance, model, 5),
        "multiples of 2": partial(tp.swap_positions, model, places // 2 * 2),
    }
    base, rows = losses(model, tokens), []
    for name, tool in tools.items():
        everywhere = losses(model, tokens, tool(layers=None))
        for layer in range(n):
            others = [other for other in range(n) if other != layer]
            alone = losses(model, tokens, tool(layers=[layer])) - base
            restored = everywhere - losses(model, tokens, tool(layers=others))
            row = {"intervention": name, "layer": layer, "everywhere": (everywhere - base).mean().item()}
            rows.append(row | mean_and_error("alone", alone) | mean_and_error("restored", restored))
        print(name, flush=True)
    return pd.DataFrame(rows)


def mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    """The mean over texts and its standard error."""
    return {name: values.mean().item(), f"{name}_se": values.std().item() / len(values) ** 0.5}


def rotation(model: Any) -> pd.DataFrame:
    """Per head: the loss added when its pairs all have distance 5 (necessity), and by mean ablation of the head."""
    tokens, heads = texts(model, 2), heads_of(model)
    ablated = tp.head_ablation(model, tokens, mode="mean", progress=False).set_index(["layer", "head"])
    table = pd.DataFrame(heads, columns=["layer", "head"])
    return table.assign(fixed=fixed(model, tokens, heads), mean_ablated=ablated["effect"].to_numpy())


def fixed(model: Any, tokens: Tensor, heads: Sequence[tuple[int, int]]) -> list[float]:
    """The loss added when one of these heads has every distance 5."""
    base = losses(model, tokens).mean()
    added = (losses(model, tokens, tp.dummy_distance(model, 5, heads=[head])).mean() - base for head in heads)
    return [each.item() for each in added]


def sufficiency(model: Any, drawn: Sequence[int] = (4, 16, 64)) -> pd.DataFrame:
    """The loss added when all heads but k have every distance 5 (``kept``), or only these k (``taken``).

    The k of the largest ``fixed`` of ``rotation``, chosen on two texts and measured on four others; random heads,
    twelve draws for k in ``drawn`` and one for other k. ``ablated``: where all other heads have every distance 5,
    these k have their mean output; that is the control of giving them their distances back.
    """
    effects = table_of(model, "rotation")
    ranked = [(int(a), int(b)) for a, b in effects.sort_values("fixed", ascending=False)[["layer", "head"]].to_numpy()]
    tokens, n = texts(model, 4, skip=2), len(ranked)
    base = losses(model, tokens).mean()

    def added(hooks: list[Any]) -> float:
        return (losses(model, tokens, hooks).mean() - base).item()

    def row(name: str, ordered: list[tuple[int, int]], k: int, seed: int = 0) -> dict[str, Any]:
        found = {"heads": name, "k": k, "seed": seed, "kept": added(tp.dummy_distance(model, 5, heads=ordered[k:]))}
        if k and not seed:
            found["taken"] = added(tp.dummy_distance(model, 5, heads=ordered[:k]))
        if k:
            ablated = tp.ablate_heads(model, ordered[:k], mode="mean", reference=tokens)
            found["ablated"] = added(tp.dummy_distance(model, 5, heads=ordered[k:]) + ablated)
        print(found, flush=True)
        return found

    sizes = [k for k in (0, 1, 2, 4, 8, 16, 32, 64, 128, 200, 240) if k < n]
    rows = [row("largest effect", ranked, k) for k in sizes]
    orders = [torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(12)]
    for seed, order in enumerate(orders):
        some = sizes if seed == 0 else drawn
        rows += [row("random", [ranked[i] for i in order], k, seed) for k in some]
    return pd.DataFrame(rows)


def restored(model: Any) -> pd.DataFrame:
    """What the own distances of each head give back where all other heads have every distance 5; for the eight that
    give back most, what their mean output gives back instead. The texts of ``sufficiency``."""
    tokens, every = texts(model, 4, skip=2), heads_of(model)
    collapsed = losses(model, tokens, tp.dummy_distance(model, 5))

    def others(head: tuple[int, int]) -> list[Any]:
        return tp.dummy_distance(model, 5, heads=[x for x in every if x != head])

    table = pd.DataFrame(every, columns=["layer", "head"])
    found = [mean_and_error("back", collapsed - losses(model, tokens, others(head))) for head in every]
    table = table.join(pd.DataFrame(found))
    for n in table["back"].nlargest(8).index:
        mean = tp.ablate_heads(model, [every[n]], mode="mean", reference=tokens)
        given = mean_and_error("mean_output", collapsed - losses(model, tokens, others(every[n]) + mean))
        table.loc[n, list(given)] = list(given.values())
        print(table.loc[n].round(3).to_dict(), flush=True)
    return table


def copying(model: Any) -> pd.DataFrame:
    """Per head: the loss added by distance 5 on the second copy of repeated random tokens, three draws of two texts."""
    start, n, rows = texts(model, 1)[:, :1].expand(2, 1), 48, []
    copies = []
    for seed in range(3):
        drawn = torch.randint(1000, model.cfg.d_vocab, (2, n), generator=torch.Generator().manual_seed(seed))
        copies.append(torch.cat([start, drawn, drawn], 1))

    def loss(hooks: list[Any]) -> Tensor:
        with torch.no_grad(), applied(model, hooks):
            logits = model(torch.cat(copies))[:, n + 1 : -1]
        targets = torch.cat(copies)[:, n + 2 :]
        return torch.stack([-_log_p(a, b).mean() for a, b in zip(logits, targets, strict=True)]).view(3, 2).mean(1)

    base = loss([])
    for layer, head in heads_of(model):
        added = loss(tp.dummy_distance(model, 5, heads=[(layer, head)])) - base
        rows.append({"layer": layer, "head": head} | {f"seed {n}": x for n, x in enumerate(added.tolist())})
    return pd.DataFrame(rows)


def labels(model: Any) -> pd.DataFrame:
    """Labels of all heads, without the streaming ablation."""
    return tp.head_labels(model, texts(model, 2), streaming=False, progress=False)


def label_counts(model: Any) -> pd.DataFrame:
    """How many heads have each label on three pairs of texts, each with three draws of the random sequences; ``near``:
    how many of all heads are within 0.05 of the threshold of 0.5, on either side."""
    pairs = {
        "speeches 0, 1": texts(model, 2),
        "speeches 2, 3": texts(model, 2, skip=2),
        "WikiText 0, 1": trained_and_random.articles(model, 2),
    }
    rows = []
    for name, tokens in pairs.items():
        for seed in range(3):
            table = tp.head_labels(model, tokens, streaming=False, seed=seed, progress=False)
            for label in ("previous_token", "local", "first_token", "induction", "duplicate_token"):
                has = table["label"].fillna("").str.split("+").map(lambda names, label=label: label in names)
                near = ((table[label] - 0.5).abs() < 0.05).sum()
                rows.append({"texts": name, "seed": seed, "label": label, "heads": has.sum(), "near": near})
            print(rows[-5:], flush=True)
    return pd.DataFrame(rows)


def flips(model: Any) -> pd.DataFrame:
    """Probability that the distance decides which of two keys a head prefers, by layer; trained and random."""
    tables = []
    for name, each in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        table = tp.preference_flips(each, texts(model, 1, 128), progress=False)
        means = table.groupby("layer")[["near", "far", "near_far"]].mean()
        tables.append(means.reset_index().assign(model=name))
    return pd.concat(tables)


LADDER = ["first_token", "distance", "distance+sink", "static", "additive", "banded"]


USED = ((1, 0), (2, 3), (3, 2), (8, 1), (11, 1), (16, 0), (18, 6), (20, 4))
GEMMA_USED = ((0, 3), (1, 3), (2, 3), (3, 2), (4, 1), (8, 0), (9, 1), (11, 1))  # the largest ``fixed`` of ``rotation``
IDLE = ((18, 8), (7, 2), (3, 3), (8, 1), (1, 0), (16, 0))
# L1H0, L8H1, L19H3, and 21 others drawn at random.
DRAWN = ((1, 0), (2, 3), (4, 2), (5, 4), (5, 6), (8, 0), (8, 1), (8, 5), (12, 5), (14, 4), (14, 8), (16, 2))
DRAWN += ((17, 4), (17, 7), (19, 0), (19, 3), (20, 6), (22, 2), (23, 3), (24, 2), (27, 4), (27, 8), (29, 0), (29, 3))
OF_KL = ["recovered_kl", "se_kl", "error_kl"]  # left out of tables that are read for the loss


def verdicts(
    model: Any, heads: Sequence[tuple[int, int]] = USED, of_demo: Any = None, fits: int = 3, demo: bool = True
) -> pd.DataFrame:
    """Verdicts from the loss of eight heads of this model, and of all of the demo model, on two disjoint sets of texts.

    Three texts of each set (``fits``) are for fits, three others are measured; ``estimate`` is the verdict without
    uncertainty.
    """
    tables, models = [], [(NAMES.get(model.cfg.n_layers, "another"), model, list(heads))]
    for name, each, some in [("demo", tp.load_demo_model(), of_demo), *models] if demo else models:
        for n in (0, 1):
            first = (fits + 3) * n
            fitted, heldout = texts(each, fits, skip=first), texts(each, 3, skip=first + fits)
            options = {"heads": some, "rungs": LADDER, "controls": [], "progress": False}
            ladder = tp.attention_ladder(each, fitted, heldout=heldout, **options)
            table, estimates = (tp.head_verdicts(ladder, measure="loss", confidence=x) for x in (0.95, 0))
            tables.append(table.assign(model=name, texts="ab"[n], estimate=estimates["verdict"]))
    found = pd.concat(tables)
    agreement(found)
    return found


def all_verdicts(model: Any, layers: Any = None, fits: int = 2) -> pd.DataFrame:
    """A verdict from the loss for each head: causal rungs fitted to two texts (``fits``) of 128 tokens, measured on
    three others."""
    fitted, heldout = texts(model, fits, 128), texts(model, 3, 128, skip=fits)
    options = {"heldout": heldout, "controls": [], "progress": False}
    table = tp.attention_ladder(model, fitted, layers=layers, rungs=["uniform"], **options)
    verdicts = tp.head_verdicts(table, measure="loss")
    needed = verdicts[~verdicts["verdict"].isin(["not used", "no effect"])][["layer", "head"]]
    heads = [(int(layer), int(head)) for layer, head in needed.to_numpy()]
    climbed = tp.attention_ladder(model, fitted, heads=heads, rungs=LADDER[:4], **options) if heads else table[:0]
    without = table[~pd.MultiIndex.from_frame(table[["layer", "head"]]).isin(heads)]
    return tp.head_verdicts(pd.concat([without, climbed]), measure="loss").sort_values(["layer", "head"])


def measures(model: Any, heads: Sequence[tuple[int, int]] = DRAWN) -> pd.DataFrame:
    """Verdicts of 24 heads from the loss and from divergences, by what is negligible, on two disjoint sets of texts:
    causal rungs fitted to two texts, measured on three others."""
    tables, options = [], {"heads": list(heads), "rungs": LADDER[:1] + LADDER[2:4], "controls": [], "progress": False}
    for name, some in {"a": texts(model, 10)[::2], "b": texts(model, 10)[1::2]}.items():
        ladder = tp.attention_ladder(model, some[3:], heldout=some[:3], **options)
        cases: list[dict[str, Any]] = [{"measure": "loss"}]
        cases += [{"measure": "kl", "negligible": least} for least in (0.0001, 0.0003, 0.001, 0.003, 0.01)]
        for case in cases:
            found, estimates = (tp.head_verdicts(ladder, confidence=x, **case) for x in (0.95, 0))
            tables.append(found.assign(texts=name, estimate=estimates["verdict"], **{"negligible": None} | case))
    return pd.concat(tables).astype({"negligible": float})


def rounding(model: Any) -> pd.DataFrame:
    """What running the model in bfloat16 instead of float32 does to predictions: divergence of four texts, in nats."""
    tokens = texts(model, 4)
    with torch.no_grad():
        exact, rounded = (each(tokens).float().log_softmax(-1) for each in (model, deepcopy(model).to(torch.bfloat16)))
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean(1)
    return pd.DataFrame({"text": range(len(kl)), "kl": kl.tolist()})


def agreement(found: pd.DataFrame) -> None:
    """Print how often verdicts on the two sets agree, of how many heads, and Cohen's kappa."""
    for name, table in found.groupby("model"):
        for column in ("estimate", "verdict"):
            both = table.pivot(index=["layer", "head"], columns="texts", values=column)
            if column == "verdict":
                both = both[~(both["a"] + both["b"]).str.contains("undecided")]
            same = (both["a"] == both["b"]).mean()
            chance = (both["a"].value_counts(normalize=True) * both["b"].value_counts(normalize=True)).sum()
            kappa = (same - chance) / (1 - chance) if chance < 1 else float("nan")
            print(f"{name}, {column}: {same:.2f} of {len(both)}, kappa {kappa:.2f}")


def ladder(model: Any) -> pd.DataFrame:
    """The ladder of all heads at once, and of every third layer's: fitted to two texts, measured on two others."""
    fitted, heldout = texts(model, 2), texts(model, 2, skip=2)
    options = {"heldout": heldout, "rungs": LADDER, "controls": [], "progress": False}
    every = tp.attention_ladder(model, fitted, unit="all", **options)
    options["rungs"] = [rung for rung in LADDER if rung != "additive"]
    some = tp.attention_ladder(model, fitted, unit="layer", layers=range(0, model.cfg.n_layers, 3), **options)
    return pd.concat([every, some, token_frequencies(model, heldout)]).drop(columns=OF_KL)


def static_texts(model: Any, fitted: Sequence[int] = (2, 4, 8)) -> pd.DataFrame:
    """Static attention in all heads at once, fitted to more and more texts; measured on the two texts of ``ladder``."""
    tables, options = [], {"heldout": texts(model, 2, skip=2), "rungs": ["static"], "controls": [], "progress": False}
    for n in fitted:
        others = texts(model, n + 2)[[k for k in range(n + 2) if k not in (2, 3)]]
        table = tp.attention_ladder(model, others, unit="all", **options)
        tables.append(table[table["rung"].isin(["static", "mean_output"])].drop(columns=OF_KL).assign(fitted=n))
        print(tables[-1].round(3).to_string(), flush=True)
    return pd.concat(tables)


def token_frequencies(model: Any, tokens: Tensor) -> pd.DataFrame:
    """The loss of a model that knows only how frequent tokens are in other speeches, with 0.1 added to each count."""
    speeches = gzip.decompress(stories.data_file("speeches-train.txt.gz").read_bytes()).decode()
    seen = torch.tensor(model.tokenizer(speeches)["input_ids"])
    counts = torch.bincount(seen, minlength=model.cfg.d_vocab).double() + 0.1
    loss = -(counts / counts.sum()).log()[tokens[:, 1:]].mean().item()
    return pd.DataFrame([{"rung": "token frequencies", "loss": loss}])


def idle(model: Any, heads: Sequence[tuple[int, int]] = IDLE) -> pd.DataFrame:
    """The ladder of heads that uniform attention costs much, and of two that are used: fitted to two texts, measured on
    four others."""
    return tp.attention_ladder(
        model,
        texts(model, 2),
        heldout=texts(model, 4, skip=2),
        heads=list(heads),
        rungs=["first_token", "distance+sink", "static"],
        controls=[],
        progress=False,
    )


def scales(model: Any, lengths: Sequence[int] = (256, 512, 2048)) -> pd.DataFrame:
    """By layer and length of one text: r and shares at controlled distances, trained and with random weights."""
    tables = []
    for length in lengths:
        text = texts(model, 1, length, skip=LONGEST)
        for name, each in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
            table = tp.controlled_distance(each, text, progress=False).drop(columns="head")
            means = table.groupby("layer").mean().drop(columns=["mean", "total"])
            tables.append(means.reset_index().assign(length=length, model=name))
            print(length, name, flush=True)
    return pd.concat(tables)


def subspaces(model: Any) -> pd.DataFrame:
    """By layer and band of wavelengths: concentration of keys, and shares of a head's variance; trained and random."""
    tokens, bands = texts(model, 4, skip=10), BANDS
    columns = ["key_concentration", "query_concentration", "distance", "semantic", "interaction"]
    tables = []
    for name, each in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        table = tp.subspace_patterns(each, tokens, sinks=8, progress=False)
        table["wavelengths below"] = pd.cut(table["wavelength"], bands, labels=bands[1:]).astype(float)
        by_band = table.groupby(["layer", "head", "wavelengths below"])[columns]
        means = by_band.mean()
        means[columns[2:]] = by_band.sum()[columns[2:]]  # shares of the head add up
        tables.append(means.groupby(["layer", "wavelengths below"]).mean().reset_index().assign(model=name))
    return pd.concat(tables)


def as_small(model: Any) -> pd.DataFrame:
    """What the small models' tables have, of SmolLM2: ``table``, ``row``, ``column`` and ``value``, means over heads;
    trained and of one random copy of standard deviation 0.02. Four texts of 256 tokens without their first 20;
    distances 0 to 255."""
    tokens, rows = texts(model, 4, skip=10), []
    for weights, each in {"trained": model, "random": next(tp.random_control(model, [0], std=0.02))}.items():
        options = {"model": each, "tokens": tokens, "sinks": 20, "progress": False}

        def add(table: str, row: Any, means: pd.Series, weights: str = weights) -> None:
            rows.extend(
                {"table": table, "weights": weights, "row": row, "column": c, "value": v} for c, v in means.items()
            )

        for top in (LENGTH, 16, 4):
            shares = tp.subspace_patterns(distances=range(top), **options)
            shares["band"] = pd.cut(shares["wavelength"], BANDS, labels=BANDS[1:]).astype(float)
            by_band = shares.groupby(["layer", "head", "band"])[["distance", "semantic", "interaction"]].sum()
            for band, some in by_band.groupby("band"):
                add(f"shares at distances below {top}", band, some.mean())
        fits = tp.controlled_distance(**options).set_index(["layer", "head"])
        plane = tp.positional_symbolic(by_subspace=True, **options)
        plane["band"] = pd.cut(2 * torch.pi / plane["frequency"], BANDS, labels=BANDS[1:]).astype(float)
        for band, some in plane.groupby("band"):
            add("plane", band, some[["positional", "symbolic"]].mean())
        heads = tp.positional_symbolic(**options).groupby(["layer", "head"])[["positional", "symbolic"]].mean()
        with_query = fits["distance"] / (1 - fits["query"])
        pairs = {"distance": fits["distance"], "distance / (1 - query)": with_query}
        add("plane and shares", "positional", pd.Series({k: v.corr(heads["positional"]) for k, v in pairs.items()}))
        pairs = {"query:key": fits["query:key"], "key": fits["key"]}
        add("plane and shares", "symbolic", pd.Series({k: v.corr(heads["symbolic"]) for k, v in pairs.items()}))
        add("plane and shares", "mean", heads.mean())
        for start in range(0, 30, 6):
            add("r of six layers from", start, fits.loc[start : start + 5, ["r_three_axis", "r_two_axis"]].mean())
        bounds, agree = [], []
        for layer in tp.capture(each, tokens, scores=False):
            spec, q, k = layer.spec, layer.q[:, 20:].flatten(0, 1), layer.k[:, 20:].flatten(0, 1)
            moments = Moments.from_qk(q, k, spec.rotary)
            for component in ("distance:key", "distance:query:key"):
                bound = interaction_bound(moments, range(LENGTH), scale=spec.scale, component=component)
                assert ((bound["share"] <= bound["pairwise"]) & (bound["pairwise"] <= bound["separate"])).all()
                bounds.append(bound.assign(component=component))
            agree.append(at_distance(layer))
        for component, some in pd.concat(bounds).groupby("component"):
            add("bounds", component, some[["share", "pairwise", "separate"]].mean())
        near = torch.cat(agree).mean(0)
        add(
            "agreement with other distances",
            "r",
            pd.Series({d: near[d].item() for d in (0, 1, 2, 4, 8, 16, 32, 64, 128)}),
        )
        print(weights, flush=True)
    return pd.DataFrame(rows)


BANDS = [0.0, 16.0, 256.0, 4096.0, float("inf")]  # of wavelengths


def at_distance(layer: Any) -> Tensor:
    """``[head, distance]``: the correlation over keys of the mean score at a distance with that at all; first text."""
    (q, _), (k, _) = (to_complex(x[0, 20:].double(), layer.spec.rotary) for x in (layer.q, layer.k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    turn = torch.exp(1j * torch.arange(200.0)[:, None] * layer.spec.rotary.frequencies)
    at = torch.einsum("dc,hc,jhc->hdj", turn, q.mean(0), k.conj()).real
    at = at - at.mean(-1, keepdim=True)
    return torch.cosine_similarity(at, at.mean(1, keepdim=True), dim=-1)


def sources(model: Any) -> pd.DataFrame:
    """Where the distance profile of the three heads with the largest share of distance comes from: shares of the
    sources of the mean query (with whatever key) and of the mean key, summed by kind."""
    table = table_of(model, "heads").nlargest(3, "share_distance")
    rows = []
    for layer, head in table[["layer", "head"]].astype(int).to_numpy():
        found = tp.distance_sources(model, texts(model, 2), int(layer), heads=[int(head)], sinks=1).to_frame()
        sums = {side: found.groupby(found[f"{side}_source"].map(kind))["share"].sum() for side in ("query", "key")}
        rows.append(pd.DataFrame(sums).rename_axis("source").reset_index().assign(layer=layer, head=head))
        print(rows[-1], flush=True)
    return pd.concat(rows)


def kind(source: str) -> str:
    """MLPs and heads of the first three layers, and of later ones: ``L2 MLP``, ``L15H3``, ``embedding``, ``bias``."""
    if not source.startswith("L"):
        return source
    layer = int("".join(x for x in source[1:3] if x.isdigit()))
    return f"{'MLPs' if 'MLP' in source else 'heads'} of layers {'0 to 2' if layer < 3 else '3 and later'}"


LONGEST = 3  # the speech with 2048 tokens and more that is read where one is enough
TRAINED = 8192  # tokens
EDGES = [512, 1024, 2048, 4096, TRAINED, 12288]
BEYOND = 11264
WATCHED = (1, 8, 16, 24, 29)
PART = 512


def lengths(model: Any) -> pd.DataFrame:
    """Loss by position of one long text (WikiText-2's test set), in parts against a cache: the model was trained on
    8192 tokens. ``distance``: the root mean square Mahalanobis distance of attention outputs of five layers from those
    of the plain run before position 8192, per coordinate; about 1 there. ``layer n``: the share of its outputs that are
    outside the circle with 99 % of those, on their two principal components. One part of 512 tokens after another."""
    wiki = gzip.decompress(stories.data_file("wikitext2-test.txt.gz").read_bytes()).decode()
    tokens = model.to_tokens(wiki[: 6 * EDGES[-1]], truncate=False)[:, : EDGES[-1]]
    assert tokens.shape[1] == EDGES[-1]
    ways: dict[str, list[Any]] = {
        "plain": [],
        f"distances at most {TRAINED - 1}": tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1)),
        "positions divided by 1.5": tp.position_interpolation(model, 1.5),
        f"window of {TRAINED // 2} and 4 sinks": tp.lambda_mask(model, 4, TRAINED // 2, TRAINED // 2),
    }
    rows, references, planes = [], {}, {}
    with longer_context(model, EDGES[-1]):
        for name, hooks in ways.items():
            loss, outputs = in_parts(model, tokens, hooks)
            if not references:
                references = {layer: fit_reference(z[:, EDGES[0] : TRAINED]) for layer, z in outputs.items()}
                planes = {layer: plane(z[:, EDGES[0] : TRAINED]) for layer, z in outputs.items()}
            for start, stop in pairwise(EDGES):
                far = [references[layer].distance(z[:, start:stop]) for layer, z in outputs.items()]
                size = torch.stack(far).square().mean().sqrt() / model.cfg.d_head**0.5
                rows.append({"intervention": name, "start": start, "stop": stop, "loss": loss[start:stop].mean()})
                rows[-1]["distance"] = size
                for layer, (mean, axes, radius) in planes.items():
                    points = (side_by_side(outputs[layer][:, start:stop]) - mean) @ axes
                    rows[-1][f"layer {layer}"] = (points.norm(dim=1) > radius).double().mean().item()
                print(rows[-1], flush=True)
    return pd.DataFrame(rows).astype({"loss": float, "distance": float})


def beyond(model: Any) -> pd.DataFrame:
    """Loss in parts of 512 tokens of three long texts (WikiText-2's test set), from position 4096 on. ``shorter``: the
    same tokens where the first 4096 of the text are left out, so that no position exceeds 8191; the model was trained
    on 8192 tokens."""
    wiki = gzip.decompress(stories.data_file("wikitext2-test.txt.gz").read_bytes()).decode()
    ids, stop, half, rows = model.to_tokens(wiki, truncate=False)[0], BEYOND, TRAINED // 2, []
    with longer_context(model, stop):
        for text in range(3):
            tokens = torch.cat([ids[:1], ids[1 + text * (stop - 1) :][: stop - 1]])[None]
            assert tokens.shape[1] == stop
            shorter = torch.cat([tokens[:, :1], tokens[:, half + 1 :]], 1)
            whole, part = (in_parts(model, x, [])[0] for x in (tokens, shorter))
            for start in range(half, stop, PART):
                row = {"text": text, "start": start, "loss": whole[start : start + PART].mean().item()}
                rows.append(row | {"shorter": part[start - half : start - half + PART].mean().item()})
            print(rows[-8:], flush=True)
    return pd.DataFrame(rows)


def side_by_side(z: Tensor) -> Tensor:
    return z.transpose(0, 1).flatten(1).double()


def plane(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of ``[head, pos, d_head]`` outputs, two principal components in standard deviations, and the radius of
    the circle with 99 % of the outputs."""
    x = side_by_side(z)
    mean = x.mean(0)
    _, spread, axes = torch.linalg.svd(x - mean, full_matrices=False)
    scaled = axes[:2].T / spread[:2] * len(x) ** 0.5
    return mean, scaled, ((x - mean) @ scaled).norm(dim=1).quantile(0.99)


def in_parts(model: Any, tokens: Tensor, hooks: list[Any]) -> tuple[Tensor, dict[int, Tensor]]:
    """``[pos - 1]`` nats, and ``[head, pos, d_head]`` attention outputs of the watched layers."""
    kept: dict[int, list[Tensor]] = {layer: [] for layer in WATCHED}
    watch = [(f"blocks.{n}.attn.hook_z", lambda z, hook, n=n: kept[n].append(z[0].clone())) for n in WATCHED]
    found, cache = [], TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, *watch]):
        for start in range(0, tokens.shape[1], PART):
            logits = model(tokens[:, start : start + PART], past_kv_cache=cache)
            found.append(-_log_p(logits[0, : len(tokens[0]) - 1 - start], tokens[0, start + 1 : start + 1 + PART]))
    return torch.cat(found), {n: torch.cat(z).transpose(0, 1) for n, z in kept.items()}


def downstream_questions(model: Any, questions: int = 100) -> pd.DataFrame:
    """Multiple choice from held-out speeches under exchanged neighbours, with chance (.5) and standard errors."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().replace("\f", " ")
    tables = []
    for ask in downstream.TASKS:
        drawn = [q for q in downstream.questions_from_text(speeches, ask) if len(str(q.context)) < 600]
        some = [drawn[int(i)] for i in torch.linspace(0, len(drawn) - 1, questions)]
        asked = [replace(q, context=model.to_tokens(q.context)[0]) for q in some]
        asked = [replace(q, choices=[model.to_tokens(c, prepend_bos=False)[0] for c in q.choices]) for q in asked]
        curve = tp.perturbation_curve(
            model, texts(model, 1, 64), ["order"], [0, 0.05, 0.25, 1], seeds=1, downstream=asked, progress=False
        )
        right = curve["downstream"]
        columns = {"task": ask, "questions": len(asked), "se": (right * (1 - right) / len(asked)) ** 0.5}
        tables.append(curve[["kind", "fraction", "downstream"]].assign(**columns))
        print(tables[-1].round(3).to_string(), flush=True)
    return pd.concat(tables)


STUDIES: list[Callable[..., pd.DataFrame]] = [interventions, heads, layers, rotation, sufficiency, restored, copying]
STUDIES += [labels, label_counts, flips, verdicts, ladder, static_texts, idle, all_verdicts, measures]
STUDIES += [rounding, scales, head_effects.head_search, head_effects.every_verdict]
STUDIES += [head_effects.replaced_heads, text_needed.text_needed, text_needed.draws_needed]
STUDIES += [subspaces, as_small, sources, lengths, beyond, downstream_questions]
OPTIONS: dict[str, dict[str, Any]] = {  # of the larger model less, as it takes twice as long
    "gemma3": {
        "scales": {"lengths": (256, 512)},
        "sufficiency": {"drawn": (16,)},
        # Four tokens and more for each of the 256 features of a key.
        "verdicts": {"heads": GEMMA_USED, "fits": 4, "demo": False},
        "all_verdicts": {"fits": 8},
        "downstream_questions": {"questions": 50},
        "replaced_heads": {"shares": (2, 4, 9), "by": ("static",), "control": False},
    }
}


def main() -> None:
    torch.set_num_threads(1)
    names = [each.__name__ for each in STUDIES]
    wanted = [x for x in sys.argv[1:] if x in names] or names
    name = next((x for x in sys.argv[1:] if x not in names), "smollm2")
    folder = FOLDER.with_name(name.partition("-")[0])
    folder.mkdir(exist_ok=True)
    model = tp.load_model(name)
    for study in STUDIES:
        if study.__name__ in wanted:
            options = OPTIONS.get(folder.name, {}).get(study.__name__, {})
            study(model, **options).round(5).to_csv(folder / f"{study.__name__}.csv", index=False)


if __name__ == "__main__":
    main()
