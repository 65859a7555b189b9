"""What position does in SmolLM2-135M-Instruct and Gemma 3 270M (4-bit weights, dequantised): the tables behind the
pages, one csv per study, in ``docs/figures/smollm2/`` and ``docs/figures/gemma3/``.

    python docs/figures/real_models.py heads copying             # of SmolLM2; by default all studies
    python docs/figures/real_models.py gemma3-270m heads     # minutes of one core each

Texts: the first 256 tokens of speeches of 2001 to 2021 from the folder that ``POSDISENT_DATA`` names.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import head_effects
import looks
import needle_distances
import pandas as pd
import retrieval
import score_terms
import stories
import text_needed
import torch
import trained_and_random
import without_rotation
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.hooks import applied

FOLDER = Path(__file__).with_name("smollm2")
LENGTH = 256


def texts(model: Any, n: int, length: int | None = None, skip: int = 0) -> Tensor:
    """``[n, pos]``: the beginnings of n speeches, each behind its BOS."""
    speeches = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode().split("\f")
    return torch.stack([model.to_tokens(speech)[0, : length or LENGTH] for speech in speeches[skip : skip + n]])


def _log_p(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


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


LADDER = ["first_token", "distance", "distance+sink", "static", "additive"]


IDLE = ((18, 8), (7, 2), (3, 3), (8, 1), (1, 0), (16, 0))
# L1H0, L8H1, L19H3, and 21 others drawn at random.
DRAWN = ((1, 0), (2, 3), (4, 2), (5, 4), (5, 6), (8, 0), (8, 1), (8, 5), (12, 5), (14, 4), (14, 8), (16, 2))
DRAWN += ((17, 4), (17, 7), (19, 0), (19, 3), (20, 6), (22, 2), (23, 3), (24, 2), (27, 4), (27, 8), (29, 0), (29, 3))


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


STUDIES: list[Callable[..., pd.DataFrame]] = [heads, copying, idle, measures, rounding]
STUDIES += [head_effects.largest_effects]
STUDIES += [text_needed.text_needed, text_needed.draws_needed, score_terms.score_terms]
STUDIES += [without_rotation.without_rotation, without_rotation.needles, without_rotation.word_order]
STUDIES += [looks.looks, retrieval.retrieval_scores, retrieval.retrieval_knockout, retrieval.retrieval_losses]
STUDIES += [retrieval.retrieval_rotation, needle_distances.retrieval_distances]
OPTIONS: dict[str, dict[str, Any]] = {  # of the larger model less, as it takes twice as long
    "gemma3": {
        "without_rotation": {"length": 128, "draws": 2, "edges": (1, 64, 256, 512), "single": 0},
        "needles": {"pairs": 8},
        "retrieval_knockout": {"lengths": (256,), "pairs": 8},
        "retrieval_losses": {"pairs": 8, "draws": 2, "texts": 3},
        "retrieval_rotation": {"lengths": (256,), "pairs": 8},
        "retrieval_distances": {"lengths": (256,), "pairs": (8,), "seeds": (2,)},
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
