"""How much text is enough, and how many draws of labels: how far two measurements of every head differ."""

from __future__ import annotations

from time import process_time
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import trained_and_random
from plotly.subplots import make_subplots
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments.causal.estimated_effects import changes_of_results, in_layers
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.experiments.measuring.text_parts import differentiable_texts
from tl_posdisent.hooks.hook_list import any_heads
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.utils.progress import progress_bar

LENGTH, TEXTS, DRAWS = 128, 16, 48
ORDERS = {"r_held_out": 2}  # of the texts, drawn at random; else eight
HEAD = ["layer", "head"]
NAMES = {
    "r": "r of one text",
    "r_held_out": "r, profile of other texts",
    "what - where": "what − where",
}
KL = {"mean output": "KL, mean output", "distance 5": "KL, every distance 5"}
COLOURS = ("#999999", "#0072b2", "#009e73", "#d55e00", "#cc79a7")
SHOWN = 16  # draws of labels in the figure


def text_needed(model: Any, of: int = TEXTS) -> pd.DataFrame:
    """One row per measure and number of texts: the error of a mean over so many, and how well two of them rank heads.

    Texts of 128 tokens in random orders are divided into sets of n. ``error`` is the root mean square difference of two
    sets, over heads and pairs of sets, divided by √2; ``spread`` the standard deviation over heads of the mean of all
    texts; ``rank`` the rank correlation of two sets, mean over pairs.
    """
    texts = trained_and_random.texts(model)[:of, :LENGTH]
    found = {name: torch.stack(rows) for name, rows in by_text(model, texts).items()}
    generator, rows = torch.Generator().manual_seed(0), []
    orders = [torch.randperm(of, generator=generator) for _ in range(8)]
    for n in (1, 2, 4, 8)[: of.bit_length() - 1]:
        sets = {name: torch.cat([means(x[order], n) for order in orders]) for name, x in found.items()}
        if n > 1:  # the profile is that of the other texts of a set
            parts = torch.cat([texts[order].view(-1, n, texts.shape[1]) for order in orders[: ORDERS["r_held_out"]]])
            sets["r_held_out"] = torch.stack([column(additivity(model, x), "r_held_out") for x in parts])
        rows += [{"measure": name, "texts": n, "tokens": n * texts.shape[1], **compared(x)} for name, x in sets.items()]
        print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def means(values: Tensor, n: int) -> Tensor:
    """``[set, head]`` of ``[text, head]``: each n texts in turn are a set."""
    return values.view(-1, n, values.shape[1]).mean(1)


def compared(sets: Tensor) -> dict[str, float]:
    """Each set ``[set, head]`` with the next."""
    pairs = sets.view(len(sets) // 2, 2, -1)
    ranks = [pd.Series(a).corr(pd.Series(b), method="spearman") for a, b in pairs.tolist()]
    return {
        "error": float((pairs[:, 0] - pairs[:, 1]).square().mean().div(2).sqrt()),
        "spread": float(sets.mean(0).std()),
        "rank": sum(ranks) / len(ranks),
        "pairs": len(pairs),
    }


def by_text(model: Any, texts: Tensor) -> dict[str, list[Tensor]]:
    """For each text a number per head."""
    found: dict[str, list[Tensor]] = {"r": [], "what - where": []}
    for text in texts[:, None]:
        table = additivity(model, text)
        found["r"].append(column(table, "r"))
        found["what - where"].append(column(table, "share_key") - column(table, "share_distance"))
    return found


def draws_needed(model: Any, of: int = TEXTS, draws: int = DRAWS) -> pd.DataFrame:
    """One row per intervention and number of draws and texts: how far two estimates of every head's divergence differ.

    Texts and random orders are those of ``text_needed``. ``error``, ``spread`` and ``rank`` are of two sets of texts,
    each with draws of its own; ``error_draws`` and ``rank_draws`` of other draws for the *same* texts, so the square
    of ``error`` is the sum of that of ``error_draws`` and of the variance over texts. ``passes`` is the cost of both
    interventions together for such a set, in forward passes of one text, by processor time.
    """
    texts = trained_and_random.texts(model)[:of, :LENGTH]
    interventions = {
        "mean output": tp.ablate_heads(model, None, mode="mean", reference=texts[:4]),
        "distance 5": tp.dummy_distance(model, 5),
    }
    each = [curvatures(model, text, interventions, draws, seed) for seed, text in enumerate(texts[:, None])]
    of_text, of_draw = costs(model, texts[:1], interventions)
    generator, rows = torch.Generator().manual_seed(0), []
    orders = [torch.randperm(of, generator=generator) for _ in range(8)]
    for name in interventions:
        found = torch.stack([of_one[name] for of_one in each])  # text, draw, head
        for d in (4, 8, 16, 24):
            one, other = found[:, :d].mean(1), found[:, draws // 2 :][:, :d].mean(1)
            for n in (1, 2, 4, 8)[: of.bit_length() - 1]:
                sets = torch.cat([means(one[order], n) for order in orders])
                same = torch.stack([sets, torch.cat([means(other[order], n) for order in orders])], 1).flatten(0, 1)
                again = {f"{key}_draws": value for key, value in compared(same).items() if key in ("error", "rank")}
                size = {"measure": name, "draws": d, "texts": n, "tokens": n * texts.shape[1]}
                rows.append(size | compared(sets) | again | {"passes": n * (of_text + d * of_draw)})
                print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def curvatures(model: Any, text: Tensor, interventions: Any, draws: int, seed: int) -> dict[str, Tensor]:
    """``[draw, head]`` by intervention: what each draw of labels estimates of the divergence, nats per prediction."""
    reading = read_model(model, None)
    _, parts = differentiable_texts(model, text, None, next_token_loss)
    changes = in_layers(interventions, any_heads(reading, None, None))
    by_layer: dict[str, list[Tensor]] = {name: [] for name in interventions}
    with running(reading.model), progress_bar(desc="passes", disable=True) as bar:
        for x in changes_of_results(reading.model, changes, parts, draws=draws, seed=seed, bar=bar):
            products = torch.einsum("gtphd,tphd->gth", x.gradients[1:], x.change)[:, 0]
            by_layer[x.where.name].append(products.square() / 2 / x.n_predictions)
    return {name: torch.cat(layers, 1) for name, layers in by_layer.items()}


def costs(model: Any, text: Tensor, interventions: Any, repeats: int = 5) -> tuple[float, float]:
    """The cost of ``head_effects`` without runs: of a text, and of each draw, in forward passes by processor time."""

    def seconds(action: Any) -> float:
        begun = process_time()
        action()
        return process_time() - begun

    effects = {"tokens": text, "interventions": interventions, "exact": 0, "progress": False}
    with torch.no_grad():
        forward = min(seconds(lambda: model(text)) for _ in range(repeats))
    few, many = (
        min(seconds(lambda d=d: tp.head_effects(model, draws=d, **effects)) for _ in range(repeats)) for d in (4, 16)
    )
    of_draw = (many - few) / 12
    return (few - 4 * of_draw) / forward, of_draw / forward


def additivity(model: Any, texts: Tensor) -> pd.DataFrame:
    return tp.additivity(model, texts, progress=False).groupby(HEAD, as_index=False).mean()


def column(table: pd.DataFrame, name: str) -> Tensor:
    """``[layer * head]``: a column in the order of the heads."""
    return torch.tensor(table.sort_values(HEAD)[name].to_numpy())


def picture(scores: pd.DataFrame, divergences: pd.DataFrame) -> go.Figure:
    """Error in units of the spread over heads, and rank correlation, against tokens: a colour for each measure."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    table = pd.concat([scores, divergences[divergences["draws"] == SHOWN]])
    table = table.assign(relative=table["error"] / table["spread"])
    for (name, title), colour in zip((NAMES | KL).items(), COLOURS, strict=True):
        rows = table[table["measure"] == name]
        style = {"mode": "lines+markers", "line": {"color": colour}, "name": title}
        for place, y in enumerate(("relative", "rank"), 1):
            figure.add_trace(go.Scatter(x=rows["tokens"], y=rows[y], showlegend=place == 1, **style), row=1, col=place)
    figure.update_xaxes(title="tokens", type="log", tickvals=[128, 256, 512, 1024])
    figure.update_yaxes(title="error / standard deviation over heads", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="rank correlation of two sets", row=1, col=2)
    return figure.update_layout(title="Two measurements of every head of SmolLM2-135M, on different texts")
