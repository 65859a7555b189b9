"""Which heads does fine-tuning change? SmolLM2, a few minutes of training on speeches, and `compare_heads`."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import torch
from shared.texts import demo_texts, parts

import tl_posdisent as tp

COLUMNS = ("contribution", "where_part", "what_part", "neither_part")


def table(model: Any, texts: int = 8, length: int = 96, steps: int = 60, batch: int = 4) -> pd.DataFrame:
    """One row per head that surely changed between the model and a copy that was trained on other parts of speeches."""
    small = model.cfg.d_vocab < 10_000
    n = texts + steps * batch
    both = demo_texts(texts + 8, length) if small else parts(model, "speeches", n, length)
    measured, seen = both[:texts], both[texts:]
    trained = train(copy.deepcopy(model), seen, steps, batch)
    changes = tp.compare_heads(model, trained, measured, exact=12, progress=False)
    print(changes.attrs["statement"], flush=True)
    numbers = [f"{name}_{end}" for name in COLUMNS for end in ("before", "change", "change_se", "q")]
    kept = ["layer", "head", "changed", "verdict_before", "verdict_after", "measured", *numbers]
    return pd.DataFrame(changes.loc[changes["changed"] != "", kept]).assign(steps=steps, texts=texts, length=length)


def train(model: Any, tokens: torch.Tensor, steps: int, batch: int, rate: float = 5e-5) -> Any:
    """Train all weights on batches of texts in turn, by AdamW, and return the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(tokens)
        optimizer.zero_grad()
        loss = model(tokens[rows], return_type="loss")
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    optimizer.zero_grad()
    return model
