"""Which heads does fine-tuning change? SmolLM2 after some minutes of training, beside itself, by `compare_heads`."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import torch
from shared.texts import Source, demo_texts, parts, parts_of, training_speeches
from torch import Tensor

import tl_posdisent as tp

SOURCES: tuple[Source, ...] = ("speeches", "wikitext")
COLUMNS = ("contribution", "where_part", "what_part", "neither_part")


def table(model: Any, texts: int = 12, length: int = 96, steps: int = 60, batch: int = 4) -> pd.DataFrame:
    """One row per head that surely changed by a training on speeches, in other speeches, and in WikiText."""
    small = model.cfg.d_vocab < 10_000
    if small:
        measured, seen = {"demo": demo_texts(texts, length)}, demo_texts(20, length)[texts:]
    else:
        measured = {source: parts(model, source, texts, length) for source in SOURCES}
        seen = parts_of(model, training_speeches()[::2], steps * batch, length)
    trained = train(copy.deepcopy(model), seen, steps, batch)
    tables = {source: changed(model, trained, tokens) for source, tokens in measured.items()}
    found = pd.concat(tables, names=["measured_in"]).reset_index("measured_in")
    return found.assign(steps=steps, texts=texts, length=length)


def changed(before: Any, after: Any, tokens: Tensor) -> pd.DataFrame:
    """The rows of heads that surely changed; prints the sentence, the losses, and how verdicts moved."""
    losses = [x(tokens.to(x.cfg.device), return_type="loss").item() for x in (before, after)]
    changes = tp.compare_heads(before, after, tokens, progress=False)
    print(f"loss {losses[0]:.3f} before, {losses[1]:.3f} after. {changes.attrs['statement']}", flush=True)
    rows = pd.DataFrame(changes[changes["changed"] != ""])
    print(rows.groupby(["verdict_before", "verdict_after"]).size().to_string(), flush=True)
    numbers = [f"{name}_{end}" for name in COLUMNS for end in ("before", "change", "change_se", "q")]
    return rows[["layer", "head", "changed", "verdict_before", "verdict_after", "measured", *numbers]]


def train(model: Any, tokens: Tensor, steps: int, batch: int, rate: float = 5e-5) -> Any:
    """Train all weights on batches of texts in turn, by AdamW, and return the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(tokens)
        optimizer.zero_grad()
        loss = model(tokens[rows].to(model.cfg.device), return_type="loss")
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    optimizer.zero_grad()
    return model
