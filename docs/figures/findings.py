"""The findings of README on a text that everyone has:

    python docs/figures/findings.py smollm2   # or gemma3-270m; ten minutes of two cores

README's numbers are of speeches that are not in this repository. This script measures the same on the demo text, which
is: eight parts of 256 tokens, each behind its BOS, whose hash it prints. It writes ``out/findings_NAME.csv``: a row for
each number, with the call that gives it. Random copies are one of each kind, so expect README's order, not its digits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from real_models import losses, mean_and_error
from torch import Tensor

import tl_posdisent as tp

TEXTS, LENGTH, HEADS = 8, 256, 16
KINDS = ("random", "shuffled", "random_qk")
HEAD = ["layer", "head"]
Row = tuple[str, float, float, str]  # what, its value, its standard error (NaN if it has none), the call


def demo_texts(model: Any, n: int = TEXTS, length: int = LENGTH) -> Tensor:
    """``[n, length]``: consecutive parts of the demo text, each behind its BOS."""
    ids = model.to_tokens(tp.demo_text(), truncate=False)[0]
    length = min(length, 1 + (len(ids) - 1) // n)
    parts = ids[1 : 1 + n * (length - 1)].view(n, length - 1)
    return torch.cat([ids[:1].expand(n, 1), parts], 1)


def scores(model: Any, texts: Tensor) -> Iterator[Row]:
    """Additivity of the model, and of a copy of each kind."""
    copies = {kind: next(tp.random_control(model, [0], weights=kind)) for kind in KINDS}  # type: ignore[arg-type]
    for name, m in {"trained": model, **copies}.items():
        r = tp.additivity(m, texts, progress=False)["r_held_out"].mean()
        yield f"r with the profile of other texts, {name}", r, torch.nan, 'additivity(model, texts)["r_held_out"]'
    for name, m in {"trained": model, "random": copies["random"]}.items():
        r = tp.controlled_distance(m, texts[:2], progress=False)["r_two_axis"].mean()
        yield f"r at controlled distances, {name}", r, torch.nan, 'controlled_distance(model, texts[:2])["r_two_axis"]'


def positions(model: Any, texts: Tensor) -> Iterator[Row]:
    """The loss that two interventions on all layers add."""
    base = losses(model, texts, [])
    for name, call in {
        "every distance 5": "dummy_distance(model, 5)",
        "distances at most 16": "remap_distance(model, lambda d: d.clamp(max=16))",
    }.items():
        hooks = tp.dummy_distance(model, 5) if "5" in name else tp.remap_distance(model, lambda d: d.clamp(max=16))
        added = losses(model, texts, hooks) - base
        yield f"added loss, {name}", *mean_and_error("added", added).values(), call


def heads(model: Any, texts: Tensor, n: int = HEADS) -> Iterator[Row]:
    """With every distance 5, what the distances of n heads give back: chosen on two texts, measured on the others."""
    effects = tp.head_effects(model, texts[:2], tp.dummy_distance(model, 5), exact=0, draws=8, progress=False)
    ranked = [(int(a), int(b)) for a, b in effects.sort_values("curvature", ascending=False)[HEAD].to_numpy()]
    order = torch.randperm(len(ranked), generator=torch.Generator().manual_seed(0)).tolist()
    rest = texts[2:]
    collapsed = losses(model, rest, tp.dummy_distance(model, 5))
    for name, some in {"of largest effect": ranked[:n], "drawn at random": [ranked[i] for i in order[:n]]}.items():
        others = [head for head in ranked if head not in some]
        back = collapsed - losses(model, rest, tp.dummy_distance(model, 5, heads=others))
        error = (back.std() / len(back) ** 0.5).item()
        yield (
            f"nats given back by {n} heads {name}",
            back.mean().item(),
            error,
            "dummy_distance(model, 5, heads=others)",
        )


def attention(model: Any, texts: Tensor) -> Iterator[Row]:
    """What is kept of what attention adds to the mean outputs: all heads at once, fitted to half of the texts."""
    half = len(texts) // 2
    options: dict[str, Any] = {"rungs": ["static", "banded"], "controls": [], "unit": "all", "progress": False}
    table = tp.attention_ladder(model, texts[:half], heldout=texts[half:], **options).set_index("rung")
    for rung in table.index.intersection(options["rungs"]):
        found = table.loc[rung]
        call = f'attention_ladder(model, texts[:4], heldout=texts[4:], unit="all", rungs=["{rung}"])'
        yield f"attention kept, {rung}", float(found["recovered_mean"]), float(found["se_mean"]), call


FINDINGS = (scores, positions, heads, attention)


def table_of(model: Any, texts: Tensor) -> pd.DataFrame:
    rows = []
    for finding in FINDINGS:
        for row in finding(model, texts):
            print(f"{row[0]}: {row[1]:.2f}" + (f" ± {row[2]:.2f}" if row[2] == row[2] else ""), flush=True)
            rows.append(row)
    return pd.DataFrame(rows, columns=["finding", "value", "standard_error", "call"])


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    model = tp.load_model(name)
    texts = demo_texts(model)
    digest = hashlib.sha256(texts.numpy().tobytes()).hexdigest()[:12]
    print(f"{name}, {texts.shape[0]} texts of {texts.shape[1]} tokens of the demo text, SHA-256 of the ids {digest} …")
    path = Path("out", f"findings_{name}.csv")
    path.parent.mkdir(exist_ok=True)
    table_of(model, texts).round(4).to_csv(path, index=False)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
