"""How much text is enough: how far two measurements of every head differ that read different texts, by their length."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import trained_and_random
from plotly.subplots import make_subplots
from torch import Tensor

import tl_posdisent as tp

LENGTH, TEXTS = 128, 16
ORDERS = {"r_held_out": 2}  # of the texts, drawn at random; else eight
HEAD = ["layer", "head"]
NAMES = {
    "r": "r of one text",
    "r_held_out": "r, profile of other texts",
    "what - where": "what − where",
    "mean output": "KL, mean output",
    "distance 5": "KL, every distance 5",
}
COLOURS = ("#999999", "#0072b2", "#009e73", "#d55e00", "#cc79a7")


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
    found: dict[str, list[Tensor]] = {"r": [], "what - where": [], "mean output": [], "distance 5": []}
    interventions = {
        "mean output": tp.ablate_heads(model, None, mode="mean", reference=texts[:4]),
        "distance 5": tp.dummy_distance(model, 5),
    }
    for text in texts[:, None]:
        table = additivity(model, text)
        found["r"].append(column(table, "r"))
        found["what - where"].append(column(table, "share_key") - column(table, "share_distance"))
        effects = tp.head_effects(model, text, interventions, exact=0, draws=4, progress=False)
        for name, some in effects.groupby("intervention"):
            found[str(name)].append(column(some, "curvature"))
    return found


def additivity(model: Any, texts: Tensor) -> pd.DataFrame:
    return tp.additivity(model, texts, progress=False).groupby(HEAD, as_index=False).mean()


def column(table: pd.DataFrame, name: str) -> Tensor:
    """``[layer * head]``: a column in the order of the heads."""
    return torch.tensor(table.sort_values(HEAD)[name].to_numpy())


def picture(table: pd.DataFrame) -> go.Figure:
    """Error in units of the spread over heads, and rank correlation, against tokens: a colour for each measure."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    table = table.assign(relative=table["error"] / table["spread"])
    for (name, title), colour in zip(NAMES.items(), COLOURS, strict=True):
        rows = table[table["measure"] == name]
        style = {"mode": "lines+markers", "line": {"color": colour}, "name": title}
        for place, y in enumerate(("relative", "rank"), 1):
            figure.add_trace(go.Scatter(x=rows["tokens"], y=rows[y], showlegend=place == 1, **style), row=1, col=place)
    figure.update_xaxes(title="tokens", type="log", tickvals=[128, 256, 512, 1024])
    figure.update_yaxes(title="error / standard deviation over heads", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="rank correlation of two sets", row=1, col=2)
    return figure.update_layout(title="Two measurements of every head of SmolLM2-135M, on different texts")
