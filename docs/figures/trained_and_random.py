"""Which statistic of additivity separates a trained language model from random weights? SmolLM2-135M-Instruct (4-bit
weights, dequantised; instruction-tuned) beside five random initialisations, 30 texts of 256 tokens.

    python docs/figures/trained_and_random.py     # about forty minutes on one core; goes on from its csv

Texts: three disjoint parts of each of ten speeches of 2001 to 2021, read from the folder that ``POSDISENT_DATA`` names.
Statistics of one text, or pooled over 3 or 10, take one part of every speech; 30 texts are all parts.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pandas as pd
import stories
import torch
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.rope import Moments, decompose

LENGTH, SEEDS = 256, range(5)
CSV = Path(__file__).with_suffix(".csv")


def texts(model: Any) -> Tensor:
    """``[30, pos]``: the first parts of ten speeches, then the second, then the third; each behind its BOS."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    ids = [model.to_tokens(speech)[0] for speech in speeches[:10]]
    rest = LENGTH - 1
    parts = [torch.cat([row[:1], row[1 + n * rest : 1 + (n + 1) * rest]]) for n in range(3) for row in ids]
    return torch.stack(parts)


def key_similarity(k: Tensor) -> Tensor:
    """``[kv_head]``: mean cosine of the keys of two positions of one text, the first position left out."""
    unit = torch.nn.functional.normalize(k[:, 1:].double(), dim=-1)
    n = unit.shape[1]
    return ((unit.sum(1).square().sum(-1) - n) / (n * (n - 1))).mean(0)


def held_out(scores: Tensor, profile: Tensor, steps: int = 300) -> tuple[Tensor, Tensor]:
    """r² of a given distance profile with the text's own query and key components, and r² of these two alone.

    Both ``[text, head]``, by backfitting: rows and columns get the mean of what is left, in turn.
    """
    n = scores.shape[-1]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    d = torch.arange(n)[:, None] - torch.arange(n)
    count = mask.sum().item()
    x = torch.where(mask, scores.double(), 0.0)
    total = torch.where(mask, x - x.sum((-2, -1), keepdim=True) / count, 0.0).square().sum((-2, -1))
    found = []
    for left in (torch.where(mask, x - profile.double()[..., d.clamp(0)], 0.0), x):
        rest = left
        for _ in range(steps):
            rest = torch.where(mask, rest - rest.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True), 0.0)
            rest = torch.where(mask, rest - rest.sum(-2, keepdim=True) / mask.sum(-2, keepdim=True), 0.0)
        found.append(1 - rest.square().sum((-2, -1)) / total)
    return found[0], found[1]


def of_scores(scores: Tensor) -> dict[str, Tensor]:
    """Statistics ``[head]`` of the scores ``[10, head, query, key]`` of ten texts."""
    fit = tp.fit_additive(scores)
    spread = scores.double()[..., fit.mask].std(-1, correction=0)
    profile = tp.fit_additive(scores[5:], pool=True).distance
    with_profile, without = held_out(scores[:2], profile)
    attention = tp.fit_attention(scores[:2])
    kl = attention.kl.mean(-1)
    return {
        "r, one text": fit.r.mean(0),
        "r, 3 texts": tp.fit_additive(scores[:3], pool=True).r,
        "r, 10 texts": tp.fit_additive(scores, pool=True).r,
        "r, profile of other texts": with_profile.clamp(0).sqrt().mean(0),
        "r, no distance": without.clamp(0).sqrt().mean(0),
        "std of scores": spread.mean(0),
        "std of residual": (spread * (1 - fit.r2).sqrt()).mean(0),
        "attention explained": attention.explained.mean(0),
        "attention KL": kl.mean(0),
        "attention KL of uniform": (kl / (1 - attention.explained)).mean(0),
    }


def of_moments(parts: list[Moments], scale: float) -> dict[str, Tensor]:
    """Shares at controlled distances, 0 to 255: mean over single texts, then of 3, 10 and 30 texts together."""
    found = {}
    groups = {"one text": [[x] for x in parts[:10]], "3 texts": [parts[:3]], "10 texts": [parts[:10]]}
    for label, some in {**groups, "30 texts": [parts]}.items():
        tables = [decompose(sum(group[1:], group[0]), range(LENGTH), scale=scale).to_frame() for group in some]
        mean = sum(tables[1:], tables[0]) / len(tables)
        for name in ("two_axis", "three_axis"):
            found[f"controlled {name}, {label}"] = torch.tensor(mean[f"r_{name}"].to_numpy())
    return found


def measure(model: Any, tokens: Tensor) -> pd.DataFrame:
    """One row per layer: means over its heads."""
    found: dict[int, dict[str, Tensor]] = {}
    moments: dict[int, list[Moments]] = {}
    for n, batch in enumerate(tokens.split(10)):  # scores are needed of the first ten alone
        for layer in tp.capture(model, batch, scores=n == 0):
            parts = moments.setdefault(layer.layer, [])
            parts += [Moments.from_qk(q, k, layer.spec.rotary) for q, k in zip(layer.q, layer.k, strict=True)]
            if len(parts) == 10:
                groups = layer.q.shape[2] // layer.k.shape[2]
                found[layer.layer] = {
                    **of_scores(layer.scores.float()),
                    "similarity of keys": key_similarity(layer.k).repeat_interleave(groups),
                }
            if len(parts) == 30:
                found[layer.layer] |= of_moments(moments.pop(layer.layer), layer.spec.require_scale())
    frames = {layer: pd.DataFrame({name: x.tolist() for name, x in of.items()}) for layer, of in found.items()}
    return pd.concat(frames, names=["layer", "head"]).groupby("layer").mean().reset_index()


def main() -> None:
    torch.set_num_threads(1)
    model = tp.load_model("smollm2")
    tokens = texts(model)
    done = set(pd.read_csv(CSV)["model"]) if CSV.exists() else set()
    for name in ["trained", *(f"random {seed}" for seed in SEEDS)]:
        if name in done:
            continue
        one = model if name == "trained" else next(tp.random_control(model, [int(name.split()[1])]))
        table = measure(one, tokens).round(4)
        table.insert(0, "model", name)
        table.to_csv(CSV, mode="a", header=not CSV.exists(), index=False)


if __name__ == "__main__":
    main()
