"""What position does in SmolLM2-135M-Instruct (4-bit weights, dequantised; instruction-tuned): the tables behind the
pages, one csv per study in ``docs/figures/smollm2/``.

    python docs/figures/smollm2.py interventions layers rotation   # which; all by default. Minutes of one core each

Texts: the first 256 tokens of speeches of 2001 to 2021 from the folder that ``POSDISENT_DATA`` names.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import stories
import torch
import trained_and_random
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

FOLDER = Path(__file__).with_name("smollm2")
LENGTH = 256


def texts(model: Any, n: int, length: int = LENGTH, skip: int = 0) -> Tensor:
    """``[n, pos]``: the beginnings of n speeches, each behind its BOS."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    return torch.stack([model.to_tokens(speech)[0, :length] for speech in speeches[skip : skip + n]])


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
    """Per layer: the loss added by one intervention in this layer alone, and what of it is left by all but this."""
    tokens = texts(model, 4)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    tools: dict[str, Callable[..., list[Any]]] = {
        "every distance 5": lambda some: tp.dummy_distance(model, 5, layers=some),
        "shuffled": lambda some: tp.swap_positions(model, order, layers=some),
        "distances at most 16": lambda some: tp.remap_distance(model, lambda d: d.clamp(max=16), layers=some),
    }
    base, n = losses(model, tokens), model.cfg.n_layers
    rows = []
    for name, tool in tools.items():
        everywhere = (losses(model, tokens, tool(None)) - base).mean().item()
        for layer in range(n):
            alone = (losses(model, tokens, tool([layer])) - base).mean().item()
            row = {"intervention": name, "layer": layer, "alone": alone, "everywhere": everywhere}
            if name != "distances at most 16":
                others = [other for other in range(n) if other != layer]
                row["restored"] = everywhere - (losses(model, tokens, tool(others)) - base).mean().item()
            rows.append(row)
        print(name, flush=True)
    return pd.DataFrame(rows)


def rotation(model: Any) -> pd.DataFrame:
    """Per head: the loss added when its pairs all have distance 5 (necessity), and by mean ablation of the head."""
    tokens = texts(model, 2)
    base = losses(model, tokens).mean()
    ablated = tp.head_ablation(model, tokens, mode="mean", progress=False).set_index(["layer", "head"])
    rows = []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            added = losses(model, tokens, tp.dummy_distance(model, 5, heads=[(layer, head)])).mean() - base
            rows.append({"layer": layer, "head": head, "fixed": added.item()})
        print(layer, flush=True)
    table = pd.DataFrame(rows)
    table["mean_ablated"] = ablated["effect"].to_numpy()
    return table


def sufficiency(model: Any) -> pd.DataFrame:
    """The loss added when all heads but the k with the largest ``fixed`` of ``rotation`` have every distance 5.

    Chosen on two texts, measured on four others; the same with k random heads, and with k heads of the largest layers.
    """
    effects = pd.read_csv(FOLDER / "rotation.csv")
    ranked = [(int(a), int(b)) for a, b in effects.sort_values("fixed", ascending=False)[["layer", "head"]].to_numpy()]
    shuffled = [ranked[i] for i in torch.randperm(len(ranked), generator=torch.Generator().manual_seed(0)).tolist()]
    tokens = texts(model, 4, skip=2)
    base = losses(model, tokens).mean()
    rows = []
    for name, ordered in {"largest effect": ranked, "random": shuffled}.items():
        for k in (0, 1, 2, 4, 8, 16, 32, 64, 128, 200, 240):
            added = losses(model, tokens, tp.dummy_distance(model, 5, heads=ordered[k:])).mean() - base
            rows.append({"heads": name, "k": k, "kept": added.item()})
            if k:
                taken = losses(model, tokens, tp.dummy_distance(model, 5, heads=ordered[:k])).mean() - base
                rows[-1]["taken"] = taken.item()
            print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def perturbation(model: Any) -> pd.DataFrame:
    """Added loss by kind and fraction of units that are exchanged with a neighbour."""
    fractions = [0.01, 0.05, 0.1, 0.25, 0.5]
    return tp.perturbation_curve(
        model, texts(model, 4), ["order", "index", "feature"], fractions, seeds=2, progress=False
    )


def labels(model: Any) -> pd.DataFrame:
    """Head labels, and flips of preference by layer."""
    return tp.head_labels(model, texts(model, 2), progress=False)


def flips(model: Any) -> pd.DataFrame:
    return tp.preference_flips(model, texts(model, 1, 128), progress=False)


LADDER = ["distance", "distance+sink", "static", "additive", "banded"]


def verdicts(model: Any) -> pd.DataFrame:
    """Verdicts of 20 heads of this model, and of all heads of the demo model, on two disjoint sets of six texts.

    Three texts of each set are for fits, three are measured; ``estimate`` is the verdict without uncertainty.
    """
    random = torch.Generator().manual_seed(0)
    drawn = [(layer, int(torch.randint(9, (1,), generator=random))) for layer in range(0, 30, 2)]
    heads = sorted({(16, 0), (1, 2), (2, 1), (11, 1), (18, 6), *drawn})
    tables = []
    for name, each, some in (("demo", tp.load_demo_model(), None), ("SmolLM2-135M-Instruct", model, heads)):
        for n in (0, 1):
            fitted, heldout = texts(each, 3, skip=6 * n), texts(each, 3, skip=6 * n + 3)
            options = {"heads": some, "rungs": LADDER, "controls": [], "progress": False}
            ladder = tp.attention_ladder(each, fitted, heldout=heldout, **options)
            table, estimates = tp.head_verdicts(ladder), tp.head_verdicts(ladder, confidence=0)
            tables.append(table.assign(model=name, texts="ab"[n], estimate=estimates["verdict"]))
    found = pd.concat(tables)
    agreement(found)
    return found


def agreement(found: pd.DataFrame) -> None:
    """Print how often verdicts on the two sets agree, of how many heads, and Cohen's kappa."""
    for name, table in found.groupby("model"):
        for column in ("estimate", "verdict"):
            both = table.pivot(index=["layer", "head"], columns="texts", values=column)
            if column == "verdict":
                both = both[~(both["a"] + both["b"]).str.contains("undecided")]
            same = (both["a"] == both["b"]).mean()
            chance = (both["a"].value_counts(normalize=True) * both["b"].value_counts(normalize=True)).sum()
            print(f"{name}, {column}: {same:.2f} of {len(both)}, kappa {(same - chance) / (1 - chance):.2f}")


def ladder(model: Any) -> pd.DataFrame:
    """The ladder of all heads at once, and of every third layer's: fitted to two texts, measured on two others."""
    fitted, heldout = texts(model, 2), texts(model, 2, skip=2)
    options = {"heldout": heldout, "rungs": LADDER, "controls": [], "progress": False}
    every = tp.attention_ladder(model, fitted, unit="all", **options)
    options["rungs"] = [rung for rung in LADDER if rung != "additive"]
    some = tp.attention_ladder(model, fitted, unit="layer", layers=range(0, 30, 3), **options)
    return pd.concat([every, some])


STUDIES = [interventions, heads, layers, rotation, sufficiency, perturbation, labels, flips, verdicts, ladder]


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    model = tp.load_model("smollm2")
    for study in STUDIES:
        if study.__name__ in (sys.argv[1:] or [each.__name__ for each in STUDIES]):
            study(model).round(5).to_csv(FOLDER / f"{study.__name__}.csv", index=False)


if __name__ == "__main__":
    main()
