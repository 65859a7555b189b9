"""Which statistic of additivity separates a trained language model from which random weights? SmolLM2-135M-Instruct
(4-bit weights, dequantised; instruction-tuned) beside copies of it with random weights, on two sets of ten texts; and
Gemma 3 270M (base, 4-bit weights) beside fewer, on one.

    python docs/figures/trained_and_random.py               # about an hour on one core; goes on from its two csv files
    python docs/figures/trained_and_random.py gemma3-270m   # half an hour; csv files in docs/figures/gemma3/

Texts: the first 256 tokens of ten speeches of 2001 to 2021, and of ten articles of WikiText-2's test set, read from the
folder that ``POSDISENT_DATA`` names. Copies: all weights drawn at the scale that the model's configuration
publishes (1/24) and at transformers' default (0.02), also with the outputs of attention and MLP divided by √(2 layers),
as in GPT-2 (not for Gemma, which normalises these outputs); weights shuffled within each matrix; only queries and keys
drawn at random.

``trained_and_random.csv`` has means over texts and heads by layer, ``trained_and_random_texts.csv`` means over layers
and heads by text.
"""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import stories
import torch
from torch import Tensor

import tl_posdisent as tp

LENGTH, N = 256, 10
CSV = Path(__file__).with_suffix(".csv")
BY_TEXT = CSV.with_stem(f"{CSV.stem}_texts")
SEEDS = {"speeches": 5, "WikiText": 2}
SEEDS_GEMMA = {"speeches": 3}
SCALES = {"1/24": 1 / 24, "0.02": 0.02}
OF_FITS = {"r": "r, one text", "r_held_out": "r, profile of other texts", "r_no_distance": "r, no distance"}
CONTROLLED = {"r_two_axis": "controlled two_axis", "r_three_axis": "controlled three_axis"}
KINDS = [
    *(("random", scale) for scale in SCALES),
    ("shuffled", ""),
    ("random_qk", "1/24"),
    *(("random, outputs divided", scale) for scale in SCALES),
]
KINDS_GEMMA = [("random", "0.02"), ("shuffled", ""), ("random_qk", "0.02")]  # 0.02 is what its configuration states


def texts(model: Any) -> Tensor:
    """``[30, pos]``: the first parts of ten speeches, then the second, then the third; each behind its BOS."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    ids = [model.to_tokens(speech)[0] for speech in speeches[:N]]
    rest = LENGTH - 1
    parts = [torch.cat([row[:1], row[1 + n * rest : 1 + (n + 1) * rest]]) for n in range(3) for row in ids]
    return torch.stack(parts)


def articles(model: Any, n: int = N) -> Tensor:
    """``[n, pos]``: the beginnings of articles of WikiText-2's test set, without their titles, each behind its BOS."""
    wiki = gzip.decompress(stories.data_file("wikitext2-test.txt.gz").read_bytes()).decode()
    bodies = re.split(r"\n = [^=]+ = \n", f"\n{wiki}")[1:]
    ids = (model.to_tokens(body.strip())[0] for body in bodies)
    return torch.stack([row[:LENGTH] for row in ids if len(row) >= LENGTH][:n])


def key_similarity(k: Tensor) -> Tensor:
    """``[text, kv_head]``: mean cosine of the keys of two positions of one text, the first position left out."""
    unit = torch.nn.functional.normalize(k[:, 1:].double(), dim=-1)
    n = unit.shape[1]
    return (unit.sum(1).square().sum(-1) - n) / (n * (n - 1))


def measure(model: Any, tokens: Tensor) -> pd.DataFrame:
    """One row per layer and text, means over heads; columns of all texts together are the same in each."""
    fits = tp.additivity(model, tokens, progress=False).rename(columns=OF_FITS)
    index = ["layer", "batch"]
    table = fits.groupby(index)[list(OF_FITS.values())].mean()
    singles = [
        tp.controlled_distance(model, text[None], progress=False).assign(batch=n) for n, text in enumerate(tokens)
    ]
    table[[f"{name}, one text" for name in CONTROLLED.values()]] = (
        pd.concat(singles).groupby(index)[list(CONTROLLED)].mean()
    )
    pooled = tp.controlled_distance(model, tokens, progress=False).groupby("layer")[list(CONTROLLED)].mean()
    pooled = pooled.rename(columns={old: f"{new}, 10 texts" for old, new in CONTROLLED.items()})
    pooled["r, 10 texts"] = tp.additivity(model, tokens, pool=True, progress=False).groupby("layer")["r"].mean()
    keys, explained = {}, {}
    for layer in tp.capture(model, tokens):
        keys |= {(layer.layer, n): x.item() for n, x in enumerate(key_similarity(layer.k).mean(1))}
        explained[layer.layer] = tp.fit_attention(layer.scores[:2].float()).explained.mean().item()
    table["similarity of keys"] = pd.Series(keys)
    return table.join(pooled.assign(**{"attention explained, 2 texts": pd.Series(explained)}), on="layer")


@torch.no_grad()
def copy_of(model: Any, kind: str, scale: str, seed: int) -> Any:
    """A copy of one of ``KINDS``."""
    if kind != "random, outputs divided":
        options = {"std": SCALES[scale]} if scale else {}
        return next(tp.random_control(model, [seed], weights=kind, **options))
    copy = next(tp.random_control(model, [seed], std=SCALES[scale]))
    for block in copy.blocks:
        for weight in (block.attn.W_O, block.mlp.W_out):
            weight.div_((2 * model.cfg.n_layers) ** 0.5)
    return copy


def append(table: pd.DataFrame, path: Path) -> None:
    table.round(4).to_csv(path, mode="a", header=not path.exists(), index=False)


def main() -> None:
    torch.set_num_threads(1)
    gemma = "gemma3-270m" in sys.argv
    model = tp.load_model("gemma3-270m") if gemma else tp.load_model("smollm2", backend="hooked")
    seeds, kinds = (SEEDS_GEMMA, KINDS_GEMMA) if gemma else (SEEDS, KINDS)
    by_layer, by_text = (path.parent / "gemma3" / path.name if gemma else path for path in (CSV, BY_TEXT))
    sets = {"speeches": texts(model)[:N], "WikiText": articles(model)}
    done = set()
    if by_text.exists():
        done = set(
            pd.read_csv(by_text, dtype={"std": str})
            .fillna("")[["weights", "std", "seed", "texts"]]
            .apply(tuple, axis=1)
        )
    for kind, scale, seed in [("trained", "", 0), *((*kind, seed) for seed in range(5) for kind in kinds)]:
        wanted = {name: tokens for name, tokens in sets.items() if seed < seeds.get(name, 0)}
        wanted = {name: tokens for name, tokens in wanted.items() if (kind, scale, seed, name) not in done}
        if not wanted:
            continue
        one = model if kind == "trained" else copy_of(model, kind, scale, seed)
        for name, tokens in wanted.items():
            table = measure(one, tokens)
            names = {"texts": name, "weights": kind, "std": scale, "seed": seed}
            append(
                pd.DataFrame(names, index=range(model.cfg.n_layers)).join(table.groupby("layer").mean().reset_index()),
                by_layer,
            )
            of_text = table.groupby("batch").mean().reset_index().rename(columns={"batch": "text"})
            of_texts = [column for column in of_text if not column.endswith(("10 texts", "2 texts"))]
            append(pd.DataFrame(names, index=range(len(tokens))).join(of_text[of_texts]), by_text)
            print(names, table.mean().round(3).to_dict(), flush=True)


if __name__ == "__main__":
    main()
